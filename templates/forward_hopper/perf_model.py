"""Performance model of the Hopper family: SRAM and makespan; other schedules of the same work."""

import itertools
import math
from collections.abc import Iterable

import msgspec

from flashtune.core.expressions.nodes import Op
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Bias, KvScale, Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.cost import (
    CostParams,
    block_us,
    combining_us,
    tile_us,
    together_us,
    traffic_us,
)
from flashtune.templates.common.model.splits import count_tiles
from flashtune.templates.common.model.sram import chunks_of, columns
from flashtune.templates.common.model.tile_schedule import (
    TileCost,
    Tiling,
    extremes,
    have_equal_length,
    largest_load,
    persistent_programs,
)
from flashtune.templates.common.model.traffic import AtOnce, streamed_items, unpacked
from flashtune.templates.family import BytesItem, BytesItems, PerformanceModel
from flashtune.templates.forward_hopper.space import (
    HopperConfig,
    Order,
    has_one_list,
    hopper_space,
    raw_stages,
)
from flashtune.templates.forward_hopper.splits import max_split_tiles, split_parts

BARRIER_BYTES = 8
SCALE_BYTES = 4
# Keys that share a scale in shared memory.
SCALED_KEYS = 8
INDEX_BYTES = 4
# Each ring has barriers for full and for empty tiles.
SIDES = 2
# Indices of tiles from the producer to the groups.
QUEUE_SLOTS = 2
# By consumer groups: more groups overlap more of the softmax with the others' products.
PACES = {
    1: CostParams(launch=9.9, block=0.173, tile=0.663, hidden=-0.1, exposed=0.5),
    2: CostParams(launch=9.9, block=0.173, tile=0.663, hidden=0.73, exposed=0.5),
    3: CostParams(launch=9.9, block=0.173, tile=1.53, hidden=0.9, exposed=0.5),
}
MAX_GROUPS = max(PACES)
# No larger number was ever the fastest: benchmarks/results/hopper.md.
SWIZZLES = (0, 1, 4)
BLOCKS = (64, 128)
# Additional time of a tile, in µs: two divisions in serpentine order, and the load of the next queries if
# there is only one buffer.
SERPENTINE_US = 0.25
SINGLE_Q_STAGE_US = 0.43
# Further exponentials of a score. A softcap takes one, and a quarter of a reciprocal.
SOFTCAP_EXPONENTIALS = 1.25
ALIBI_EXPONENTIALS = 0.2
BIAS_EXPONENTIALS = 0.6
# Those of operations on scores, and of all others. They are not fitted to measurements.
FUNCTION_EXPONENTIALS = {Op.SCORE: 0.1, Op.TANH: 1.25, Op.EXP: 1.0, Op.LOG: 2.0, Op.DIVIDE: 0.5}
OPERATION_EXPONENTIALS = 0.1
MASK_EXPONENTIALS = 0.2
# Time of the prologues that classify and list blocks, in µs: their launches, and that of 2^20 pairs of a
# mask, or of a bias of one head. By a block mask, all of it.
LISTING_US = 5.0
MASK_US = 1.1
BIAS_US = 0.35
BLOCK_LISTING_US = 3.0
# Elements of keys and values that a program converts per clock, beyond what overlaps with its products.
CONVERTED_PER_CLOCK = 40.0
# Additional time of a launch that splits keys, in µs, with one consumer group and with several. Fitted to
# benchmarks/results/nvidia-h200-splits.json.gz.
SPLIT_US, SPLIT_GROUPS_US = 1.5, 7.8
# Fraction of time lost if programs of a group of heads change heads in each round.
DRIFT_PENALTY = 0.05


class HopperModel(PerformanceModel[HopperConfig]):
    """The model, without state."""

    def sram_items(
        self, problem: Problem, config: HopperConfig, target: Target, specialization: Specialization
    ) -> BytesItems:
        """Returns all allocations of a program, in bytes."""
        size = problem.dtype.itemsize
        queries, values = map(columns, chunks_of(problem, config.split_head_dim))
        q_slots = config.q_stages * config.num_consumer_groups
        staged = values // 2 if config.split_epilogue else values
        block = config.num_stages * config.block_n
        slots = q_slots + 2 * config.num_stages
        biases = config.bias_stages * (problem.bias is Bias.ADDITIVE)
        slots += config.num_consumer_groups * biases
        raw = raw_stages(config) if problem.kv_dtype else 0
        slots += raw + QUEUE_SLOTS * config.dynamic_schedule
        barriers = SIDES * slots * BARRIER_BYTES
        has_scales = problem.kv_dtype is not None and problem.kv_scale is KvScale.PAGE
        scales = 2 * block // SCALED_KEYS * has_scales
        items = (
            BytesItem(f"q, {config.q_stages} in flight", q_slots * config.rows_per_group * queries * size),
            BytesItem(f"k, {config.num_stages} in flight", block * queries * size),
            BytesItem(f"v, {config.num_stages} in flight", block * values * size),
            BytesItem(
                f"weights, {config.p_stages} in flight",
                config.p_stages * config.block_m * config.block_n * size,
            ),
            BytesItem(f"bias, {biases} in flight", config.block_m * config.block_n * size * biases),
            BytesItem(f"k and v in 8 bits, {raw} in flight", raw * config.block_n * values),
            BytesItem(f"scales of pages, {config.num_stages} in flight", scales * SCALE_BYTES),
            # Outputs of splits are stored from registers.
            BytesItem(
                "out to be stored",
                config.block_m * staged * problem.dtype.out.itemsize * (config.num_splits == 1),
            ),
            BytesItem("barriers", barriers),
            BytesItem("indices of tiles", QUEUE_SLOTS * INDEX_BYTES * config.dynamic_schedule),
        )
        return tuple(item for item in items if item.bytes)

    def makespan_ms(self, problem: Problem, config: HopperConfig, target: Target) -> float:
        problem = unpacked(problem)
        tiling = Tiling(problem, config.block_m // config.pack_gqa, config.block_n, config.pack_gqa)
        pace = PACES[min(config.num_consumer_groups, MAX_GROUPS)]
        if not tiling.total or not problem.seqlen_kv:
            return pace.launch / 1e3
        cost = TileCost(
            block_us(problem, config.block_m * config.block_n, pace, target, _exponentials(problem))
            * _copied_blocks(problem, config)
            + _conversion(problem, config, target),
            tile_us(problem, config.block_m, pace, target) + _between(config),
        )
        parts = split_parts(problem, config.num_splits)
        num_programs = persistent_programs(tiling.total * parts, config.balanced_grid, target.sm_count)
        if parts > 1:
            busy = _busy_with_splits(tiling, num_programs, parts, cost)
        else:
            busy = largest_load(tiling, num_programs, config.head_swizzle, config.order.value, cost)
        streamed = extremes(tiling).mean * tiling.total * config.block_n
        head_swizzle = min(config.head_swizzle or tiling.heads, tiling.heads)
        moving = traffic_us(
            problem,
            streamed,
            head_swizzle / tiling.packs,
            num_programs,
            target,
            neighbours=min(head_swizzle, tiling.packs),
        )
        combining = combining_us(problem, parts, target)
        if parts > 1:
            combining += SPLIT_US if config.num_consumer_groups == 1 else SPLIT_GROUPS_US
        lost = DRIFT_PENALTY if _programs_drift(tiling, num_programs, head_swizzle, target) else 0.0
        return ((1 + lost) * (pace.launch + together_us(busy, moving)) + _listing(problem) + combining) / 1e3

    def schedule_variants(
        self, problem: Problem, config: HopperConfig, target: Target
    ) -> Iterable[HopperConfig]:
        """Returns points of a space that schedule the same work differently.

        They have other orders and groups of heads, all SMs or fewer, or one consumer group. Others have other
        blocks of keys, with as many heads of a group in a tile as possible.
        """
        space = hopper_space(problem, target)
        axes = {axis.name: axis.values for axis in space.axes}
        swizzles = tuple(head_swizzle for head_swizzle in axes["head_swizzle"] if head_swizzle in SWIZZLES)
        choices = (
            dict.fromkeys((config.num_consumer_groups, 1)),
            swizzles,
            axes["order"],
            axes["balanced_grid"],
        )
        for groups, head_swizzle, order, balanced_grid in itertools.product(*choices):
            other = msgspec.structs.replace(
                config,
                num_consumer_groups=groups,
                ping_pong=config.ping_pong and groups > 1,
                head_swizzle=head_swizzle,
                order=order,
                balanced_grid=balanced_grid,
            )
            if other != config and space.contains(other):
                yield other
        for pack, block_n in itertools.product(axes["pack_gqa"], BLOCKS):
            other = msgspec.structs.replace(config, pack_gqa=pack, block_n=block_n)
            if other != config and space.contains(other):
                yield other
        yield from split_variants(problem, config, target)

    def hbm_items(self, problem: Problem, config: HopperConfig, target: Target | None = None) -> BytesItems:
        problem = unpacked(problem)
        at_once = running_programs(problem, config, target)
        return streamed_items(
            problem, config.block_m, config.block_n, at_once, target, packed_heads=config.pack_gqa
        )


def split_variants(problem: Problem, config: HopperConfig, target: Target) -> Iterable[HopperConfig]:
    """Returns points of a space with one or two tiles for every SM by splits, and other groups and packs.

    Packs of more heads come first. They read keys fewer times, which the model of time does not count.
    """
    space = hopper_space(problem, target)
    axes = {axis.name: axis.values for axis in space.axes}
    counts = [count for count in axes["num_splits"] if isinstance(count, int) and count > 1]
    groups_of, packs = dict.fromkeys((config.num_consumer_groups, 1)), reversed(axes["pack_gqa"])
    for groups, pack in itertools.product(groups_of, packs):
        assert isinstance(pack, int)
        tiles = count_tiles(problem, groups * config.rows_per_group, pack)
        limits = [waves * target.sm_count for waves in (1, 2)]
        if problem.batch_invariant:
            # Splits of a fixed length leave no choice.
            limits = [max_split_tiles(problem, target)]
        fitting = (
            [count for count in counts if split_parts(problem, count) * tiles <= limit] for limit in limits
        )
        for splits in dict.fromkeys(most[-1] for most in fitting if most):
            other = msgspec.structs.replace(
                config,
                num_consumer_groups=groups,
                ping_pong=config.ping_pong and groups > 1,
                # Outputs of splits are stored from registers.
                split_epilogue=False,
                pack_gqa=pack,
                order=Order.LINEAR,
                balanced_grid=False,
                num_splits=splits,
            )
            if other != config and space.contains(other):
                yield other


def _busy_with_splits(tiling: Tiling, num_programs: int, splits: int, cost: TileCost) -> float:
    """Returns the largest cost of a persistent program if tiles are split evenly."""
    blocks = extremes(tiling)
    rounds = math.ceil(tiling.total * splits / num_programs)
    longest, mean = (
        math.ceil(count / splits) * cost.block + cost.tile for count in (blocks.most, blocks.mean)
    )
    return max(longest, rounds * mean)


def running_programs(problem: Problem, config: HopperConfig, target: Target | None) -> AtOnce:
    """Counts the persistent programs, and the KV heads of which they share tiles."""
    tiling = Tiling(problem, config.block_m // config.pack_gqa, config.block_n, config.pack_gqa)
    head_swizzle = min(config.head_swizzle or tiling.heads, tiling.heads)
    programs = min(tiling.total, target.sm_count if target else 1)
    # Tiles are not rounded up here, so the working set is continuous in the number of queries.
    heads = min(tiling.heads, max(head_swizzle, programs / max(1.0, problem.seqlen_q / tiling.rows) + 1))
    return AtOnce(programs, max(1.0, heads / tiling.packs), min(head_swizzle, tiling.packs))


def _exponentials(problem: Problem) -> float:
    """Returns the exponentials of a score, or as much time of the FMA units."""
    bias = {Bias.NONE: 0.0, Bias.ADDITIVE: BIAS_EXPONENTIALS, Bias.BOOLEAN: MASK_EXPONENTIALS}[problem.bias]
    return (
        1.0
        + SOFTCAP_EXPONENTIALS * problem.softcap
        + ALIBI_EXPONENTIALS * problem.alibi
        + bias
        + _function_exponentials(problem)
    )


def _function_exponentials(problem: Problem) -> float:
    """Returns those of a score function. The mask function is evaluated in few blocks."""
    functions = problem.functions
    # Other operations do not depend on the score, and often not on keys.
    of_score = functions.of_score.intersection(functions.needed(functions.score))
    return sum(
        FUNCTION_EXPONENTIALS.get(functions.nodes[place].op, OPERATION_EXPONENTIALS) for place in of_score
    )


def _copied_blocks(problem: Problem, config: HopperConfig) -> float:
    """Returns the blocks that a tile copies, as a multiple of those that one of its groups sees."""
    if not problem.block_mask or has_one_list(problem, config):
        return 1.0
    share = problem.block_share
    return float(1 - (1 - share) ** config.num_consumer_groups) / share


def _conversion(problem: Problem, config: HopperConfig, target: Target) -> float:
    """Returns the time by which the conversion of keys and values in 8 bits delays a block, in µs."""
    if problem.kv_dtype is None:
        return 0.0
    elements = config.block_n * (problem.head_dim + problem.value_head_dim)
    return elements / (CONVERTED_PER_CLOCK * target.clock_mhz)


def _listing(problem: Problem) -> float:
    """Returns the time of the prologues, if any, in µs. Batches share a mask or bias, heads a mask."""
    if problem.block_mask:
        return BLOCK_LISTING_US
    if problem.bias is Bias.NONE:
        return 0.0
    pairs = problem.seqlen_q * problem.seqlen_kv / 2**20
    return LISTING_US + pairs * (MASK_US if problem.bias is Bias.BOOLEAN else BIAS_US * problem.heads)


def _between(config: HopperConfig) -> float:
    """Returns the time between tiles, by parameters of the config, in µs."""
    alternating = SERPENTINE_US if config.order is Order.SERPENTINE else 0.0
    return alternating + (SINGLE_Q_STAGE_US if config.q_stages == 1 else 0.0)


def _programs_drift(tiling: Tiling, num_programs: int, head_swizzle: int, target: Target) -> bool:
    """Returns whether programs on one head drift apart: tiles differ, and so do the heads of rounds."""
    in_rounds = target.sm_count < tiling.total and num_programs < target.sm_count
    differ = tiling.tiles > 1 and not have_equal_length(tiling.problem)
    return in_rounds and differ and head_swizzle < tiling.heads and num_programs % head_swizzle != 0
