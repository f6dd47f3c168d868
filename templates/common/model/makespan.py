"""Makespan of a launch with one tile for each program."""

import math

import msgspec

from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.cost import CostParams, block_us, combining_us, tile_us, traffic_us
from flashtune.templates.common.model.tile_schedule import (
    RESIDENT,
    TileCost,
    Tiling,
    extremes,
    greedy_makespan,
    have_equal_length,
)

PACE = CostParams(launch=9.3, block=0.0, tile=0.3, hidden=0.21, exposed=1.55)
# Additional time of a partial block over that of a full block.
MASKED = 0.5
# Slowdown of a program with a short tile that is alone on an SM and leaves units idle.
LONE_SHORT = 1.81
SHORT_TILE = 64
# Time to make descriptors on the device, in µs.
DESCRIPTORS = 4.5
# Maximum registers of a thread, and those without accumulators and scores.
MAX_REGISTERS = 255
OTHER_REGISTERS = 50


def portable_span(
    problem: Problem,
    block_m: int,
    block_n: int,
    target: Target,
    *,
    longest_first: bool = False,
    heads_innermost: bool = False,
    descriptors: bool = False,
    resident: int = RESIDENT,
    splits: int = 1,
) -> float:
    """Returns the time of a launch by its schedule, in ms.

    Neighbouring programs compute different heads if `heads_innermost`. They make TMA descriptors if
    `descriptors`. With `splits`, each has a part of the keys of a tile, and another kernel combines parts.
    """
    tiling = Tiling(problem, block_m, block_n, 1)
    if not tiling.total or not problem.seqlen_kv:
        return PACE.launch / 1e3
    block = block_us(problem, block_m * block_n, PACE, target)
    cut = 0 if have_equal_length(problem) else math.ceil(block_m / block_n)
    # Parts are as tiles of further sequences that have as many fewer blocks.
    parts = msgspec.structs.replace(problem, batch=problem.batch * splits)
    tiles, blocks = Tiling(parts, block_m, block_n, 1), extremes(tiling)
    share = math.ceil(blocks.most / splits) / blocks.most
    cost = TileCost(block * share, tile_us(problem, block_m, PACE, target) + cut * MASKED * block)
    lone = LONE_SHORT if block_m <= SHORT_TILE else 1.0
    busy = greedy_makespan(tiles, target.sm_count, longest_first, cost, lone, resident)
    programs = min(tiles.total, resident * target.sm_count)
    heads = tiles.heads if heads_innermost else math.ceil(programs / tiles.tiles)
    streamed = blocks.mean * tiling.total * block_n
    shorter = msgspec.structs.replace(parts, seqlen_kv=math.ceil(problem.seqlen_kv / splits))
    moving = traffic_us(shorter, streamed, heads / tiling.packs, programs, target)
    launch = PACE.launch + (DESCRIPTORS if descriptors else 0.0)
    return (launch + max(busy, moving) + combining_us(problem, splits, target)) / 1e3


def resident_programs(
    problem: Problem, block_m: int, block_n: int, warps: int, stages: int, maxnreg: int, target: Target
) -> int:
    """Returns the resident programs of an SM, from registers and shared memory of their tiles.

    `stages` are the blocks of keys and values in flight. A register limit of 0 means none.
    """
    threads = warps * target.warp_size
    wanted = block_m * (block_n + problem.value_head_dim) / threads + OTHER_REGISTERS
    registers = min(wanted, maxnreg or MAX_REGISTERS, MAX_REGISTERS)
    keys = stages * block_n * (problem.head_dim + problem.value_head_dim)
    size = (keys + block_m * problem.head_dim) * problem.kv_itemsize
    return max(1, min(int(target.registers_per_sm / (threads * registers)), target.sram_per_sm // size))
