"""Performance model of split keys: minimum SRAM and makespan; other splits of a config."""

import math
from collections.abc import Iterable

import msgspec

from flashtune.core.features.mask_geometry import distinct_keys
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Bias, KvScale, Problem
from flashtune.core.target import KIB, Target
from flashtune.templates.common.model.cost import BANDWIDTH_SHARE, combining_us
from flashtune.templates.common.model.functions import loaded_bytes
from flashtune.templates.common.model.sram import Engine, columns, engine_of, tiles_of
from flashtune.templates.common.model.sram_stream import Stream
from flashtune.templates.common.model.traffic import split_keys_items, unpacked
from flashtune.templates.common.precision import at_rate, fixed_precision
from flashtune.templates.decode_split_kv.space import (
    WARPGROUP_ROWS,
    DecodeConfig,
    block_bytes,
    decode_space,
    group_rows,
    loads_pairs,
    query_chunks,
    value_chunks,
)
from flashtune.templates.family import BytesItem, BytesItems, PerformanceModel

# In µs: an empty launch, its part that overlaps the preceding kernel, and a program's time without its keys.
LAUNCH = 3.7
EARLY_START = 1.3
PROGRAM = 1.2
# An SM's maximum bandwidth over its equal share.
GREED = 1.1
# Fractions of the Tensor Cores' peak: in warp groups, and in warps.
WARPGROUP_RATE = 0.5
WARP_RATE = 0.3
# Bytes of 8-bit keys that one program processes in a µs, since conversion follows the wait. Measured before
# loads in pairs. Blocks of keys in pages are as slow. Several programs of an SM do so concurrently, up to
# this many.
LONE_PROGRAM = 22e3
SIDE_BY_SIDE = 3

# Wider values exceed tensor memory if they are loaded in pairs.
MAX_PAIRED_VALUES = 256
# Barriers and small buffers of kernels with tcgen05, at most.
BARRIERS = KIB
# Bytes of a page's number, of a scale, and of a row's maximum.
WORD = 4
# Bytes of the parts of a float32 number: three numbers in bf16.
PARTS_BYTES = 6


class DecodeModel(PerformanceModel[DecodeConfig]):
    """The model, without state."""

    def sram_items(
        self, problem: Problem, config: DecodeConfig, target: Target, specialization: Specialization
    ) -> BytesItems:
        """Returns the items that are live at one point of the main loop."""
        chunks = query_chunks(problem, config.split_head_dim), value_chunks(problem, config.split_head_dim)
        blocks = config.block_m, config.block_n
        tiles = tiles_of(problem, target, blocks, config.num_warps, chunks, ieee=False)
        # AMD's units reorder tiles in registers, other units read them from SRAM.
        if tiles is None or tiles.engine is Engine.MFMA:
            return ()
        stored = msgspec.structs.replace(tiles, itemsize=problem.kv_itemsize)
        # Columns beyond a head dim are masked in groups, whose size divides it.
        together = math.gcd(specialization.alignment, problem.head_dim, problem.value_head_dim)
        stream = Stream(
            tiles=stored,
            stages=config.num_stages,
            descriptors=False,
            ahead=False,
            aligned_bytes=together * problem.kv_itemsize,
            halves=False,
        )
        grouped = tiles.engine is Engine.WARPGROUP and problem.kv_dtype is None
        # Tensor Cores of warp groups read SRAM; others, and conversions, read registers.
        flight = config.num_stages if grouped else config.num_stages - 1
        items = [BytesItem(f"k, {flight} in flight", flight * stream.k)]
        if not problem.mla:
            items.append(BytesItem(f"v, {flight} in flight", flight * stream.v))
        if grouped:
            items.append(BytesItem("q", sum(tile for tile in tiles.q if tiles.worth_a_copy(tile))))
        return tuple(item for item in items if item.bytes)

    def makespan_ms(self, problem: Problem, config: DecodeConfig, target: Target) -> float:
        problem = unpacked(problem)
        keys = math.ceil(distinct_keys(problem.sight) * problem.block_share)
        tiles = math.ceil(group_rows(problem) / config.block_m)
        programs = tiles * problem.batch * problem.kv_heads * config.num_splits
        if not programs or not keys:
            return LAUNCH / 1e3
        blocks = math.ceil(math.ceil(keys / config.block_n) / config.num_splits)
        rounds = math.ceil(programs / target.sm_count)
        width = columns(query_chunks(problem, config.split_head_dim))
        values = columns(value_chunks(problem, config.split_head_dim))
        size = problem.head_dim + (0 if problem.mla else problem.value_head_dim)
        bandwidth = target.hbm_bandwidth * 1e3 * BANDWIDTH_SHARE
        # Bytes of a program. Those of other tiles come from the cache.
        part = blocks * config.block_n * size * problem.kv_itemsize / tiles
        share = GREED * bandwidth / target.sm_count
        products = 2 * config.block_m * blocks * config.block_n * (width + values)
        grouped = config.block_m >= WARPGROUP_ROWS and config.num_warps % 4 == 0
        peak = at_rate(problem, fixed_precision(problem), target).peak
        peak_rate = peak.fp32 if problem.dtype.is_float32 else peak.half
        rate = peak_rate * 1e6 / target.sm_count * (WARPGROUP_RATE if grouped else WARP_RATE)
        busy = rounds * (max(part / share, products / rate) + PROGRAM)
        if problem.kv_dtype is not None or problem.page_size:
            busy = max(busy, math.ceil(rounds / SIDE_BY_SIDE) * (part * tiles / LONE_PROGRAM + PROGRAM))
        moved = problem.minimal_bytes() / bandwidth + PROGRAM
        launch = LAUNCH - EARLY_START if config.early_start else LAUNCH
        return (launch + max(busy, moved) + combining_us(problem, config.num_splits, target)) / 1e3

    def schedule_variants(
        self, problem: Problem, config: DecodeConfig, target: Target
    ) -> Iterable[DecodeConfig]:
        """Returns points of a space with the same tiles and other splits."""
        space = decode_space(problem, target)
        axes = {axis.name: axis.values for axis in space.axes}
        for splits in axes["num_splits"]:
            assert isinstance(splits, int)
            # A single split has nothing to combine.
            early = len(axes["early_combine"]) > 1 and splits != 1
            other = msgspec.structs.replace(config, num_splits=splits, early_combine=early)
            if space.contains(other):
                yield other

    def hbm_items(self, problem: Problem, config: DecodeConfig, target: Target | None = None) -> BytesItems:
        problem = unpacked(problem)
        tiles = math.ceil(group_rows(problem) / config.block_m)
        return split_keys_items(problem, tiles, config.num_splits, target)


def expected_sram(problem: Problem, config: DecodeConfig, target: Target) -> int:
    """Returns the bytes of SRAM that Triton 3.7 needs for aligned tensors, or slightly more.

    A bias can need up to two tiles of scores more. `sram_items` is a lower bound for all Triton versions.
    """
    engine = engine_of(target, problem.dtype, config.block_m, config.num_warps, ieee=False)
    stored = problem.kv_dtype is not None
    size = PARTS_BYTES if problem.dtype.is_float32 else problem.dtype.itemsize
    q_chunks = query_chunks(problem, config.split_head_dim)
    values = columns(value_chunks(problem, config.split_head_dim))
    in_sram = engine in (Engine.WARPGROUP, Engine.TENSOR_MEMORY)
    # Instructions that read SRAM keep the block in use there, unless it was converted.
    flight = config.num_stages if in_sram and not stored else config.num_stages - 1
    total = flight * block_bytes(problem, config)
    total += config.block_m * config.block_n * size * _score_tiles(problem, config, engine, values)
    widths = sorted(chunk.width for chunk in q_chunks)
    if engine is Engine.MFMA:
        return max(total, config.block_m * widths[-1] * size)
    if problem.page_size and problem.page_size < config.block_n:
        numbers = 3 if stored and problem.kv_scale is KvScale.PAGE else 1
        total += (config.num_stages - 1) * config.block_n * numbers * WORD
    total += config.block_m * (columns(q_chunks) * size + WORD)
    total += max(1, config.num_stages - 1) * loaded_bytes(problem, config.block_m, config.block_n)
    if stored and not (engine is Engine.WARP and loads_pairs(problem, config, Specialization())):
        # At most two tiles of keys are in SRAM after their conversion.
        converted = values if engine is Engine.WARP else max(sum(widths[-2:]), values)
        total += config.block_n * converted * problem.dtype.itemsize
    elif config.num_stages == 1:
        total += config.block_n * max(widths[-1], values) * problem.dtype.itemsize
    if engine is Engine.TENSOR_MEMORY:
        # Values that are keys as well are copied for the products of each tile of columns.
        copies = len(q_chunks) if problem.mla and not stored else 0
        total += copies * config.block_n * values * size + BARRIERS
    return total


def _score_tiles(problem: Problem, config: DecodeConfig, engine: Engine | None, values: int) -> int:
    """Returns the number of tiles of scores or probabilities that pass through SRAM."""
    biased, stored = problem.bias is not Bias.NONE, problem.kv_dtype is not None
    if engine in (Engine.WARPGROUP, Engine.TENSOR_MEMORY):
        return int(biased and not stored)
    if problem.dtype.is_float32:
        return 2 if problem.bias is Bias.ADDITIVE else 1
    if engine is not Engine.WARP:
        return 2 if biased else int(config.block_m >= WARPGROUP_ROWS)
    crosses = config.block_m < values
    # Warps that have all keys of their rows add a bias in registers.
    own_rows = config.block_m >= WARPGROUP_ROWS and (crosses or stored)
    return 2 if biased and not own_rows else int(crosses)


def converts_for_tensor_memory(problem: Problem, config: DecodeConfig, target: Target) -> bool:
    """Returns whether products in tensor memory need 8-bit keys that Triton 3.7 cannot convert for them."""
    engine = engine_of(target, problem.dtype, config.block_m, config.num_warps, ieee=False)
    if engine is not Engine.TENSOR_MEMORY or problem.kv_dtype is None:
        return False
    if loads_pairs(problem, config, Specialization()):
        return problem.value_head_dim > MAX_PAIRED_VALUES
    # Its pipeliner fails, except for the products of scaled pages.
    return problem.kv_scale is not KvScale.PAGE
