"""What a launch of programs that compute one tile each takes by its schedule."""

from __future__ import annotations

import math

from flashtune.problem import Problem
from flashtune.target import Target
from flashtune.templates.common.pace import Pace, block_us, tile_us, traffic_us
from flashtune.templates.common.schedule import RESIDENT, Cost, Tiling, coming_and_going, extremes

PACE = Pace(launch=10.8, block=0.0, tile=0.0, hidden=0.15, exposed=1.75)
# A program that has a multiprocessor to itself leaves some of its units idle; short tiles more so.
LONE = 1.16
LONE_SHORT = 1.81
SHORT_TILE = 64
# Keys that a tile reads weigh as much as so many more of its rows, so that narrow tiles are slower.
ROWS_OF_READING = 12
USUAL_ROWS = 128
# What descriptors take that programs make, in µs.
DESCRIPTORS = 4.5


def portable_span(
    problem: Problem,
    block_m: int,
    block_n: int,
    target: Target,
    *,
    longest_first: bool = False,
    heads_inner: bool = False,
    descriptors: bool = False,
) -> float:
    """Time of a launch by its schedule, in ms.

    Args:
        problem: What is computed.
        block_m: Queries of a tile.
        block_n: Keys of a block.
        target: The GPU.
        longest_first: Whether the tiles with the most blocks are begun first.
        heads_inner: Whether neighbouring programs work on different heads.
        descriptors: Whether programs make descriptors for the copy engine.
    """
    tiling = Tiling(problem, block_m, block_n, 1)
    if not tiling.total or not problem.seqlen_kv:
        return PACE.launch / 1e3
    reading = (1 + ROWS_OF_READING / block_m) / (1 + ROWS_OF_READING / USUAL_ROWS)
    block = reading * block_us(problem, block_m * block_n, PACE, target)
    cost = Cost(block, tile_us(problem, block_m, PACE, target))
    lone = LONE_SHORT if block_m <= SHORT_TILE else LONE
    busy = coming_and_going(tiling, target.sm_count, longest_first, cost, lone)
    programs = min(tiling.total, RESIDENT * target.sm_count)
    heads = tiling.heads if heads_inner else math.ceil(programs / tiling.tiles)
    streamed = extremes(tiling).mean * tiling.total * block_n
    moving = traffic_us(problem, streamed, heads / tiling.packs, programs, target)
    launch = PACE.launch + (DESCRIPTORS if descriptors else 0.0)
    return (launch + max(busy, moving)) / 1e3
