"""HBM traffic of a loop order: repeated reads of tiles, and cache hits."""

import math

import msgspec

from flashtune.core.features.mask_geometry import distinct_keys
from flashtune.core.problem import Bias, Problem
from flashtune.core.target import Target
from flashtune.templates.family import BytesItem, BytesItems

# The last-level cache has two partitions, each with a copy of data that both read.
CACHE_COPIES = 2
# Accuracy of the solved fraction of reads. This close to a ratio of 1, the fraction is linear.
SOLVED = 1e-9
NEAR_ONE = 1e-5
FLOAT32 = 4
EVERY_TILE = "for every tile of queries"
EVERY_BLOCK = "for every block of keys"


def streamed_keys(problem: Problem, block_m: int, block_n: int) -> int:
    """Returns the rows of K that all query tiles of one head read, in a loop over keys."""
    tiles = _tiles(problem.seqlen_q, block_m)
    left, right = problem.sight.left, problem.sight.right
    hidden = 0 if left is None else _hidden_keys(problem, tiles, block_m, block_n, left)
    if right is None:
        return tiles * problem.seqlen_kv - hidden
    # Tile t reads whole blocks up to its last query's last key, (t + 1) * block_m + shift keys: none for the
    # first tiles, all of them from some tile on.
    shift = problem.diagonal + right
    blind = min(tiles, max(0, -shift // block_m))
    whole_blocks = (problem.seqlen_kv - 1) // block_n * block_n
    ramp_end = max(blind, min(tiles, (whole_blocks - shift) // block_m))
    blocks = floor_sum(ramp_end - blind, block_n, block_m, (blind + 1) * block_m + shift + block_n - 1)
    return blocks * block_n + (tiles - ramp_end) * problem.seqlen_kv - hidden


def _hidden_keys(problem: Problem, tiles: int, block_m: int, block_n: int, left: int) -> int:
    """Returns the keys of whole blocks before the windows of all tiles."""
    # Tile t sees none before t * block_m + shift: none are hidden from the first tiles, all from the last.
    shift = problem.diagonal - left
    whole_blocks = problem.seqlen_kv // block_n
    first = min(tiles, max(0, -(shift // block_m)))
    last = max(first, min(tiles, -((shift - problem.seqlen_kv) // block_m)))
    blocks = floor_sum(last - first, block_n, block_m, first * block_m + shift)
    return (blocks + (tiles - last) * whole_blocks) * block_n


def keys_at_once(problem: Problem, rows: int) -> int:
    """Returns the keys of a head that this many neighbouring queries see."""
    left, right = problem.sight.left, problem.sight.right
    if left is None or right is None:
        return problem.seqlen_kv
    return min(problem.seqlen_kv, left + right + rows)


def unpacked(problem: Problem) -> Problem:
    """Returns a varlen batch as a dense batch with as many tokens; others unchanged.

    Sequences are as long as the geometric mean of the mean and the longest length. Long ones have most of the
    pairs, but the longest length may be a bound that none reaches. Packed keys are shorter by the same ratio.
    Lengths of keys in pages or in a cache do not follow from the tokens.
    """
    if not problem.packed:
        return problem
    longest = max(1, problem.seqlen_q)
    queries = min(longest, math.ceil(math.sqrt(mean_queries(problem) * longest)))
    keys = problem.seqlen_kv
    if not (problem.page_size or problem.kv_lengths):
        keys = -(-keys * queries // longest)
    sequences = -(-problem.packed // queries)
    return msgspec.structs.replace(problem, batch=sequences, seqlen_q=queries, seqlen_kv=keys, packed=0)


def mean_queries(problem: Problem) -> int:
    """Returns the mean number of queries of a sequence, rounded up and at most the longest."""
    if not problem.packed:
        return problem.seqlen_q
    return min(problem.seqlen_q, -(-problem.packed // max(1, problem.batch)))


def cycled_queries(problem: Problem, block_m: int, block_n: int) -> int:
    """Returns the rows of Q that all key tiles of one head read, in a loop over queries."""
    left, right = problem.sight.left, problem.sight.right
    hidden = 0 if left is None else _hidden_queries(problem, block_m, block_n, left)
    if right is None:
        return _tiles(problem.seqlen_kv, block_n) * problem.seqlen_q - hidden
    shift = problem.diagonal + right
    tiles = _tiles(min(problem.seqlen_q + shift, problem.seqlen_kv), block_n)
    # Key tile s is visible from query s * block_n - shift on, rounded down to a whole tile.
    everyone = min(tiles, max(0, shift // block_n + 1))
    skipped = floor_sum(tiles - everyone, block_m, block_n, everyone * block_n - shift)
    return max(0, tiles * problem.seqlen_q - skipped * block_m - hidden)


def _hidden_queries(problem: Problem, block_m: int, block_n: int, left: int) -> int:
    """Returns the queries in whole tiles whose windows begin after a tile's keys, over all tiles of keys."""
    # Key tile s is visible before query (s + 1) * block_n + shift, and all queries see the last tile's keys.
    shift = left - problem.diagonal
    first = min(_tiles(problem.seqlen_kv, block_n), max(0, -shift // block_n))
    end = min(_tiles(problem.seqlen_kv, block_n), max(first, -((shift - problem.seqlen_q) // block_n) - 1))
    seen = floor_sum(end - first, block_m, block_n, (first + 1) * block_n + shift + block_m - 1)
    return max(0, end * problem.seqlen_q - seen * block_m)


def floor_sum(count: int, divisor: int, step: int, start: int) -> int:
    """Returns the sum of (start + step * i) // divisor over i in range(count), in logarithmic time.

    `start` and `step` are not negative. Lengths may be two thousand million, so there is no loop over tiles.
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


class AtOnce(msgspec.Struct, frozen=True):
    """Concurrent programs, and the heads whose rows they read repeatedly."""

    programs: float  # Concurrent programs.
    heads: float  # Heads between two reads of the same row.
    neighbours: float = 1  # Neighbouring programs that read the same head at the same time.

    @property
    def readers(self) -> float:
        """Concurrent programs that read the same head together, at least one."""
        return max(1.0, self.programs / max(1.0, min(self.heads, self.programs / self.neighbours)))


def one_tile_each(
    heads: int, extent: int, block: int, target: Target | None, *, inner: bool = False, group: int = 1
) -> AtOnce:
    """Counts the concurrent programs of a launch in which each computes one tile.

    `heads` are those of all sequences with tiles, and `group` those that read the same head's rows. Without a
    target, one program runs. `inner` means that neighbouring programs compute different heads.
    """
    programs = min(target.sm_count if target else 1, heads * _tiles(extent, block))
    if inner:
        return AtOnce(programs, heads / group, group)
    # Tiles are not rounded up here, so the working set is continuous in the extent.
    return AtOnce(programs, max(1.0, min(heads, programs / max(1.0, extent / block) + 1) / group))


def tiles_of_queries(problem: Problem, block_m: int, target: Target | None, *, inner: bool) -> AtOnce:
    """Counts concurrent programs and their KV heads if each computes a tile of queries of a head."""
    heads, group = problem.batch * problem.heads, problem.group_size
    return one_tile_each(heads, problem.seqlen_q, block_m, target, inner=inner, group=group)


def missed(working_set: float, target: Target | None) -> float:
    """Returns the fraction of repeated reads that miss the last-level cache.

    Concurrent programs read the working set repeatedly. Without a target there is no cache.
    """
    return 1.0 if target is None else missed_at_random(working_set * CACHE_COPIES / target.l2_bytes)


def missed_at_random(ratio: float) -> float:
    """Returns the fraction of reads that miss a cache with random replacement, in a loop over all data.

    The fraction m solves m = 1 - exp(-m * ratio): a line is found again if none of the misses since replaced
    it. It is 0 up to a ratio of 1, and continuous. `ratio` is the size of the data over that of the cache.
    """
    if ratio <= 1 + NEAR_ONE:
        return max(0.0, 2 * (ratio - 1))
    share, change = 1.0, 1.0
    # Newton's method. The function is convex, so the fraction decreases to the solution.
    while change > SOLVED:
        reused = math.exp(-share * ratio)
        change = (share - 1 + reused) / (1 - ratio * reused)
        share -= change
    return share


def moved(read: float, once: float, share: float) -> int:
    """Returns the bytes from HBM: first reads, and the fraction of repeated ones that misses."""
    first = min(read, once)
    return round(first + (read - first) * share)


def how_often(share: float, each: str) -> str:
    """Returns text for the number of reads of each row, from the fraction of repeated reads that misses."""
    if not share:
        return "once, then from L2"
    return each if share == 1 else f"{each}, in part from L2"


def streamed_items(
    problem: Problem,
    block_m: int,
    block_n: int,
    at_once: AtOnce,
    target: Target | None,
    packed_heads: int = 1,
) -> BytesItems:
    """Returns the forward traffic of K and V streamed past tiles of queries, in bytes.

    A tile of `block_m` rows has queries of `packed_heads` heads. Without a target there is no cache.
    """
    rows = problem.batch * problem.heads * problem.seqlen_q
    return (
        BytesItem("q read once", rows * problem.head_dim * problem.dtype.itemsize),
        streamed_item(problem, block_m, block_n, at_once, target, packed_heads),
        BytesItem("out written once", rows * problem.value_head_dim * problem.dtype.out.itemsize),
    )


def streamed_item(
    problem: Problem,
    block_m: int,
    block_n: int,
    at_once: AtOnce,
    target: Target | None,
    packed_heads: int = 1,
) -> BytesItem:
    """Returns the bytes of keys and values streamed past tiles of queries, as in `streamed_items`.

    Programs that read the same head at once share its keys: HBM is read once for all of them.
    """
    both = (problem.head_dim + problem.value_head_dim) * problem.kv_itemsize
    all_heads = problem.batch * problem.heads
    queries = block_m // packed_heads
    share = missed(at_once.heads * keys_at_once(problem, queries) * both, target)
    packs = -(-problem.group_size // packed_heads)
    streams = problem.batch * problem.kv_heads * packs * streamed_keys(problem, queries, block_n)
    streamed: float = streams * problem.block_share * both
    once = min(streamed, all_heads // problem.group_size * problem.seqlen_kv * both)
    if target is not None:
        streamed = max(once, streamed / at_once.readers)
    often = "once" if streamed <= once else how_often(share, EVERY_TILE)
    return BytesItem(f"k and v read {often}", moved(streamed, once, share))


def cycled_rows(
    problem: Problem, block_m: int, block_n: int, row_bytes: int, at_once: AtOnce, target: Target | None
) -> tuple[int, str]:
    """Returns the rows read from HBM in loops over queries for tiles of keys, and the number as text.

    `row_bytes` are the bytes of each row that are read or written repeatedly. Without a target there is no
    cache.
    """
    all_heads = problem.batch * problem.heads
    share = missed(at_once.heads * problem.seqlen_q * row_bytes, target)
    walked: float = all_heads * cycled_queries(problem, block_m, block_n)
    once = min(walked, all_heads * problem.seqlen_q)
    if target is not None:
        walked = max(once, walked / at_once.readers)
    return moved(walked, once, share), how_often(share, EVERY_BLOCK)


def programs_by_key_block(
    problem: Problem, block_n: int, target: Target | None, *, inner: bool = False
) -> AtOnce:
    """Counts concurrent programs and their query heads if each has a block of keys of a KV head."""
    kept = one_tile_each(problem.batch * problem.kv_heads, problem.seqlen_kv, block_n, target, inner=inner)
    # A program iterates over all query heads of its KV head before it reads one of them again.
    return AtOnce(kept.programs, kept.heads * problem.group_size, kept.readers)


def summed_items(
    problem: Problem, block_m: int, block_n: int, width: int, target: Target | None, *, inner: bool = False
) -> BytesItems:
    """Returns the traffic of a backward pass that adds rows of dq to float32 sums of this width, in bytes.

    `inner` means that neighbouring programs compute different heads.
    """
    size = problem.dtype.itemsize
    both = (problem.head_dim + problem.value_head_dim) * size
    heads = problem.batch * problem.heads
    rows, keys = heads * problem.seqlen_q, problem.batch * problem.kv_heads * problem.seqlen_kv
    sums = width * FLOAT32
    row_bytes = both + 2 * FLOAT32 + sums
    at_once = programs_by_key_block(problem, block_n, target, inner=inner)
    walked, often = cycled_rows(problem, block_m, block_n, row_bytes, at_once, target)
    return (
        BytesItem("out and dout read for delta", 2 * rows * problem.value_head_dim * size),
        BytesItem("sums of dq cleared", rows * sums),
        BytesItem("k and v read once, dk and dv written", 2 * keys * both),
        BytesItem(f"q and dout read {often}", walked * (both + 2 * FLOAT32)),
        BytesItem(f"sums of dq added to {often}", walked * sums),
        BytesItem("sums of dq read, dq written", rows * (sums + problem.head_dim * size)),
    )


def split_keys_items(
    problem: Problem, tiles: int, num_splits: int, target: Target | None, *, tensors: str = "k and v"
) -> BytesItems:
    """Returns the traffic of a forward pass over split keys, in bytes.

    Each KV head has this many tiles of rows. `tensors` are those of keys and values, for the items' names.
    """
    rows = (problem.packed or problem.batch * problem.seqlen_q) * problem.heads
    width = problem.head_dim + (0 if problem.mla else problem.value_head_dim)
    keys = problem.batch * problem.kv_heads * distinct_keys(problem.sight) * width * problem.kv_itemsize
    queries = rows * problem.head_dim * problem.dtype.itemsize
    # Tiles of one KV head run concurrently, and a cache holds the data that all of them read.
    often = "once" if tiles == 1 or target else "for every tile of rows"
    items = [
        BytesItem("q read by every part", num_splits * queries),
        BytesItem(f"{tensors} read {often}", keys * (1 if target else tiles)),
    ]
    if num_splits > 1:
        # A part's log-sum-exp, or with a bias its maximum and its sum.
        numbers = 2 if problem.bias is Bias.ADDITIVE else 1
        partial = num_splits * rows * (problem.value_head_dim + numbers) * FLOAT32
        items.append(BytesItem("parts written and read", 2 * partial))
    written = rows * problem.value_head_dim * problem.out_dtype.itemsize
    return (*items, BytesItem("out written once", written))


def _tiles(extent: int, block: int) -> int:
    return max(0, -(-extent // block))
