"""HBM traffic that an order of loops causes: how often tiles are read again, and what a cache saves."""

from __future__ import annotations

import msgspec

from flashtune.problem import Causal, Problem
from flashtune.target import Target
from flashtune.templates.family import TrafficItem

# The last-level cache is two partitions that each keep a copy of what both read.
CACHE_COPIES = 2


def streamed_keys(problem: Problem, block_m: int, block_n: int) -> int:
    """Rows of K that the query tiles of one head read in all, when keys stream past queries."""
    tiles = _tiles(problem.seqlen_q, block_m)
    left, right = problem.sight.left, problem.sight.right
    hidden = 0 if left is None else _hidden_keys(problem, tiles, block_m, block_n, left)
    if right is None:
        return tiles * problem.seqlen_kv - hidden
    # Tile t reads whole blocks up to its last query's last key, (t + 1) * block_m + shift keys:
    # none for the first tiles, all of them from some tile on.
    shift = problem.diagonal + right
    blind = min(tiles, max(0, -shift // block_m))
    whole_blocks = (problem.seqlen_kv - 1) // block_n * block_n
    ramp_end = max(blind, min(tiles, (whole_blocks - shift) // block_m))
    blocks = floor_sum(ramp_end - blind, block_n, block_m, (blind + 1) * block_m + shift + block_n - 1)
    return blocks * block_n + (tiles - ramp_end) * problem.seqlen_kv - hidden


def _hidden_keys(problem: Problem, tiles: int, block_m: int, block_n: int, left: int) -> int:
    """Keys of whole blocks before all that a tile sees through a window, over all tiles."""
    # Tile t sees none before t * block_m + shift: none are hidden of the first tiles, all of the last.
    shift = problem.diagonal - left
    whole_blocks = problem.seqlen_kv // block_n
    first = min(tiles, max(0, -(shift // block_m)))
    last = max(first, min(tiles, -((shift - problem.seqlen_kv) // block_m)))
    blocks = floor_sum(last - first, block_n, block_m, first * block_m + shift)
    return (blocks + (tiles - last) * whole_blocks) * block_n


def keys_at_once(problem: Problem, rows: int) -> int:
    """Keys of a head that so many neighbouring queries see."""
    left, right = problem.sight.left, problem.sight.right
    if left is None or right is None:
        return problem.seqlen_kv
    return min(problem.seqlen_kv, left + right + rows)


def unpacked(problem: Problem) -> Problem:
    """Packed sequences as a batch of the longest, as many as there are tokens for; others as they are."""
    if not problem.packed:
        return problem
    sequences = -(-problem.packed // max(1, problem.seqlen_q))
    return msgspec.structs.replace(problem, batch=sequences, packed=0)


def cycled_queries(problem: Problem, block_m: int, block_n: int) -> int:
    """Rows of Q that the key tiles of one head read in all, when queries cycle past keys."""
    if problem.causal is Causal.NONE:
        return _tiles(problem.seqlen_kv, block_n) * problem.seqlen_q
    last_key = min(problem.seqlen_q + problem.diagonal, problem.seqlen_kv)
    tiles = _tiles(last_key, block_n)
    # Key tile s is seen from query s * block_n - diagonal on, rounded down to a whole tile.
    everyone = min(tiles, max(0, problem.diagonal // block_n + 1))
    skipped = floor_sum(tiles - everyone, block_m, block_n, everyone * block_n - problem.diagonal)
    return tiles * problem.seqlen_q - skipped * block_m


def floor_sum(count: int, divisor: int, step: int, start: int) -> int:
    """The sum of (start + step * i) // divisor over i in range(count), in logarithmic time.

    `start` and `step` are not negative. Lengths may be two thousand million, so tiles are not walked.
    """
    total = 0
    sign = 1
    while count > 0:
        total += sign * (count * (count - 1) // 2 * (step // divisor) + count * (start // divisor))
        step, start = step % divisor, start % divisor
        # Count the lattice points under the line by columns instead of rows.
        height = (start + step * (count - 1)) // divisor
        if height == 0:
            break
        total += sign * height * (count - 1)
        sign = -sign
        count, divisor, step, start = height, step, divisor, divisor - start - 1
    return total


def streamed_items(
    problem: Problem, block_m: int, block_n: int, heads_at_once: int, target: Target | None
) -> tuple[TrafficItem, ...]:
    """What the forward pass moves when K and V stream past tiles of queries, in bytes.

    Args:
        problem: What is computed.
        block_m: Queries of a tile.
        block_n: Keys of a block.
        heads_at_once: KV heads that the programs which run at once read.
        target: The GPU; None has no cache.
    """
    size = problem.dtype.itemsize
    both = (problem.head_dim + problem.value_head_dim) * problem.kv_itemsize
    all_heads = problem.batch * problem.heads
    rows = all_heads * problem.seqlen_q
    streamed = all_heads * streamed_keys(problem, block_m, block_n) * both
    name = "k and v read for every tile of queries"
    if stays_in_cache(heads_at_once * keys_at_once(problem, block_m) * both, target):
        name = "k and v read once, then from L2"
        streamed = min(streamed, all_heads // problem.group_size * problem.seqlen_kv * both)
    return (
        TrafficItem("q read once", rows * problem.head_dim * size),
        TrafficItem(name, streamed),
        TrafficItem("out written once", rows * problem.value_head_dim * problem.dtype.out.itemsize),
    )


def stays_in_cache(working_set: int, target: Target | None) -> bool:
    """Whether what running programs read again is still in the last-level cache.

    Args:
        working_set: Bytes that the programs which run at once read over and over.
        target: The GPU; None has no such cache.
    """
    return target is not None and working_set * CACHE_COPIES <= target.l2_bytes


def _tiles(extent: int, block: int) -> int:
    return max(0, -(-extent // block))
