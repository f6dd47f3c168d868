"""Features of a config that hold for every shape: the terms of the calibration."""

from __future__ import annotations

import enum
import math

from flashtune.core.config import Config
from flashtune.core.problem import Problem
from flashtune.core.record import Resources
from flashtune.core.target import Target
from flashtune.templates.family import Family
from flashtune.tuner.binary.resources import occupancy
from flashtune.tuner.perf_model.roofline import Tiled
from flashtune.tuner.perf_model.roofline_backward import passes
from flashtune.tuner.perf_model.wave_balance import Persistent, imbalance

WARP = 32
# Fields that the size features replace, and fields that predictions model fully.
SIZES = frozenset({"block_m", "block_n", "num_warps", "max_registers"})
# Estimate of a thread's registers before compilation: its share of accumulators and scores, and a constant.
# Pointer loads add addresses. Fitted to 600 kernels of an H200.
ACCUMULATOR_REGISTERS = 1.3
SCORE_REGISTERS = 1.95
OTHER_REGISTERS = 2
POINTER_REGISTERS = 16
MAX_REGISTERS = 255


def estimated(problem: Problem, config: Config, sram_bytes: int, target: Target) -> Resources:
    """Returns estimated resources of a kernel that was not compiled.

    Persistent kernels get no estimate of registers, since their configs are chosen to fill an SM.
    """
    if isinstance(config, Persistent) or not isinstance(config, Tiled):
        return Resources(sram_bytes=sram_bytes)
    threads = WARP * config.num_warps
    if problem.is_backward:
        return Resources(sram_bytes=sram_bytes, registers=_of_backward(problem, config, target))
    accumulators = config.block_m * problem.value_head_dim / threads
    scores = config.block_m * config.block_n / threads
    registers = OTHER_REGISTERS + ACCUMULATOR_REGISTERS * accumulators + SCORE_REGISTERS * scores
    if getattr(config, "loads", "pointer") == "pointer":
        registers += POINTER_REGISTERS
    cap = int(getattr(config, "max_registers", 0)) or MAX_REGISTERS
    room = target.registers_per_sm // threads
    return Resources(sram_bytes=sram_bytes, registers=min(cap, MAX_REGISTERS, room, int(registers)))


def _of_backward(problem: Problem, config: Config, target: Target) -> int:
    """Returns the most registers of a thread: a backward kernel holds probabilities and their gradients."""
    needs = []
    for walk in passes(problem, config):
        tile = walk.tile
        threads = WARP * tile.num_warps
        summed = tile.block_m * walk.summed / threads
        scores = 2 * tile.block_m * tile.block_n / threads
        needs.append(OTHER_REGISTERS + POINTER_REGISTERS + summed + SCORE_REGISTERS * scores)
    room = target.registers_per_sm // (WARP * config.num_warps)
    return min(MAX_REGISTERS, room, int(max(needs)))


def features(
    problem: Problem, family: Family, config: Config, resources: Resources, target: Target
) -> dict[str, float]:
    """Returns the features of a config by name. Missing names are 0.

    Sizes are logarithms, since their effects multiply. Each value of any other field is a feature.
    """
    assert isinstance(config, Tiled)
    resident = occupancy(resources, family.options(config), target)
    stays = isinstance(config, Persistent)
    blocks = 1 if stays else max(1, resident.blocks)
    warps = max(1, resident.warps)
    programs = family.programs(problem, config)
    found = {
        "resident blocks": math.log(blocks),
        "one resident block": float(blocks == 1),
        "resident warps": math.log(warps),
        "keys in flight": math.log((config.num_stages - 0.5) * config.block_n * blocks),
        "rows of a tile": math.log2(config.block_m),
        "keys of a block": math.log2(config.block_n),
        "rows of a warp": math.log2(config.block_m * blocks / warps),
        "imbalance": math.log(imbalance(problem, config, programs, target.sm_count * blocks, target)),
    }
    return found | {
        name: value
        for field, plain in config.items()
        if field not in SIZES
        for name, value in _own(field, plain)
    }


def _own(field: str, value: int | bool | enum.Enum) -> list[tuple[str, float]]:
    if isinstance(value, bool):
        return [(field, float(value))]
    word = value.value if isinstance(value, enum.Enum) else value
    return [(f"{field} {word}", 1.0)]
