"""Which program computes which tiles, and how much longer the busiest works than the average.

Under a causal mask tiles differ in length, and what order they are begun in decides when the last
one ends. Programs that stay and take one tile after the other in a fixed order are simulated as they
are; of programs with a tile each, the hardware gives the next one to whichever place is free.
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

# What a tile costs before its first block and after its last, in blocks of keys.
TILE_OVERHEAD = 1.0
# With so many tiles for each place to run, nobody ends much later than the others.
MANY_ROUNDS = 64
# Orders of more tiles than these are not worked out.
MOST_TILES = 2**18


@runtime_checkable
class Persistent(Protocol):
    """A config whose programs stay, and take their tiles in an order of its own."""

    @property
    def section(self) -> int:
        """Heads (packs of heads) that are worked on at a time; 0 for all."""
        ...

    @property
    def order(self) -> str:
        """`linear`, `long_first` or `alternate`."""
        ...

    @property
    def even(self) -> bool:
        """Whether there are no more programs than finish in as many rounds."""
        ...


def imbalance(problem: Problem, config: Config, programs: int, places: int, target: Target) -> float:
    """When the last program ends, over when all would end if work were spread without a rest.

    Args:
        problem: What is computed.
        config: A config with tiles of `block_m` queries and `block_n` keys.
        programs: Programs of a launch, or tiles that programs which stay take in turn.
        places: Programs that run at once.
        target: The GPU.
    """
    pack = int(getattr(config, "pack", 1))
    tiling = Tiling(problem, max(1, _side(config, "block_m") // pack), _side(config, "block_n"), pack)
    total = tiling.total
    if not total or not problem.seqlen_kv or not places:
        return 1.0
    if total > MOST_TILES or (programs != total and not isinstance(config, Persistent)):
        # Programs that are no tiles of queries are all alike.
        return whole_waves(programs, places, target)
    if isinstance(config, Persistent):
        return _stay(tiling, config.section, str(config.order), config.even, target.sm_count)
    longest_first = bool(getattr(config, "long_first", False))
    heads_inner = bool(getattr(config, "heads_inner", False))
    return _come_and_go(tiling, longest_first, heads_inner, places, target.sm_count)


def whole_waves(programs: int, places: int, target: Target) -> float:
    """Time with whole waves of equal programs over time with all multiprocessors busy to the end."""
    if programs == 0:
        return 1.0
    if programs >= places:
        return math.ceil(programs / places) * places / programs
    # Fewer programs than places: they spread over the multiprocessors first.
    return math.ceil(programs / target.sm_count) * target.sm_count / programs


def _side(config: Config, name: str) -> int:
    return int(getattr(config, name))


def _lengths(tiling: Tiling) -> NDArray[np.float64]:
    """What each tile of a head costs, in blocks of keys."""
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
    tiling: Tiling, longest_first: bool, heads_inner: bool, places: int, multiprocessors: int
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
    every = np.repeat(costs, tiling.heads) if heads_inner else np.tile(costs, tiling.heads)
    free = [0.0] * places
    for cost in every.tolist():
        heapq.heapreplace(free, free[0] + cost)
    return float(max(free) * places / every.sum())
