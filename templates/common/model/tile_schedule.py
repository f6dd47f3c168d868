"""Tiles of each program, and the largest time of one program.

Under a causal mask, tiles have different lengths, and their order decides when the last one ends. The caller
chooses the unit of costs.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import msgspec

from flashtune.core.problem import Problem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# With more tiles, only the first groups of heads are simulated, or none.
MAX_TILES = 2**14
# Fraction of the last programs' time without concurrent programs: on average they start at different times.
LAST_SHARE = 0.29
# Approximate number of concurrent programs of an SM.
RESIDENT = 2
# Equal programs that start together end together, up to this many rounds.
ROUNDS_IN_STEP = 2


class Tiling(msgspec.Struct, frozen=True):
    """The tiles of a problem, on which their order depends."""

    problem: Problem
    rows: int  # Queries of a tile.
    columns: int  # Keys of a block.
    pack: int  # Heads that share a tile.

    @property
    def heads(self) -> int:
        """Packs of heads of all sequences."""
        return self.problem.batch * self.problem.kv_heads * self.packs

    @property
    def packs(self) -> int:
        """Packs of heads of one KV head."""
        return math.ceil(self.problem.group_size / self.pack)

    @property
    def tiles(self) -> int:
        """Tiles of one pack of heads."""
        return math.ceil(self.problem.seqlen_q / self.rows)

    @property
    def total(self) -> int:
        """All tiles."""
        return self.heads * self.tiles


class TileCost(msgspec.Struct, frozen=True):
    """The cost of a block of keys, and the cost of a tile without its blocks."""

    block: float
    tile: float


def blocks(tiling: Tiling, tiles: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
    """Returns the blocks of keys of some or all tiles of a head, at least one each: [tiles]."""
    import numpy as np

    problem = tiling.problem
    tiles = np.arange(tiling.tiles) if tiles is None else tiles
    last_query = (tiles + 1) * tiling.rows
    seen = np.full(len(tiles), problem.seqlen_kv)
    left, right, chunk = problem.sight.left, problem.sight.right, problem.chunk
    if right is not None:
        seen = np.minimum(last_query + problem.diagonal + right, problem.seqlen_kv)
    first = np.maximum(tiles * tiling.rows + problem.diagonal, 0)
    if chunk and right is None:
        last = np.minimum(last_query, problem.seqlen_q) - 1 + problem.diagonal
        seen = np.minimum(seen, (last // chunk + 1) * chunk)
    counted: NDArray[np.float64] = np.maximum(np.ceil(seen / tiling.columns), 1.0)
    if left is not None or chunk:
        start = 0 if left is None else np.maximum(tiles * tiling.rows + problem.diagonal - left, 0)
        start = np.maximum(start, first // chunk * chunk) if chunk else start
        hidden = start // tiling.columns
        counted -= np.minimum(hidden, counted - 1.0)
    return np.maximum(counted * problem.block_share, 1.0)


def have_equal_length(problem: Problem) -> bool:
    """Returns whether every query sees all keys, so that all tiles have equally many blocks."""
    return problem.sight.left is None and problem.sight.right is None and not problem.chunk


class Extremes(msgspec.Struct, frozen=True):
    """Blocks of the tiles of a head: shortest, mean and longest."""

    least: float
    mean: float
    most: float


@functools.lru_cache(maxsize=4096)
def extremes(tiling: Tiling) -> Extremes:
    """Returns the extremes of a head's tiles."""
    if have_equal_length(tiling.problem):
        every = max(1.0, math.ceil(tiling.problem.seqlen_kv / tiling.columns) * tiling.problem.block_share)
        return Extremes(every, every, every)
    import numpy as np

    # Of very many tiles, an evenly spaced sample with the first and the last.
    some = np.linspace(0, tiling.tiles - 1, min(tiling.tiles, MAX_TILES)).astype(np.int64)
    counted = blocks(tiling, some)
    return Extremes(float(counted.min()), float(counted.mean()), float(counted.max()))


def tile_of(
    index: NDArray[np.int64], num_programs: int, tiling: Tiling, head_swizzle: int, order: str
) -> NDArray[np.int64]:
    """Returns the tile number within its head of the index-th tile of a persistent kernel."""
    import numpy as np

    total = tiling.total
    if order == "serpentine":
        round_index = index // num_programs
        backwards = (round_index % 2 == 1) & ((round_index + 1) * num_programs <= total)
        index = np.where(backwards, (2 * round_index + 1) * num_programs - 1 - index, index)
    head_swizzle = min(head_swizzle or tiling.heads, tiling.heads)
    first = index // (head_swizzle * tiling.tiles) * head_swizzle
    width = np.minimum(head_swizzle, tiling.heads - first)
    tile: NDArray[np.int64] = index % (head_swizzle * tiling.tiles) // width
    if order == "linear":
        return tile
    tile = tiling.tiles - 1 - tile
    chunk = tiling.problem.chunk
    if not chunk or chunk % tiling.rows or tiling.problem.packed:
        return tile
    # The longest tiles of all whole chunks come before the second longest.
    per_chunk = chunk // tiling.rows
    chunks = tiling.tiles // per_chunk
    ordered = tile % max(chunks, 1) * per_chunk + tile // max(chunks, 1)
    return np.where(tile < chunks * per_chunk, ordered, tile)


def persistent_programs(total: int, balanced_grid: bool, num_sms: int) -> int:
    """Returns the number of persistent programs; `balanced_grid`: the fewest with as many rounds."""
    if balanced_grid:
        return math.ceil(total / math.ceil(total / num_sms))
    return min(total, num_sms)


def largest_load(tiling: Tiling, num_programs: int, head_swizzle: int, order: str, cost: TileCost) -> float:
    """Returns the largest cost of a persistent program."""
    if have_equal_length(tiling.problem):
        rounds = math.ceil(tiling.total / num_programs)
        return rounds * (extremes(tiling).mean * cost.block + cost.tile)
    loads = _loads(tiling, num_programs, head_swizzle, order)
    return float((loads.blocks * cost.block + loads.tiles * cost.tile).max())


class _Loads(msgspec.Struct, frozen=True):
    """Blocks and tiles of each program, [num_programs]."""

    blocks: NDArray[np.floating]
    tiles: NDArray[np.floating]


@functools.lru_cache(maxsize=512)
def _loads(tiling: Tiling, num_programs: int, head_swizzle: int, order: str) -> _Loads:
    import numpy as np

    heads = min(head_swizzle or tiling.heads, tiling.heads)
    counted = tiling.total
    if counted > MAX_TILES:
        # Groups of heads have equal loads, so the first ones represent all.
        counted = MAX_TILES // (heads * tiling.tiles) * heads * tiling.tiles
    if counted < num_programs:
        # With this many tiles in one order, no program ends much later than the others.
        share = tiling.total / num_programs
        return _Loads(np.array([share * extremes(tiling).mean]), np.array([share]))
    index = np.arange(counted)
    program = index % num_programs
    weights = blocks(tiling)[tile_of(index, num_programs, tiling, head_swizzle, order)]
    scale = tiling.total / counted
    per_program = (np.bincount(program, weights=values) for values in (weights, np.ones(counted)))
    return _Loads(*(scale * loads for loads in per_program))


def greedy_makespan(
    tiling: Tiling,
    num_sms: int,
    longest_first: bool,
    cost: TileCost,
    alone: float,
    resident: int = RESIDENT,
) -> float:
    """Returns the end of the last program if each computes one tile, scheduled greedily.

    Programs of one SM share its units. Costs are those of a program among others. `alone` is the time of a
    program that is alone on an SM, over its time at an equal share of the units.
    """
    statistics = extremes(tiling)
    least, mean, most = (
        cost.block * count + cost.tile for count in (statistics.least, statistics.mean, statistics.most)
    )
    if tiling.total <= num_sms:
        return alone * most
    slots = resident * num_sms
    if least == most and tiling.total <= ROUNDS_IN_STEP * slots:
        whole, rest = divmod(tiling.total, slots)
        last = max(alone, math.ceil(rest / num_sms)) if rest else 0.0
        return (resident * whole + last) * mean
    last = least if longest_first else mean if statistics.least == statistics.most else most
    return max(alone * most, tiling.total / num_sms * mean + alone * LAST_SHARE * last)
