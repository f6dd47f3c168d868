"""Tiles of each program, and the time of the busiest program.

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

# With more tiles, only the first sections are simulated, or none.
MAX_TILES = 2**14
# Fraction of the last programs' time without concurrent programs: on average they start at different times.
LAST_SHARE = 0.29
# Approximate number of concurrent programs of an SM.
RESIDENT = 2
# Equal programs that start together end together, up to this many rounds.
ROUNDS_IN_STEP = 2


class Tiling(msgspec.Struct, frozen=True):
    """The tiles of a problem, on which their order depends.

    Attributes:
        problem: The problem.
        rows: Queries of a tile.
        columns: Keys of a block.
        pack: Heads that share a tile.
    """

    problem: Problem
    rows: int
    columns: int
    pack: int

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
    left, right = problem.sight.left, problem.sight.right
    if right is not None:
        seen = np.minimum(last_query + problem.diagonal + right, problem.seqlen_kv)
    counted: NDArray[np.float64] = np.maximum(np.ceil(seen / tiling.columns), 1.0)
    if left is not None:
        hidden = np.maximum(tiles * tiling.rows + problem.diagonal - left, 0) // tiling.columns
        counted -= np.minimum(hidden, counted - 1.0)
    return counted


def are_alike(problem: Problem) -> bool:
    """Returns whether every query sees all keys, so that all tiles have equally many blocks."""
    return problem.sight.left is None and problem.sight.right is None


class Extremes(msgspec.Struct, frozen=True):
    """Blocks of the tiles of a head: shortest, mean and longest."""

    least: float
    mean: float
    most: float


@functools.lru_cache(maxsize=4096)
def extremes(tiling: Tiling) -> Extremes:
    """Returns the extremes of a head's tiles."""
    if are_alike(tiling.problem):
        every = float(max(1, math.ceil(tiling.problem.seqlen_kv / tiling.columns)))
        return Extremes(every, every, every)
    import numpy as np

    # Of very many tiles, an evenly spaced sample with the first and the last.
    some = np.linspace(0, tiling.tiles - 1, min(tiling.tiles, MAX_TILES)).astype(np.int64)
    counted = blocks(tiling, some)
    return Extremes(float(counted.min()), float(counted.mean()), float(counted.max()))


def place(
    index: NDArray[np.int64], workers: int, tiling: Tiling, section: int, order: str
) -> NDArray[np.int64]:
    """Returns the tile number within its head of the index-th tile of a persistent kernel."""
    import numpy as np

    total = tiling.total
    if order == "serpentine":
        turn = index // workers
        backwards = (turn % 2 == 1) & ((turn + 1) * workers <= total)
        index = np.where(backwards, (2 * turn + 1) * workers - 1 - index, index)
    section = min(section or tiling.heads, tiling.heads)
    first = index // (section * tiling.tiles) * section
    width = np.minimum(section, tiling.heads - first)
    tile: NDArray[np.int64] = index % (section * tiling.tiles) // width
    return tile if order == "linear" else tiling.tiles - 1 - tile


def staying(total: int, even: bool, multiprocessors: int) -> int:
    """Returns the persistent programs; `even`: the fewest with the same number of rounds."""
    if even:
        return math.ceil(total / math.ceil(total / multiprocessors))
    return min(total, multiprocessors)


def busiest(tiling: Tiling, workers: int, section: int, order: str, cost: TileCost) -> float:
    """Returns the cost of the busiest persistent program."""
    if are_alike(tiling.problem):
        rounds = math.ceil(tiling.total / workers)
        return rounds * (extremes(tiling).mean * cost.block + cost.tile)
    loads = _loads(tiling, workers, section, order)
    return float((loads.blocks * cost.block + loads.tiles * cost.tile).max())


class _Loads(msgspec.Struct, frozen=True):
    """Blocks and tiles of each program, [workers]."""

    blocks: NDArray[np.floating]
    tiles: NDArray[np.floating]


@functools.lru_cache(maxsize=512)
def _loads(tiling: Tiling, workers: int, section: int, order: str) -> _Loads:
    import numpy as np

    heads = min(section or tiling.heads, tiling.heads)
    counted = tiling.total
    if counted > MAX_TILES:
        # Sections are alike: the first ones represent all.
        counted = MAX_TILES // (heads * tiling.tiles) * heads * tiling.tiles
    if counted < workers:
        # With this many tiles in one order, no program ends much later than the others.
        share = tiling.total / workers
        return _Loads(np.array([share * extremes(tiling).mean]), np.array([share]))
    index = np.arange(counted)
    worker = index % workers
    weights = blocks(tiling)[place(index, workers, tiling, section, order)]
    scale = tiling.total / counted
    per_worker = (np.bincount(worker, weights=one) for one in (weights, np.ones(counted)))
    return _Loads(*(scale * one for one in per_worker))


def coming_and_going(
    tiling: Tiling,
    multiprocessors: int,
    longest_first: bool,
    cost: TileCost,
    lone: float,
    resident: int = RESIDENT,
) -> float:
    """Returns the end of the last program if each computes one tile, scheduled greedily.

    Programs of one SM share its units. Costs are those of a program among others. `lone` is the time of a
    program that is alone on an SM, over its time at an equal share of the units.
    """
    found = extremes(tiling)
    least, mean, most = (cost.block * one + cost.tile for one in (found.least, found.mean, found.most))
    if tiling.total <= multiprocessors:
        return lone * most
    slots = resident * multiprocessors
    if least == most and tiling.total <= ROUNDS_IN_STEP * slots:
        whole, rest = divmod(tiling.total, slots)
        last = max(lone, math.ceil(rest / multiprocessors)) if rest else 0.0
        return (resident * whole + last) * mean
    last = least if longest_first else mean if found.least == found.most else most
    return max(lone * most, tiling.total / multiprocessors * mean + lone * LAST_SHARE * last)
