"""Predicted times of configs: the makespan of their family, the cost of spills, and a calibration.

Predicted times order trials and are shown by `explain`. Dispatch compares makespans too, but it never treats
a predicted time as a measurement. The calibration has constants that were fitted to measured times. They are
in `fitted.json`, which `benchmarks.exhaustive.prediction` makes from tabular benchmarks. They hold for the
measured architecture. Their terms are features of a config that hold for every shape.
"""

import enum
import functools
import math
from importlib import resources as files
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from flashtune.core.config import Config
from flashtune.core.decoders import json_decoder
from flashtune.core.errors import TableError
from flashtune.core.problem import Problem
from flashtune.core.record import Resources, ShortText
from flashtune.core.target import Target
from flashtune.templates.common.model.sram import columns, head_chunks
from flashtune.templates.family import Family
from flashtune.tuner.binary.resources import Occupancy, occupancy

# Cost of a spilled byte as a fraction of the inner loop's time. Some spills are outside of the loop.
SPILL_PENALTY = 1 / 1024
# Slowdown if ptxas waits for each matrix instruction.
SERIALIZED_PENALTY = 1.6
# Cost of a tile's loads and set-up, as a number of additional rows and columns.
ROW_OVERHEAD = 24
COLUMN_OVERHEAD = 12
# Warps that hide the softmax of others as well as one more resident block does.
WARPS_LIKE_A_BLOCK = 8
# Slowdown of a portable kernel if no other warps hide its softmax.
EXPOSED_COST = 2.0
# The factor of stalls that the makespans of portable families contain: 128 × 64 tiles, eight warps on an SM.
USUAL_STALLS = 2.35
# Fields that the size features replace, and fields that predictions model fully.
SIZES = frozenset({"block_m", "block_n", "num_warps", "maxnreg", "lpt", "heads_innermost"})
# Estimate of a thread's registers before compilation: its share of accumulators and scores, and a constant.
# Pointer loads add addresses. Fitted to 600 kernels of an H200.
ACCUMULATOR_REGISTERS = 1.3
SCORE_REGISTERS = 1.95
OTHER_REGISTERS = 2
POINTER_REGISTERS = 16
MAX_REGISTERS = 255

FILE = "fitted.json"


@runtime_checkable
class Tiled(Protocol):
    """A config with tiles of `block_m` queries and `block_n` keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@runtime_checkable
class TwoKernels(Tiled, Protocol):
    """A config of two kernels, the second of which computes dq."""

    dq_block_m: int
    dq_block_n: int
    dq_warps: int
    dq_stages: int


@runtime_checkable
class Persistent(Protocol):
    """A config of a persistent kernel, which processes groups of `head_swizzle` heads."""

    head_swizzle: int


def estimated(problem: Problem, config: Config, sram_bytes: int, target: Target) -> Resources:
    """Returns estimated resources of a kernel that was not compiled.

    Persistent kernels get no estimate of registers, since their configs are chosen to fill an SM.
    """
    if isinstance(config, Persistent) or not isinstance(config, Tiled):
        return Resources(sram_bytes=sram_bytes)
    threads = target.warp_size * config.num_warps
    if problem.is_backward:
        return Resources(sram_bytes=sram_bytes, registers=_of_backward(problem, config, target))
    accumulators = config.block_m * problem.value_head_dim / threads
    scores = config.block_m * config.block_n / threads
    registers = OTHER_REGISTERS + ACCUMULATOR_REGISTERS * accumulators + SCORE_REGISTERS * scores
    if getattr(config, "loads", "pointer") == "pointer":
        registers += POINTER_REGISTERS
    cap = int(getattr(config, "maxnreg", 0)) or MAX_REGISTERS
    room = target.registers_per_sm // threads
    return Resources(sram_bytes=sram_bytes, registers=min(cap, MAX_REGISTERS, room, int(registers)))


class Loop(NamedTuple):
    """One kernel of a backward pass: the rows of its tile, and those of a block in its loop."""

    rows: int
    looped: int
    warps: int
    stages: int


def backward_loops(config: Tiled) -> tuple[Loop, ...]:
    """Returns the loop over queries, for dk and dv, and that of a second kernel for dq if there is one."""
    first = Loop(config.block_n, config.block_m, config.num_warps, config.num_stages)
    if not isinstance(config, TwoKernels):
        return (first,)
    return first, Loop(config.dq_block_m, config.dq_block_n, config.dq_warps, config.dq_stages)


def _of_backward(problem: Problem, config: Tiled, target: Target) -> int:
    """Returns the most registers of a thread: a backward kernel holds probabilities and their gradients."""
    split_head_dim = bool(getattr(config, "split_head_dim", False))
    qk, v = (columns(head_chunks(dim, split_head_dim)) for dim in (problem.head_dim, problem.value_head_dim))
    needs = [
        OTHER_REGISTERS
        + POINTER_REGISTERS
        + loop.rows * (summed + 2 * SCORE_REGISTERS * loop.looped) / (target.warp_size * loop.warps)
        for loop, summed in zip(backward_loops(config), (qk + v, qk), strict=False)
    ]
    room = target.registers_per_sm // (target.warp_size * config.num_warps)
    return min(MAX_REGISTERS, room, int(max(needs)))


def features(family: Family, config: Config, resources: Resources, target: Target) -> dict[str, float]:
    """Returns the features of a config by name. Missing names are 0.

    Sizes are logarithms, since their effects multiply. Each value of any other field is a feature.
    """
    assert isinstance(config, Tiled)
    resident = occupancy(resources, family.options(config), target)
    stays = isinstance(config, Persistent)
    blocks = 1 if stays else max(1, resident.blocks)
    warps = max(1, resident.warps)
    values = {
        "resident blocks": math.log(blocks),
        "one resident block": float(blocks == 1),
        "resident warps": math.log(warps),
        "keys in flight": math.log((config.num_stages - 0.5) * config.block_n * blocks),
        "rows of a tile": math.log2(config.block_m),
        "keys of a block": math.log2(config.block_n),
        "rows of a warp": math.log2(config.block_m * blocks / warps),
    }
    return values | {
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


class FamilyFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The constants of one family."""

    level: float  # Logarithm of the error that all configs share.
    weights: dict[ShortText, float]  # Change of the logarithm of the time for each feature.


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Constants by family, and their origin."""

    arch: ShortText  # The architecture that they hold for.
    problems: tuple[ShortText, ...]  # Keys of the fitted problems.
    families: dict[ShortText, FamilyFit]  # The families' constants.


def expected_ms(
    problem: Problem, family: Family, config: Config, resources: Resources, target: Target, fit: Calibration
) -> float:
    """Returns the predicted time of one launch, in ms, corrected by the family's calibration."""
    ms = scheduled_ms(problem, family, config, resources, target)
    own = fit.families.get(family.name)
    if own is None or fit.arch != target.arch or math.isinf(ms):
        return ms
    values = features(family, config, resources, target)
    return ms * math.exp(
        own.level + sum(own.weights.get(name, 0.0) * value for name, value in values.items())
    )


def scheduled_ms(
    problem: Problem, family: Family, config: Config, resources: Resources, target: Target
) -> float:
    """Returns the makespan of one launch with the cost of spills, in ms, without calibration.

    Infinite if not one block fits an SM.
    """
    resident = occupancy(resources, family.options(config), target)
    if not resident.blocks:
        return math.inf
    stalls = stall_factor(config, resident) if family.interpreted else 1.0
    return family.makespan_ms(problem, config, target) * spill_factor(resources) * stalls


def stall_factor(config: Config, resident: Occupancy) -> float:
    """Returns the slowdown of a portable kernel by its tile's shape and by the few warps of an SM.

    Small tiles load more operands for each product. Resident warps hide the softmax of others.
    """
    if not isinstance(config, Tiled):
        return 1.0
    rows, columns = config.block_m, config.block_n
    share = rows / (rows + ROW_OVERHEAD) * columns / (columns + COLUMN_OVERHEAD)
    exposed = 1 / (1 + resident.blocks + resident.warps / WARPS_LIKE_A_BLOCK)
    return (1 + EXPOSED_COST * exposed) / share / USUAL_STALLS


def spill_factor(resources: Resources) -> float:
    """Returns the slowdown of the inner loop by spills and serialised matrix instructions."""
    serialized = SERIALIZED_PENALTY if resources.serialized_wgmma else 1.0
    return serialized * (1 + resources.spill_bytes * SPILL_PENALTY)


@functools.cache
def shipped_fit() -> Calibration:
    """Returns the shipped constants."""
    try:
        raw = files.files("flashtune.tuner").joinpath(FILE).read_bytes()
        return json_decoder(Calibration).decode(raw)
    except (OSError, msgspec.DecodeError) as error:
        raise TableError(
            f"{FILE} of this installation is damaged ({error}): install flashtune again"
        ) from error
