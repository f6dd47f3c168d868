"""Performance model of Hopper's backward pass: SRAM and makespan."""

import math
from collections.abc import Iterable

import msgspec

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Bias, Problem
from flashtune.core.target import Target
from flashtune.templates.backward_hopper.space import (
    ROWS,
    WIDEST,
    HopperBackwardConfig,
    has_own_steps,
    may_rotate,
    query_parts,
    width_of,
)
from flashtune.templates.common.model.cost import BANDWIDTH_SHARE
from flashtune.templates.common.model.functions import share_of_functions
from flashtune.templates.common.model.traffic import cycled_queries, summed_items, unpacked
from flashtune.templates.family import BytesItem, BytesItems, PerformanceModel

BARRIER_BYTES = 8
FLOAT32 = 4
RANDOM_WORDS = 2
# Rings have barriers for full and for empty tiles.
SIDES = 2
# Barriers of each slot of the rings between groups, and others. If groups divide keys, gradients of scores
# have a full barrier for each group and an empty one for both. The others are those of k and v, of each
# group. If they divide products, probabilities and gradients of scores have full and empty ones. The others
# are those of k, of v, and of the end.
DIVIDED_KEYS = 3, 4
DIVIDED_PRODUCTS = 4, 3
# In deterministic kernels: a group may add, and it has added.
TURNS = 4
# None of these was fitted. Before the first and after the last block, of three kernels in sequence, in µs.
LAUNCH = 15.0
# Loads of keys and values and stores of their gradients: a program's time without its blocks, in µs.
PROGRAM = 3.0
# From one block of keys' addition to dq until the next one's, if deterministic, in µs.
TURN = 1.5
# Time of the prologue for the steps of a block mask, in µs.
LISTING = 5.0
# Fraction of the peak for the products of a block: shared memory is as busy as the Tensor Cores.
PRODUCTS_SHARE = 0.62
# The same if groups alternate, which reads less.
TURNS_SHARE = 0.68
# Time of a block with a softcap. Its exponentials and reciprocals do not overlap with all products.
CAPPED = 1.4
# Time of a block with a bias, which was not fitted. Sums with it do not overlap with all products.
BIASED = 1.15
# A bias has slots and barriers for each group, and a row of sums.
BIAS_SLOTS = 2
# Number of products for each pair of a query and a key.
PRODUCTS = 5
# Rate of additions in the last-level cache over that of HBM.
ADDITION_RATE = 0.7


class HopperBackwardModel(PerformanceModel[HopperBackwardConfig]):
    """The model, without state."""

    def sram_items(
        self, problem: Problem, config: HopperBackwardConfig, target: Target, specialization: Specialization
    ) -> BytesItems:
        """Returns all allocations of a program, in bytes."""
        size, width = problem.dtype.itemsize, width_of(problem)
        tile = config.block_m * width * size
        widest = width == WIDEST
        of_slot, others = DIVIDED_PRODUCTS if widest else DIVIDED_KEYS
        passed = "weights and gradients of scores" if widest else "gradients of scores of each group"
        # Two tiles of 64 keys in either case.
        scores = 2 * ROWS * config.block_m * size
        # Groups with steps of their own have rings of their own.
        rings = 2 if has_own_steps(problem) else 1
        streamed = rings * (config.num_stages + config.do_stages)
        # Random words are loaded with dout.
        rows = streamed + (RANDOM_WORDS * rings * config.do_stages if problem.dropout else 0)
        biases = BIAS_SLOTS if problem.bias is Bias.ADDITIVE else 0
        rows += biases
        turns = TURNS if problem.deterministic else 0
        waits = SIDES * streamed + (of_slot + rings - 1) * config.ds_stages + others + turns
        waits += SIDES * biases
        return (
            BytesItem(f"q, {rings * config.num_stages} in flight", rings * config.num_stages * tile),
            BytesItem(f"dout, {rings * config.do_stages} in flight", rings * config.do_stages * tile),
            BytesItem("k and v", 2 * config.block_n * width * size),
            BytesItem(f"{passed}, {config.ds_stages} in flight", config.ds_stages * scores),
            *_bias_items("bias of each group", problem, biases * ROWS * config.block_m),
            BytesItem("log-sum-exp and delta of rows", rows * config.block_m * FLOAT32),
            BytesItem("barriers", waits * BARRIER_BYTES),
        )

    def makespan_ms(self, problem: Problem, config: HopperBackwardConfig, target: Target) -> float:
        """Returns the time of the launches by their schedule, in ms."""
        problem = unpacked(problem)
        heads = problem.batch * problem.kv_heads
        blocks = math.ceil(problem.seqlen_kv / config.block_n)
        programs = heads * blocks
        if not programs or not problem.seqlen_q:
            return LAUNCH / 1e3
        width = width_of(problem)
        share = TURNS_SHARE if config.alternate_dq else PRODUCTS_SHARE
        rate = share * target.peak.half * 1e6 / target.sm_count
        step = PRODUCTS * 2 * config.block_m * config.block_n * width / rate
        if problem.softcap:
            step *= CAPPED
        if problem.bias is Bias.ADDITIVE:
            step *= BIASED
        step *= 1.0 + share_of_functions(problem)
        # The program with the most blocks of queries; then all programs.
        left, right = problem.sight.left, problem.sight.right
        queries = problem.seqlen_q
        if left is not None and right is not None:
            queries = min(queries, left + right + config.block_n + config.block_m)
        share = _visible_tiles(problem, config)
        most = PROGRAM + math.ceil(queries / config.block_m) * problem.group_size * step * share
        rows = cycled_queries(problem, config.block_m, config.block_n) * problem.group_size * share
        if left is None and right is None and not problem.block_mask:
            busy = math.ceil(programs / target.sm_count) * most
        else:
            busy = max(most, (programs * PROGRAM + heads * rows / config.block_m * step) / target.sm_count)
        # Groups with steps of their own add the same blocks of dq one after another.
        rows *= 2 if has_own_steps(problem) else 1
        added = heads * rows * width * FLOAT32 / (target.hbm_bandwidth * 1e3 * ADDITION_RATE)
        moved = _bias_items("bias and its gradient", problem, 2 * heads * int(rows) * config.block_n)
        added += sum(item.bytes for item in moved) / (target.hbm_bandwidth * 1e3 * BANDWIDTH_SHARE)
        if problem.deterministic:
            # Programs of a head that start at once wait for one another.
            busy += TURN * min(blocks, target.sm_count) / config.interleaved_heads
        listing = LISTING if problem.block_mask else 0.0
        return (LAUNCH + listing + max(busy, added) + _steps_us(problem, width, target)) / 1e3

    def schedule_variants(
        self, problem: Problem, config: HopperBackwardConfig, target: Target
    ) -> Iterable[HopperBackwardConfig]:
        """Returns configs that differ only in the programs' first query blocks."""
        if may_rotate(problem):
            yield msgspec.structs.replace(config, stagger_start=not config.stagger_start)

    def hbm_items(
        self, problem: Problem, config: HopperBackwardConfig, target: Target | None = None
    ) -> BytesItems:
        pairs = problem.batch * problem.heads * cycled_queries(problem, config.block_m, config.block_n)
        return (
            *summed_items(unpacked(problem), config.block_m, config.block_n, width_of(problem), target),
            *_bias_items("bias read, its gradient written", problem, 2 * pairs * config.block_n),
        )


def _bias_items(name: str, problem: Problem, elements: int) -> BytesItems:
    """Returns an item with elements of an additive bias, if the problem has one."""
    is_biased = problem.bias is Bias.ADDITIVE
    return (BytesItem(name, elements * problem.dtype.itemsize),) if is_biased else ()


def _visible_tiles(problem: Problem, config: HopperBackwardConfig) -> float:
    """Returns the fraction of tiles with a visible block of a block mask, if these are random."""
    return float(1 - (1 - problem.block_share) ** query_parts(problem, config))


def _steps_us(problem: Problem, width: int, target: Target) -> float:
    """Returns the time of prologue and epilogue: read out and dout, clear and read sums, write dq."""
    rows = problem.batch * problem.heads * problem.seqlen_q
    bytes_of_row = (2 * problem.value_head_dim + problem.head_dim) * problem.dtype.itemsize
    return rows * (bytes_of_row + 2 * width * FLOAT32) / (target.hbm_bandwidth * 1e3 * BANDWIDTH_SHARE)
