"""Hopper's forward pass in Gluon: producer warps and consumer groups, for sm_90 only."""

import msgspec

from flashtune.core.config import LaunchOptions, Space
from flashtune.core.errors import KernelError
from flashtune.core.kernel import Argument, Specialization, Step
from flashtune.core.problem import (
    MAX_HEAD_DIM,
    Bias,
    Causal,
    Direction,
    Dtype,
    Feature,
    KvDtype,
    KvScale,
    Problem,
)
from flashtune.core.target import Target
from flashtune.templates.common.args.arguments import transpose_arguments
from flashtune.templates.common.args.problem_context import (
    UNBOUNDED,
    ProblemContext,
    bound,
    problem_fields,
)
from flashtune.templates.common.model.sram import MIN_DOT_WIDTH, Chunk, columns, head_chunks, power_of_two
from flashtune.templates.common.model.traffic import mean_queries
from flashtune.templates.family import Context, FamilyOf
from flashtune.templates.forward_hopper.arguments import (
    classifying_arguments,
    hopper_arguments,
    listing_arguments,
)
from flashtune.templates.forward_hopper.perf_model import HopperModel
from flashtune.templates.forward_hopper.space import (
    CONVERTED_HEAD_DIMS,
    CONVERTER_REGISTERS,
    GROUP_ROWS,
    GROUP_WARPS,
    QUANTIZED_DEPTH,
    SMALLEST_COPY,
    HopperConfig,
    Order,
    copied_keys,
    gathers,
    has_lists,
    has_one_list,
    hopper_space,
    padded,
    raw_stages,
    role_registers,
    stored_dtype,
    usual_config,
)

HOPPER = 90
QUANTIZED_FEATURES = {Feature.WINDOW, Feature.DROPOUT}
DTYPES = (Dtype.BF16, Dtype.FP16, Dtype.E4M3)
# TMA copies rows of a multiple of 16 bytes.
ROW_BYTES = 16
WORKSPACE = "transposed"
# Warps of a program that classifies blocks, and the blocks of a bias for each program, which reads few rows.
CLASSIFYING_WARPS = {Bias.BOOLEAN: 2, Bias.ADDITIVE: 8}
CLASSIFIED = 8
# Features that a bias or mask, or a block mask, excludes.
EXCLUDED_WITH_BIAS = {Feature.PACKED, Feature.PAGES, Feature.KV_LENGTHS, Feature.PREFIX}
EXCLUDED_WITH_BLOCK_MASK = {Feature.PACKED, Feature.PAGES, Feature.BIAS, Feature.PREFIX}
# Additional bytes of the compiler: exchange between roles, and alignment gaps.
SPARE_BYTES = 1024
# A full grid replaces a balanced one if it takes less than this fraction of its time.
UNEVEN = 0.95


class HopperContext(ProblemContext, frozen=True, kw_only=True):
    """The values for the template in addition to the config."""

    num_consumer_groups: int
    rows_per_group: int
    pack_gqa: int
    ping_pong: bool
    lpt: bool
    serpentine: bool
    consumer_registers: int
    producer_registers: int
    qk_chunks: tuple[Chunk, ...]
    v_chunks: tuple[Chunk, ...]
    qk_columns: int
    v_columns: int
    padded_values: int
    lse: bool
    copied_keys: int
    gathers: bool
    kv_dtype: KvDtype | Dtype
    kv_scale: KvScale
    converter_registers: int
    raw_stages: int
    p_stages: int
    one_list: bool
    classified: int
    classifying_warps: int
    listed_left: int
    listed_right: int
    listed_chunk: int
    listed_first: int

    @property
    def has_lists(self) -> bool:
        """Whether a prologue lists the blocks of each tile."""
        return self.has_pairs or self.has_block_mask

    @property
    def shares_rows(self) -> bool:
        """Whether a mask with the same row for all queries has the same lists for all tiles."""
        return self.has_mask and self.listed_left < 0 and self.listed_right < 0 and not self.listed_chunk

    @property
    def has_group_lists(self) -> bool:
        """Whether each group of a tile has its own list of blocks."""
        return self.has_lists and not self.one_list

    @property
    def reads_entries(self) -> bool:
        """Whether a group needs the numbers of the blocks of its list."""
        needs_places = self.has_border or self.dropout or self.alibi
        return self.has_group_lists or (self.one_list and needs_places)

    @property
    def is_quantized(self) -> bool:
        return self.dtype.is_quantized

    @property
    def bits(self) -> int:
        """Bits of an element of q, k and v."""
        return 8 * self.dtype.itemsize

    @property
    def kv_bits(self) -> int:
        """Bits of an element of keys and values in memory."""
        return 8 if self.is_converted else self.bits

    @property
    def is_converted(self) -> bool:
        """Whether keys and values are in 8 bits, and queries are not."""
        return isinstance(self.kv_dtype, KvDtype)

    @property
    def is_int8(self) -> bool:
        return self.kv_dtype is KvDtype.INT8

    @property
    def has_page_scales(self) -> bool:
        """Whether scores and probabilities are multiplied by the scales of pages."""
        return self.is_converted and self.kv_scale is KvScale.PAGE

    @property
    def has_head_scales(self) -> bool:
        """Whether scores and outputs are multiplied by the scales of keys and values."""
        return self.is_converted and self.kv_scale is not KvScale.PAGE

    @property
    def has_left(self) -> bool:
        """Whether queries see no keys before a position of their own."""
        return self.has_window_left or self.has_chunk

    @property
    def has_right(self) -> bool:
        return (self.is_causal and not self.has_mask) or self.window_right >= 0

    @property
    def is_bounded(self) -> bool:
        """Whether queries see no keys beyond a position of their own."""
        return self.has_right or self.has_chunk

    @property
    def has_border(self) -> bool:
        return self.is_bounded or self.has_left

    @property
    def has_prefix(self) -> bool:
        """Whether a prefix makes keys visible that would be hidden without it."""
        return self.prefix and self.has_border

    @property
    def has_first_tokens(self) -> bool:
        """Whether the first keys are visible before the window or chunk."""
        return self.first_tokens > 0 and self.has_left

    @property
    def lifts(self) -> bool:
        """Whether keys at the start of a sequence are visible before the window or chunk."""
        return self.has_left and (self.has_first_tokens or self.has_prefix)

    @property
    def moves_end(self) -> bool:
        """Whether chunks or a prefix change where the visible keys of a query end."""
        return self.is_bounded and (self.has_prefix or (self.has_chunk and not self.is_causal))

    @property
    def ends_early(self) -> bool:
        """Whether a sequence has fewer keys than its tensor."""
        return self.packed or self.lengths or self.is_paged

    @property
    def copies_pages(self) -> bool:
        """Whether the copy engine copies pages."""
        return self.is_paged and not self.gathers

    @property
    def keys_rank(self) -> int:
        """Dimensions of a tile of keys: two more mark where a sequence ends before its tensor."""
        return 5 if self.ends_early else 4

    @property
    def is_masked(self) -> bool:
        """Whether a block may hold no key that a row sees."""
        return self.has_border or self.ends_early or self.has_lists

    @property
    def has_packs(self) -> bool:
        """Whether a tile has rows of several heads."""
        return self.pack_gqa > 1

    @property
    def measures_distance(self) -> bool:
        """Whether ALiBi depends on the distance of keys on both sides, instead of on their position."""
        return self.alibi and (not self.is_causal or self.has_prefix)

    @property
    def sorts_chunks(self) -> bool:
        """Whether the tiles of all chunks are in one order, the longest first."""
        tile = self.num_consumer_groups * self.rows_per_group // self.pack_gqa
        return self.has_chunk and self.lpt and not self.packed and self.chunk % tile == 0

    @property
    def shifts_scores(self) -> bool:
        """Whether scores of a row lack a term that is equal for all its keys."""
        return self.softcap or (self.alibi and not self.measures_distance)

    @property
    def has_p_tiles(self) -> bool:
        return self.p_stages > 0

    @property
    def has_two_p_tiles(self) -> bool:
        return self.p_stages > 1

    @property
    def p_in_registers(self) -> bool:
        """Whether 8-bit probabilities stay in registers."""
        return self.is_quantized and not self.p_stages


class ForwardHopper(HopperModel, FamilyOf[HopperConfig]):
    """The family, without state."""

    name = "forward_hopper"
    config_type = HopperConfig
    features = frozenset(
        {
            *(Feature.WINDOW, Feature.PACKED, Feature.PAGES, Feature.DROPOUT, Feature.SOFTCAP, Feature.ALIBI),
            *(Feature.SINKS, Feature.SINK_TOKENS, Feature.CHUNK, Feature.PREFIX, Feature.KV_LENGTHS),
            *(Feature.BIAS, Feature.QUANTIZED_KV, Feature.BLOCK_MASK),
        }
    )
    direction = Direction.FORWARD
    interpreted = False

    def supports(self, problem: Problem, target: Target) -> str | None:
        if not target.is_nvidia or target.capability != HOPPER:
            return f"forward_hopper runs on sm_90 alone, and {target.name} is {target.arch}"
        if problem.dtype not in DTYPES:
            return f"forward_hopper takes bf16, fp16 and e4m3, not {problem.dtype.value}"
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
        return hopper_space(problem)

    def default(self, problem: Problem, target: Target) -> HopperConfig:
        """Returns the best config of most lengths, for untuned shapes; padded if needed to fit.

        With some numbers of tiles, one program of a balanced grid gets most of the long tiles. The config
        then uses all SMs.
        """
        config = usual_config(problem)
        is_short = mean_queries(problem) <= GROUP_ROWS
        if problem.packed and is_short and config.num_consumer_groups > 1:
            # Other groups have no rows of short sequences.
            config = msgspec.structs.replace(config, num_consumer_groups=1, ping_pong=False, q_stages=2)
        room = target.sram_per_block - SPARE_BYTES
        items = self.sram_items(problem, config, target, Specialization())
        if sum(item.bytes for item in items) > room:
            config = padded(problem, config)
        if config.balanced_grid:
            full = msgspec.structs.replace(config, balanced_grid=False)
            if self.makespan_ms(problem, full, target) < UNEVEN * self.makespan_ms(problem, config, target):
                return full
        return config

    def arguments(
        self, problem: Problem, config: HopperConfig, specialization: Specialization
    ) -> tuple[Argument, ...]:
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

    def context(self, problem: Problem, config: HopperConfig, specialization: Specialization) -> Context:
        if problem.packed and config.pack_gqa > 1:
            raise KernelError("heads share no tiles in varlen batches: set pack_gqa to 1")
        qk_chunks = head_chunks(problem.head_dim, config.split_head_dim)
        v_chunks = head_chunks(problem.value_head_dim, config.split_head_dim)
        consumer_registers, producer_registers = role_registers(problem, config)
        fields = problem_fields(problem)
        left = bound(problem.sight.left)
        right = UNBOUNDED if problem.causal is not Causal.NONE else fields["window_right"]
        mask = {"window_left": left, "window_right": right}
        if problem.bias is Bias.BOOLEAN:
            # The lists and words of the blocks include the masks by position.
            mask = {"window_left": UNBOUNDED, "window_right": UNBOUNDED, "chunk": 0, "first_tokens": 0}
        return HopperContext(
            **fields | mask | {"lengths": problem.kv_lengths},
            num_consumer_groups=config.num_consumer_groups,
            rows_per_group=config.rows_per_group,
            pack_gqa=config.pack_gqa,
            ping_pong=config.ping_pong and config.num_consumer_groups > 1,
            lpt=config.order is not Order.LINEAR,
            serpentine=config.order is Order.SERPENTINE,
            consumer_registers=consumer_registers,
            producer_registers=producer_registers,
            qk_chunks=qk_chunks,
            v_chunks=v_chunks,
            qk_columns=columns(qk_chunks),
            v_columns=columns(v_chunks),
            padded_values=power_of_two(problem.value_head_dim),
            lse=specialization.lse,
            copied_keys=copied_keys(problem, config),
            gathers=gathers(problem),
            kv_dtype=stored_dtype(problem),
            kv_scale=problem.kv_scale,
            converter_registers=CONVERTER_REGISTERS,
            raw_stages=raw_stages(config),
            p_stages=config.p_stages,
            one_list=has_one_list(problem, config),
            classified=CLASSIFIED if problem.bias is Bias.ADDITIVE else 1,
            classifying_warps=CLASSIFYING_WARPS.get(problem.bias, 0),
            listed_left=left,
            listed_right=bound(problem.sight.right),
            listed_chunk=fields["chunk"],
            listed_first=fields["first_tokens"],
        )


def _unsupported_cache(problem: Problem) -> str | None:
    """Returns the reason why a cache in 8 bits is not supported, or None."""
    if not problem.page_size:
        return "forward_hopper takes 8-bit keys in pages"
    if problem.kv_scale is KvScale.PAGE and problem.page_size < SMALLEST_COPY:
        return f"forward_hopper takes scales of pages of {SMALLEST_COPY} keys or more"
    if problem.kv_scale is KvScale.PAGE and problem.dtype is Dtype.FP16:
        return "forward_hopper takes scales of pages in bf16"
    if problem.head_dim != problem.value_head_dim or problem.head_dim not in CONVERTED_HEAD_DIMS:
        return "forward_hopper takes 8-bit keys of head dims 64 and 128, as wide as their values"
    return None


FAMILY = ForwardHopper()
