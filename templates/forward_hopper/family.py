"""Hopper's forward pass in Gluon: producer warps and consumer groups, for sm_90 only."""

import math

import msgspec

from flashtune.core.config import LaunchOptions, Space
from flashtune.core.errors import KernelError
from flashtune.core.kernel import Specialization, Step
from flashtune.core.problem import (
    MAX_HEAD_DIM,
    Bias,
    Direction,
    Dtype,
    Feature,
    KvScale,
    Problem,
)
from flashtune.core.target import Target
from flashtune.templates.common.args.arguments import transpose_arguments
from flashtune.templates.common.args.feature_context import combining_step, function_trouble
from flashtune.templates.common.model.splits import COMBINE_WARPS, UNSPLIT
from flashtune.templates.common.model.sram import MIN_DOT_WIDTH
from flashtune.templates.common.model.traffic import mean_queries
from flashtune.templates.family import Arguments, Context, FamilyOf, NumericOrder
from flashtune.templates.forward_hopper.arguments import (
    classifying_arguments,
    hopper_arguments,
    listing_arguments,
)
from flashtune.templates.forward_hopper.context import CLASSIFYING_WARPS, hopper_context
from flashtune.templates.forward_hopper.perf_model import HopperModel, split_variants
from flashtune.templates.forward_hopper.space import (
    CONVERTED_HEAD_DIMS,
    GROUP_ROWS,
    GROUP_WARPS,
    QUANTIZED_DEPTH,
    SMALLEST_COPY,
    HopperConfig,
    has_lists,
    hopper_space,
    numeric_order,
    padded,
    usual_config,
)
from flashtune.templates.forward_hopper.splits import UNSPLIT_IN_ORDER

HOPPER = 90
# Features of which the order of arithmetic is not fixed.
UNORDERED = UNSPLIT | {Feature.TREE, Feature.FUNCTIONS}
QUANTIZED_FEATURES = {Feature.WINDOW, Feature.DROPOUT}
DTYPES = (Dtype.BF16, Dtype.FP16, Dtype.E4M3)
# TMA copies rows of a multiple of 16 bytes.
ROW_BYTES = 16
WORKSPACE = "transposed"
# Features that a bias or mask, or a block mask, excludes.
EXCLUDED_WITH_BIAS = {Feature.PACKED, Feature.PAGES, Feature.KV_LENGTHS, Feature.PREFIX, Feature.TREE}
EXCLUDED_WITH_BLOCK_MASK = {Feature.PACKED, Feature.PAGES, Feature.BIAS, Feature.PREFIX, Feature.TREE}
# Programs that combine splits start before the last ones that compute them end.
COMBINING = LaunchOptions(COMBINE_WARPS, 1, early=True)
# Additional bytes of the compiler: exchange between roles, and alignment gaps.
SPARE_BYTES = 1024
# A full grid replaces a balanced one, and splits replace whole keys, if they take less than this fraction.
UNEVEN = 0.95


class ForwardHopper(HopperModel, FamilyOf[HopperConfig]):
    """The family, without state."""

    name = "forward_hopper"
    config_type = HopperConfig
    features = frozenset(
        {
            *(Feature.WINDOW, Feature.PACKED, Feature.PAGES, Feature.DROPOUT, Feature.SOFTCAP, Feature.ALIBI),
            *(Feature.SINKS, Feature.SINK_TOKENS, Feature.CHUNK, Feature.PREFIX, Feature.KV_LENGTHS),
            *(Feature.BIAS, Feature.QUANTIZED_KV, Feature.BLOCK_MASK, Feature.TREE, Feature.BATCH_INVARIANT),
            Feature.FUNCTIONS,
        }
    )
    direction = Direction.FORWARD
    interpreted = False

    def supports(self, problem: Problem, target: Target) -> str | None:
        if not target.is_nvidia or target.capability != HOPPER:
            return f"forward_hopper runs on sm_90 alone, and {target.name} is {target.arch}"
        if problem.dtype not in DTYPES:
            return f"forward_hopper takes bf16, fp16 and e4m3, not {problem.dtype.value}"
        if reason := function_trouble(self.name, problem):
            return reason
        if problem.batch_invariant and (problem.dtype.is_quantized or problem.features & UNORDERED):
            return (
                "forward_hopper is batch-invariant in bf16 and fp16 without dropout, a bias, a mask, a tree "
                "mask or a block mask"
            )
        if problem.packed and problem.dtype.is_quantized:
            return "forward_hopper takes packed sequences in bf16 and fp16, not in e4m3"
        if problem.dtype.is_quantized and problem.features - QUANTIZED_FEATURES:
            return "forward_hopper takes e4m3 with windows alone"
        if problem.dropout and (problem.packed or problem.page_size or problem.dtype.is_quantized):
            return (
                "forward_hopper drops weights in bf16 and fp16, of sequences that are not packed or in pages"
            )
        if problem.bias is not Bias.NONE and problem.features & EXCLUDED_WITH_BIAS:
            return "forward_hopper takes a bias or mask without packed sequences, pages, lengths and prefixes"
        if problem.kv_dtype and (reason := _unsupported_cache(problem)):
            return reason
        if problem.block_mask and problem.features & EXCLUDED_WITH_BLOCK_MASK:
            return "forward_hopper takes a block mask without packed sequences, pages, prefixes and biases"
        dims = problem.head_dim, problem.value_head_dim
        if max(dims) > MAX_HEAD_DIM:
            return f"forward_hopper takes head dims up to {MAX_HEAD_DIM}"
        step = ROW_BYTES // problem.dtype.itemsize
        least = QUANTIZED_DEPTH if problem.dtype.is_quantized else MIN_DOT_WIDTH
        if min(dims) < least or any(dim % step for dim in dims):
            return f"forward_hopper takes {problem.dtype.value} head dims from {least} on, in steps of {step}"
        return None

    def can_address(self, dtype: Dtype, specialization: Specialization) -> bool:
        return specialization.takes_descriptors(dtype) and specialization.copies_bias is not False

    def space(self, problem: Problem, target: Target) -> Space:
        return hopper_space(problem, target)

    def default(self, problem: Problem, target: Target) -> HopperConfig:
        """Returns the best config of most lengths, for untuned shapes; padded if needed to fit.

        Few tiles over long keys are split, so that all SMs have work.

        With some numbers of tiles, one program of a balanced grid gets most of the long tiles. The config
        then uses all SMs.
        """
        config = self._whole(problem, target)
        spread = tuple(split_variants(problem, config, target))
        best = min((self.makespan_ms(problem, other, target) for other in spread), default=math.inf)
        if best < UNEVEN * self.makespan_ms(problem, config, target):
            return next(other for other in spread if self.makespan_ms(problem, other, target) == best)
        return config

    def _whole(self, problem: Problem, target: Target) -> HopperConfig:
        """Returns the default config without splits."""
        config = usual_config(problem)
        if problem.batch_invariant and mean_queries(problem) * config.pack_gqa <= GROUP_ROWS:
            return self._of_few_rows(problem, config, target)
        is_short = mean_queries(problem) <= GROUP_ROWS
        if problem.packed and is_short and config.num_consumer_groups > 1:
            # Other groups have no rows of short sequences.
            config = msgspec.structs.replace(config, num_consumer_groups=1, ping_pong=False, q_stages=2)
        room = target.sram_per_block - SPARE_BYTES
        items = self.sram_items(problem, config, target, Specialization())
        if sum(item.bytes for item in items) > room:
            if problem.batch_invariant:
                # Padded tiles have another order of arithmetic.
                return self._of_few_rows(problem, config, target)
            config = padded(problem, config)
        if config.balanced_grid:
            full = msgspec.structs.replace(config, balanced_grid=False)
            if self.makespan_ms(problem, full, target) < UNEVEN * self.makespan_ms(problem, config, target):
                return full
        return config

    def _of_few_rows(self, problem: Problem, config: HopperConfig, target: Target) -> HopperConfig:
        """Returns a config with one group and the most blocks in flight that fit. Copies take the time."""
        room = target.sram_per_block - SPARE_BYTES
        # Two blocks of all head dims fit.
        for stages in (4, 3, 2):
            few = msgspec.structs.replace(
                config, num_consumer_groups=1, ping_pong=False, q_stages=1, num_stages=stages
            )
            items = self.sram_items(problem, few, target, Specialization())
            if sum(item.bytes for item in items) <= room:
                break
        return few

    def arguments(self, problem: Problem, config: HopperConfig, specialization: Specialization) -> Arguments:
        return hopper_arguments(problem, config, specialization)

    def prologue(self, problem: Problem, config: HopperConfig, specialization: Specialization) -> Step | None:
        """Returns the prologue that transposes V of 8 bits, which TMA cannot, or those that list blocks."""
        if has_lists(problem):
            first = None
            if problem.bias is not Bias.NONE:
                options = LaunchOptions(CLASSIFYING_WARPS[problem.bias], 1)
                first = Step("classify_blocks", classifying_arguments(problem, specialization), options)
            arguments = listing_arguments(problem, config, specialization)
            return Step("list_blocks", arguments, LaunchOptions(1, 1), before=first)
        if not problem.dtype.is_quantized:
            return None
        arguments = transpose_arguments(problem.dtype, specialization, WORKSPACE)
        return Step("transpose_values", arguments, LaunchOptions(GROUP_WARPS, 1))

    def numeric_order(self, problem: Problem, config: HopperConfig | None = None) -> NumericOrder:
        return numeric_order(problem, config)

    def epilogue(self, problem: Problem, config: HopperConfig, specialization: Specialization) -> Step | None:
        if config.num_splits == 1:
            return None
        names: tuple[str, ...] = ()
        if problem.batch_invariant:
            # Sinks are added after all splits. Their number follows from the lengths.
            names = ("sinks",) if problem.packed else ("sinks", "seqlens_kv")
        return combining_step(problem, specialization, names, COMBINING)

    def context(self, problem: Problem, config: HopperConfig, specialization: Specialization) -> Context:
        if problem.packed and config.pack_gqa > 1:
            raise KernelError("heads share no tiles in varlen batches: set pack_gqa to 1")
        is_hidden = problem.batch_invariant and not problem.features.isdisjoint(UNSPLIT_IN_ORDER)
        if config.num_splits > 1 and is_hidden:
            raise KernelError("keys of windows and chunks are not split in one order: set num_splits to 1")
        return hopper_context(problem, config, specialization)


def _unsupported_cache(problem: Problem) -> str | None:
    """Returns the reason why a cache in 8 bits is not supported, or None."""
    if not problem.page_size:
        return "forward_hopper takes 8-bit keys in pages"
    if problem.kv_scale is KvScale.PAGE and problem.page_size < SMALLEST_COPY:
        return f"forward_hopper takes scales of pages of {SMALLEST_COPY} keys or more"
    if problem.kv_scale is KvScale.PAGE and problem.dtype is Dtype.FP16:
        return "forward_hopper takes scales of pages in bf16"
    if problem.functions:
        return "forward_hopper takes 8-bit keys without score and mask functions"
    if problem.head_dim != problem.value_head_dim or problem.head_dim not in CONVERTED_HEAD_DIMS:
        return "forward_hopper takes 8-bit keys of head dims 64 and 128, as wide as their values"
    return None


FAMILY = ForwardHopper()
