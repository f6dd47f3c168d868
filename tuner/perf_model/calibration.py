"""Calibration of predictions by constants that were fitted to measured times.

The constants are in `fitted.json`, which `benchmarks.exhaustive.prediction` makes from tabular benchmarks.
They hold for the measured architecture. Its terms are features of a config that hold for every shape.
"""

from __future__ import annotations

import enum
import functools
import math
from importlib import resources as files

import msgspec

from flashtune.core.config import Config
from flashtune.core.errors import TableError
from flashtune.core.problem import Problem
from flashtune.core.record import Resources, ShortText
from flashtune.core.target import Target
from flashtune.templates.family import Family
from flashtune.tuner.binary.resources import occupancy
from flashtune.tuner.perf_model.roofline import Persistent, Tiled, imbalance, predict_ms
from flashtune.tuner.perf_model.roofline_backward import passes, predict_backward_ms

WARP = 32
# Fields that the size features replace, and fields that predictions model fully.
SIZES = frozenset({"block_m", "block_n", "num_warps", "maxnreg"})
# Estimate of a thread's registers before compilation: its share of accumulators and scores, and a constant.
# Pointer loads add addresses. Fitted to 600 kernels of an H200.
ACCUMULATOR_REGISTERS = 1.3
SCORE_REGISTERS = 1.95
OTHER_REGISTERS = 2
POINTER_REGISTERS = 16
MAX_REGISTERS = 255

FILE = "fitted.json"


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
    cap = int(getattr(config, "maxnreg", 0)) or MAX_REGISTERS
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


class FamilyFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The constants of one family.

    Attributes:
        level: Logarithm of the error that all configs share.
        weights: Change of the logarithm of the time for each feature.
    """

    level: float
    weights: dict[ShortText, float]


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Constants by family, and their origin.

    Attributes:
        arch: The architecture that they hold for.
        problems: Keys of the fitted problems.
        families: The families' constants.
    """

    arch: ShortText
    problems: tuple[ShortText, ...]
    families: dict[ShortText, FamilyFit]


def expected_ms(
    problem: Problem, family: Family, config: Config, resources: Resources, target: Target, fit: Calibration
) -> float:
    """Returns the predicted time of one launch, in ms, corrected by the family's calibration.

    Raises:
        UsageError: The family's configs have no tiles.
    """
    ms = formula_ms(problem, family, config, resources, target)
    own = fit.families.get(family.name)
    if own is None or fit.arch != target.arch or math.isinf(ms):
        return ms
    found = features(problem, family, config, resources, target)
    return ms * math.exp(own.level + sum(own.weights.get(name, 0.0) * value for name, value in found.items()))


def formula_ms(
    problem: Problem, family: Family, config: Config, resources: Resources, target: Target
) -> float:
    """Returns the predicted time of one launch of either pass, in ms, without calibration.

    Raises:
        UsageError: The family's configs have no tiles.
    """
    formula = predict_backward_ms if problem.is_backward else predict_ms
    return formula(problem, family, config, resources, target)


@functools.cache
def shipped_fit() -> Calibration:
    """Returns the shipped constants.

    Raises:
        TableError: The file is damaged.
    """
    try:
        raw = files.files("flashtune.tuner").joinpath(FILE).read_bytes()
        return msgspec.json.decode(raw, type=Calibration)
    except (OSError, msgspec.DecodeError) as error:
        raise TableError(
            f"{FILE} of this installation is damaged ({error}): install flashtune again"
        ) from error
