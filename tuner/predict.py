"""Predicted times: a roofline and an occupancy model, for trials where there is no GPU.

A predicted time orders trials and answers `explain`; dispatch never takes one for a measurement.
Each term below is one small function, and docs/prediction.md states the formulas.
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

from flashtune.config import Config
from flashtune.errors import UsageError
from flashtune.problem import Causal, Dtype, Problem
from flashtune.record import Resources
from flashtune.target import Target
from flashtune.templates.common.tiles import columns, head_chunks
from flashtune.templates.family import Family
from flashtune.tuner.resources import Occupancy, occupancy

# Exponentials that one multiprocessor finishes per clock, on its special function units.
EXPONENTIALS_PER_CLOCK = 16
# fp32 instructions around each exponential: scale, subtract, maximum, sum, conversion, rescale.
VECTOR_FLOPS_PER_PAIR = 8
# Share of the datasheet's rates that real kernels reach.
MATRIX_SHARE = 0.85
BANDWIDTH_SHARE = 0.9
LAUNCH_MS = 0.003
SPILL_PENALTY = 1 / 256
SERIALIZED_PENALTY = 1.6


@runtime_checkable
class Tiled(Protocol):
    """A config that cuts queries and keys into tiles."""

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        ...

    @property
    def block_n(self) -> int:
        """Keys of a tile."""
        ...


def predict_ms(
    problem: Problem, family: Family, config: Config, resources: Resources, target: Target
) -> float:
    """GPU time of one launch, in ms, as the model has it; infinite where the kernel cannot run.

    Raises:
        UsageError: The family's configs have no tiles.
    """
    if not isinstance(config, Tiled):
        raise UsageError(
            f"times of {family.name} cannot be predicted: its configs name no block_m and block_n"
        )
    resident = occupancy(resources, family.options(config), target)
    if resident.blocks == 0:
        return math.inf
    seconds = max(
        compute_seconds(problem, config, resources, resident, target),
        memory_seconds(problem, family, config, target),
    )
    return LAUNCH_MS + 1e3 * seconds


def compute_seconds(
    problem: Problem, config: Tiled, resources: Resources, resident: Occupancy, target: Target
) -> float:
    """Time of the arithmetic: work of one multiprocessor, times how unevenly work is spread."""
    pairs = computed_pairs(problem, config)
    matrix = matrix_seconds(pairs, problem, config, target)
    softmax = softmax_seconds(pairs, target)
    # Warps of other blocks, or of the same one, do softmax while some wait for the matrix units.
    hidden = overlap(resident)
    together = max(matrix, softmax) + (1 - hidden) * min(matrix, softmax)
    return together * imbalance(problem, config, resident, target) * spill_factor(resources)


def computed_pairs(problem: Problem, config: Tiled) -> int:
    """(query, key) pairs of all heads that tiles cover, masked ones included."""
    tiles = range(0, problem.seqlen_q, config.block_m)
    if problem.causal is Causal.NONE:
        keys = len(tiles) * _padded(problem.seqlen_kv, config.block_n)
    else:
        ends = (min(start + config.block_m + problem.diagonal, problem.seqlen_kv) for start in tiles)
        keys = sum(_padded(max(end, 0), config.block_n) for end in ends)
    return problem.batch * problem.heads * config.block_m * keys


def matrix_seconds(pairs: int, problem: Problem, config: Tiled, target: Target) -> float:
    """Time of the two products, head dims padded as the config pads them."""
    decomposed = bool(getattr(config, "decomposed", False))
    width = sum(columns(head_chunks(dim, decomposed)) for dim in (problem.head_dim, problem.value_head_dim))
    peak = target.peak.fp32 if problem.dtype is Dtype.FP32 else target.peak.half
    return 2 * pairs * width / (peak * 1e12 * MATRIX_SHARE * tile_share(config))


def tile_share(config: Tiled) -> float:
    """Share of the matrix units' rate that a tile's shape allows: operands are re-read per tile."""
    return config.block_m / (config.block_m + 24) * config.block_n / (config.block_n + 12)


def softmax_seconds(pairs: int, target: Target) -> float:
    """Time of the exponentials on the special function units, and of the fp32 work around them."""
    exponentials = pairs / (EXPONENTIALS_PER_CLOCK * target.sm_count * target.clock_mhz * 1e6)
    return max(exponentials, VECTOR_FLOPS_PER_PAIR * pairs / (target.peak.fp32 * 1e12))


def overlap(resident: Occupancy) -> float:
    """Share of the shorter of products and softmax that hides behind the longer."""
    return 1 - 1 / (1 + resident.blocks + resident.warps / 8)


def imbalance(problem: Problem, config: Tiled, resident: Occupancy, target: Target) -> float:
    """Time with whole waves of blocks over time with all multiprocessors busy to the end."""
    programs = problem.batch * problem.heads * math.ceil(problem.seqlen_q / config.block_m)
    if programs == 0:
        return 1.0
    slots = target.sm_count * resident.blocks
    waves = programs / slots
    if waves >= 1:
        return math.ceil(waves) / waves
    # Fewer programs than slots: they spread over the multiprocessors first.
    return math.ceil(programs / target.sm_count) * target.sm_count / programs


def spill_factor(resources: Resources) -> float:
    """How much slower spilled registers and serialised matrix instructions make the inner loop."""
    serialized = SERIALIZED_PENALTY if resources.serialized_wgmma else 1.0
    return serialized * (1 + resources.spill_bytes * SPILL_PENALTY)


def memory_seconds(problem: Problem, family: Family, config: Config, target: Target) -> float:
    """Time to move the family's HBM traffic at the target's bandwidth; what its L2 holds is read once."""
    traffic = sum(item.bytes for item in family.hbm_items(problem, config, target))
    return traffic / (target.hbm_bandwidth * 1e9 * BANDWIDTH_SHARE)


def _padded(extent: int, block: int) -> int:
    return -(-extent // block) * block
