"""Load imbalance: the end of the last program over the average.

Under a causal mask, tiles have different lengths, and their order decides when the last one ends. Persistent
programs, which compute tiles in a fixed order, are simulated. Programs with one tile each are scheduled
greedily by the hardware.
"""

from __future__ import annotations

import functools
import heapq
import math
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flashtune.core.config import Config
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.tile_schedule import Tiling, blocks, place, staying

# Cost of a tile before its first block and after its last, in blocks of keys.
TILE_OVERHEAD = 1.0
# With this many tiles for each resident program, imbalance is negligible.
MANY_ROUNDS = 64
# Above this number of tiles, the order is not simulated.
MAX_TILES = 2**18


@runtime_checkable
class Persistent(Protocol):
    """A config of a persistent kernel with an order of tiles."""

    @property
    def head_swizzle(self) -> int:
        """Heads (packs of heads) that are processed together; 0 for all."""
        ...

    @property
    def order(self) -> str:
        """`linear`, `lpt` or `serpentine`."""
        ...

    @property
    def balanced_grid(self) -> bool:
        """Whether the number of programs is the least that needs the same number of rounds."""
        ...


def imbalance(problem: Problem, config: Config, programs: int, places: int, target: Target) -> float:
    """Returns the end of the last program over that of perfectly balanced work.

    `programs` are the programs of a launch, or the tiles of persistent programs.
    """
    pack = int(getattr(config, "pack_gqa", 1))
    tiling = Tiling(problem, max(1, _side(config, "block_m") // pack), _side(config, "block_n"), pack)
    total = tiling.total
    if not total or not problem.seqlen_kv or not places:
        return 1.0
    if total > MAX_TILES or (programs != total and not isinstance(config, Persistent)):
        # Programs without tiles of queries have equal lengths.
        return whole_waves(programs, places, target)
    if isinstance(config, Persistent):
        return _stay(tiling, config.head_swizzle, str(config.order), config.balanced_grid, target.sm_count)
    longest_first = bool(getattr(config, "lpt", False))
    heads_innermost = bool(getattr(config, "heads_innermost", False))
    return _come_and_go(tiling, longest_first, heads_innermost, places, target.sm_count)


def whole_waves(programs: int, places: int, target: Target) -> float:
    """Returns the time of whole waves of equal programs over the time at full utilization."""
    if programs == 0:
        return 1.0
    if programs >= places:
        return math.ceil(programs / places) * places / programs
    # Fewer programs than can be resident: the hardware spreads them over the SMs first.
    return math.ceil(programs / target.sm_count) * target.sm_count / programs


def _side(config: Config, name: str) -> int:
    return int(getattr(config, name))


def _lengths(tiling: Tiling) -> NDArray[np.float64]:
    """Returns the cost of each tile of a head, in blocks of keys."""
    costs: NDArray[np.float64] = blocks(tiling) + TILE_OVERHEAD
    return costs


@functools.lru_cache(maxsize=4096)
def _stay(tiling: Tiling, section: int, order: str, even: bool, multiprocessors: int) -> float:
    workers = staying(tiling.total, even, multiprocessors)
    index = np.arange(tiling.total)
    costs = _lengths(tiling)[place(index, workers, tiling, section, order)]
    busiest = np.bincount(index % workers, weights=costs).max()
    return float(busiest * multiprocessors / costs.sum())


@functools.lru_cache(maxsize=4096)
def _come_and_go(
    tiling: Tiling, longest_first: bool, heads_innermost: bool, places: int, multiprocessors: int
) -> float:
    total = tiling.total
    if total <= places:
        share = math.ceil(total / multiprocessors) * multiprocessors / total
        costs = _lengths(tiling)
        return float(share * costs.max() / costs.mean()) if total <= multiprocessors else share
    if total > MANY_ROUNDS * places:
        return 1.0
    costs = _lengths(tiling)
    if longest_first:
        costs = costs[::-1]
    every = np.repeat(costs, tiling.heads) if heads_innermost else np.tile(costs, tiling.heads)
    free = [0.0] * places
    for cost in every.tolist():
        heapq.heapreplace(free, free[0] + cost)
    return float(max(free) * places / every.sum())
