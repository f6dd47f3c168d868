"""Predicted times from a roofline, occupancy and load imbalance, for trials without a GPU.

Predicted times order trials and are shown by `explain`. Dispatch never treats one as a measurement. Each term
below is one small function, and docs/prediction.md states the formulas.

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
from flashtune.core.errors import UsageError
from flashtune.core.problem import Dtype, Problem
from flashtune.core.record import Resources
from flashtune.core.target import Target
from flashtune.templates.common.model.sram import columns, head_chunks
from flashtune.templates.common.model.tile_schedule import Tiling, blocks, persistent_programs, tile_of
from flashtune.templates.common.model.traffic import streamed_keys
from flashtune.templates.family import Family
from flashtune.tuner.binary.resources import Occupancy, occupancy

# Exponentials that one SM computes per clock, on its special function units.
EXPONENTIALS_PER_CLOCK = 16
# fp32 instructions around each exponential: scale, subtract, maximum, sum, conversion, rescale.
VECTOR_FLOPS_PER_PAIR = 8
# Fractions of the datasheet's rates that real kernels reach.
MATRIX_SHARE = 0.85
BANDWIDTH_SHARE = 0.9
# Cost of a tile's loads and set-up, as a number of additional rows and columns.
ROW_OVERHEAD = 24
COLUMN_OVERHEAD = 12
# Tensor Cores multiply tf32 at half the rate of 16-bit types, and tf32x3 needs three products.
TF32X3_RATE = 1 / 6
LAUNCH_MS = 0.003
# Cost of a spilled byte as a fraction of the inner loop's time. Some spills are outside of the loop.
SPILL_PENALTY = 1 / 1024
SERIALIZED_PENALTY = 1.6
# Warps that hide as much of the softmax as one more resident block.
WARPS_LIKE_A_BLOCK = 8
# Cost of a tile before its first block and after its last, in blocks of keys.
TILE_OVERHEAD = 1.0
# With this many tiles for each resident program, imbalance is negligible.
MANY_ROUNDS = 64
# Above this number of tiles, the order is not simulated.
MAX_TILES = 2**18


@runtime_checkable
class Tiled(Protocol):
    """A config with tiles of queries and keys."""

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        ...

    @property
    def block_n(self) -> int:
        """Keys of a tile."""
        ...


@runtime_checkable
class Split(Tiled, Protocol):
    """A split-KV config: tiles hold all query heads of a KV head, and programs share a sequence's keys."""

    @property
    def num_splits(self) -> int:
        """Parts of a sequence's keys."""
        ...


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


def predict_ms(
    problem: Problem, family: Family, config: Config, resources: Resources, target: Target
) -> float:
    """Returns the predicted GPU time of one forward launch, in ms; infinite if the kernel cannot run.

    Raises:
        UsageError: The family's configs have no tiles.
    """
    if not isinstance(config, Tiled):
        raise without_tiles(family)
    resident = occupancy(resources, family.options(config), target)
    if resident.blocks == 0:
        return math.inf
    pairs = computed_pairs(problem, config)
    own = family.overlap(config)
    hidden = overlap(resident) if own is None else own
    loop = loop_seconds(pairs, problem, config, hidden, target) * spill_factor(resources)
    places = target.sm_count * resident.blocks
    compute = loop * imbalance(problem, config, family.programs(problem, config), places, target)
    # The first reads and the last writes of a program wait for HBM. The rest overlaps with the loop.
    exposed = transfer_seconds(problem.minimal_bytes(), target)
    return LAUNCH_MS + 1e3 * max(compute + exposed, memory_seconds(problem, family, config, target))


def without_tiles(family: Family) -> UsageError:
    """Returns the error for a family whose times cannot be predicted."""
    return UsageError(f"times of {family.name} cannot be predicted: its configs name no block_m and block_n")


def computed_pairs(problem: Problem, config: Tiled) -> float:
    """Returns the (query, key) pairs of all heads that tiles cover, with masked and padded ones."""
    if not problem.seqlen_kv:
        return 0.0
    keys = streamed_keys(problem, config.block_m, config.block_n)
    padding = math.ceil(problem.seqlen_kv / config.block_n) * config.block_n / problem.seqlen_kv
    heads = problem.heads
    if isinstance(config, Split):
        # A tile counts once for all heads that share its keys.
        queries = max(1, math.ceil(problem.seqlen_q / config.block_m))
        tiles = math.ceil(problem.seqlen_q * problem.group_size / config.block_m)
        heads, keys = problem.kv_heads * tiles, keys // queries
    return problem.batch * heads * config.block_m * keys * padding


def loop_seconds(pairs: float, problem: Problem, config: Tiled, hidden: float, target: Target) -> float:
    """Returns the time of products and softmax on all SMs. The fraction `hidden` of the shorter is free."""
    matrix, softmax = matrix_seconds(pairs, problem, config, target), softmax_seconds(pairs, target)
    return max(matrix, softmax) + (1 - hidden) * min(matrix, softmax)


def matrix_seconds(pairs: float, problem: Problem, config: Tiled, target: Target) -> float:
    """Returns the time of the two products, with head dims padded as by the config."""
    split_head_dim = bool(getattr(config, "split_head_dim", False))
    width = sum(
        columns(head_chunks(dim, split_head_dim)) for dim in (problem.head_dim, problem.value_head_dim)
    )
    rate = matrix_rate(problem, config, target) * MATRIX_SHARE * tile_share(config)
    return 2 * pairs * width / rate


def matrix_rate(problem: Problem, config: Tiled, target: Target) -> float:
    """Returns the peak FLOP/s of the units that compute the products."""
    if problem.dtype.is_quantized:
        return target.peak.fp8 * 1e12
    if problem.dtype is not Dtype.FP32:
        return target.peak.half * 1e12
    thirds = getattr(config, "input_precision", None) == "tf32x3"
    return (target.peak.half * TF32X3_RATE if thirds else target.peak.fp32) * 1e12


def tile_share(config: Tiled) -> float:
    """Returns the fraction of the Tensor Cores' rate for a tile's shape: operands are re-read per tile."""
    rows = config.block_m / (config.block_m + ROW_OVERHEAD)
    return rows * config.block_n / (config.block_n + COLUMN_OVERHEAD)


def softmax_seconds(pairs: float, target: Target) -> float:
    """Returns the time of the exponentials on special function units and of the fp32 work around them."""
    exponentials = pairs / (EXPONENTIALS_PER_CLOCK * target.sm_count * target.clock_mhz * 1e6)
    return max(exponentials, VECTOR_FLOPS_PER_PAIR * pairs / (target.peak.fp32 * 1e12))


def overlap(resident: Occupancy) -> float:
    """Returns the hidden fraction of the shorter of products and softmax.

    Some warps do softmax while others wait for the Tensor Cores.
    """
    return 1 - 1 / (1 + resident.blocks + resident.warps / WARPS_LIKE_A_BLOCK)


def spill_factor(resources: Resources) -> float:
    """Returns the slowdown of the inner loop by spills and serialised matrix instructions."""
    serialized = SERIALIZED_PENALTY if resources.serialized_wgmma else 1.0
    return serialized * (1 + resources.spill_bytes * SPILL_PENALTY)


def memory_seconds(problem: Problem, family: Family, config: Config, target: Target) -> float:
    """Returns the time of the family's HBM traffic at the target's bandwidth, without L2 hits."""
    return transfer_seconds(sum(item.bytes for item in family.hbm_items(problem, config, target)), target)


def transfer_seconds(size: int, target: Target) -> float:
    """Returns the time to transfer this number of bytes at the target's bandwidth."""
    return size / (target.hbm_bandwidth * 1e9 * BANDWIDTH_SHARE)


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
        return _persistent_imbalance(
            tiling, config.head_swizzle, str(config.order), config.balanced_grid, target.sm_count
        )
    longest_first = bool(getattr(config, "lpt", False))
    heads_innermost = bool(getattr(config, "heads_innermost", False))
    return _greedy_imbalance(tiling, longest_first, heads_innermost, places, target.sm_count)


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
def _persistent_imbalance(
    tiling: Tiling, head_swizzle: int, order: str, balanced_grid: bool, num_sms: int
) -> float:
    num_programs = persistent_programs(tiling.total, balanced_grid, num_sms)
    index = np.arange(tiling.total)
    costs = _lengths(tiling)[tile_of(index, num_programs, tiling, head_swizzle, order)]
    largest_load = np.bincount(index % num_programs, weights=costs).max()
    return float(largest_load * num_sms / costs.sum())


@functools.lru_cache(maxsize=4096)
def _greedy_imbalance(
    tiling: Tiling, longest_first: bool, heads_innermost: bool, places: int, num_sms: int
) -> float:
    total = tiling.total
    if total <= places:
        share = math.ceil(total / num_sms) * num_sms / total
        costs = _lengths(tiling)
        return float(share * costs.max() / costs.mean()) if total <= num_sms else share
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
