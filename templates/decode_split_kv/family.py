"""Portable split-KV attention of few queries in Triton, with a combine kernel."""

import math

import msgspec

from flashtune.core.config import LaunchOptions, Space
from flashtune.core.kernel import Argument, Specialization, Step
from flashtune.core.problem import (
    MAX_HEAD_DIM,
    Bias,
    BlockLists,
    Direction,
    Dtype,
    Feature,
    KvDtype,
    KvScale,
    Problem,
)
from flashtune.core.target import Target
from flashtune.templates.common.args.arguments import PARTIALS, combine_step
from flashtune.templates.common.args.feature_context import (
    CONVERTS_E4M3,
    FEATURES,
    feature_arguments,
    function_trouble,
)
from flashtune.templates.common.args.portable_context import portable_values
from flashtune.templates.common.model.sram import power_of_two, widest_tile
from flashtune.templates.common.pipeline import stages_of
from flashtune.templates.decode_split_kv.perf_model import (
    DecodeModel,
    converts_for_tensor_memory,
    expected_sram,
)
from flashtune.templates.decode_split_kv.space import (
    COMBINE_WARPS,
    MIN_KEYS,
    ROWS,
    WARPGROUP_ROWS,
    DecodeConfig,
    block_bytes,
    combine_options,
    combined_columns,
    combines_early,
    decode_space,
    fewest_tiles,
    fits_registers,
    group_rows,
    loads_pairs,
    query_chunks,
    split_tile,
    value_chunks,
)
from flashtune.templates.family import Arguments, Context, FamilyOf

# Maximum number of queries if their tiles occupy all SMs. Other families then compute more.
MAX_QUERIES = 16
MAX_LATENT = 1024
# Kernels of a shorter estimated time start before the preceding kernel ends, in ms.
SHORT_MS = 0.02


class DecodeSplitKV(DecodeModel, FamilyOf[DecodeConfig]):
    """The family, without state."""

    name = "decode_split_kv"
    config_type = DecodeConfig
    features = (FEATURES - {Feature.DROPOUT}) | {
        *(Feature.MLA, Feature.TREE, Feature.FUNCTIONS, Feature.BLOCK_MASK)
    }
    direction = Direction.FORWARD
    interpreted = True

    def supports(self, problem: Problem, target: Target) -> str | None:
        if problem.seqlen_q > MAX_QUERIES and fewest_tiles(problem) >= target.sm_count and not problem.mla:
            return f"decode_split_kv takes up to {MAX_QUERIES} queries of a sequence if they occupy all SMs"
        if problem.dtype.is_quantized:
            return f"decode_split_kv takes no queries in {problem.dtype}"
        if problem.kv_dtype is KvDtype.E4M3 and target.is_nvidia and target.capability < CONVERTS_E4M3:
            return f"decode_split_kv takes keys in e4m3 from sm_{CONVERTS_E4M3} on"
        if problem.kv_dtype is not None and not target.is_nvidia:
            return "decode_split_kv takes keys in 8 bits on NVIDIA's GPUs alone"
        if problem.kv_dtype is not None and problem.kv_scale is KvScale.PAGE and not problem.page_size:
            return "decode_split_kv takes scales of pages for keys in pages alone"
        if problem.bias is not Bias.NONE and problem.packed:
            return "decode_split_kv takes no bias over packed sequences"
        if reason := function_trouble(self.name, problem) or _list_trouble(problem):
            return reason
        if problem.mla:
            return self._latent_trouble(problem)
        if max(problem.head_dim, problem.value_head_dim) > MAX_HEAD_DIM:
            return f"decode_split_kv takes head dims up to {MAX_HEAD_DIM}"
        return None

    def _latent_trouble(self, problem: Problem) -> str | None:
        values = problem.value_head_dim
        if power_of_two(values) != values or not values < problem.head_dim <= MAX_LATENT:
            return (
                "decode_split_kv takes latent values whose head dim is a power of two and under the keys', "
                f"and these up to {MAX_LATENT}"
            )
        return None

    def space(self, problem: Problem, target: Target) -> Space:
        return decode_space(problem, target)

    def default(self, problem: Problem, target: Target) -> DecodeConfig:
        """Returns tiles that use all of an H200's bandwidth, and enough splits to use all SMs.

        Short kernels with several splits start before the preceding kernel ends. The launch is a small part
        of the time of long kernels. An early start was not timed with pages.
        """
        tiles = _default_tiles(problem, target)
        tiles = msgspec.structs.replace(tiles, num_stages=stages_of(problem, tiles.num_stages))
        spread = (tiles, *self.schedule_variants(problem, tiles, target))
        best = min(spread, key=lambda config: (self.makespan_ms(problem, config, target), config.num_splits))
        early = msgspec.structs.replace(best, early_start=True)
        is_short = best.early_combine and self.makespan_ms(problem, best, target) < SHORT_MS
        return early if is_short and not problem.page_size else best

    def arguments(self, problem: Problem, config: DecodeConfig, specialization: Specialization) -> Arguments:
        if config.num_splits == 1:
            return feature_arguments(problem, specialization, ())
        return (*feature_arguments(problem, specialization, PARTIALS), Argument("splits", "i32"))

    def options(self, config: DecodeConfig) -> LaunchOptions:
        return LaunchOptions(config.num_warps, config.num_stages, early=config.early_start or msgspec.UNSET)

    def epilogue(self, problem: Problem, config: DecodeConfig, specialization: Specialization) -> Step | None:
        if config.num_splits == 1:
            return None
        return combine_step(problem.dtype, specialization, combine_options(problem, config))

    def context(self, problem: Problem, config: DecodeConfig, specialization: Specialization) -> Context:
        chunks = query_chunks(problem, config.split_head_dim), value_chunks(problem, config.split_head_dim)
        values = portable_values(problem, specialization, chunks, config.block_n)
        # Rows of a tile are of several heads, which share lists.
        shares = {"head_rows": True, "block_groups": problem.block_mask > 0}
        features = values["features"] | shares
        combined = combined_columns(problem, config)
        paired = loads_pairs(problem, config, specialization)
        halves = {width // 2 for width in values["widths"] if paired}
        # 8-bit keys and 16-bit queries are multiplied in fp16, which holds all 8-bit values.
        widened = features["quantized"] and not values["is_fp32"]
        # Queries are scaled by a power of two for each row, so that they fit fp16.
        rescaled = widened and problem.dtype is Dtype.BF16
        page_per_key = features["is_paged"] and not features["one_page"]
        return values | {
            "features": features,
            # Several programs share the keys of a sequence.
            "is_split": config.num_splits > 1,
            "early_combine": config.num_splits > 1 and combines_early(problem, config),
            "combine_warps": COMBINE_WARPS,
            "split_tile": split_tile(config),
            "combined": combined,
            "column_blocks": math.ceil(problem.value_head_dim / combined),
            "is_int8": problem.kv_dtype is KvDtype.INT8,
            "latent": problem.mla,
            "paired": paired,
            "column_widths": tuple(sorted({*values["widths"], *halves})),
            "widened": widened,
            "rescaled": rescaled,
            # The inverse of this power is part of the scores' factor. Changed scores get it before.
            "row_scaled": rescaled and not features["is_changed"],
            # The keys of a block may be in several pages.
            "page_per_key": page_per_key,
            # Pages' scales of values are factors of the probabilities.
            "weight_scales": features["page_scales"] and page_per_key,
            # The product of probabilities and values has a factor.
            "scales_product": features["page_scales"] and (features["one_page"] or widened),
        }


def _list_trouble(problem: Problem) -> str | None:
    """Returns why the lists of a block mask are not those of tiles, None if they are."""
    if not problem.block_mask:
        return None
    is_shared = problem.block_lists is BlockLists.GROUP or problem.group_size == 1
    if problem.functions and is_shared and problem.seqlen_q <= problem.block_mask:
        return None
    return (
        "decode_split_kv takes block masks with functions, with queries of one block and lists that the "
        "heads of a KV head share"
    )


def _default_tiles(problem: Problem, target: Target) -> DecodeConfig:
    """Returns the usual tiles, or the first smaller ones that fit registers and SRAM, else the smallest."""
    config = _usual_tiles(problem, target)
    if converts_for_tensor_memory(problem, config, target):
        config = msgspec.structs.replace(config, block_m=WARPGROUP_ROWS // 2)
    while not (
        fits_registers(problem, config, target)
        and expected_sram(problem, config, target) <= target.sram_per_block
    ):
        smaller = _smaller_tiles(problem, config)
        if smaller == config:
            break
        config = smaller
    return config


def _smaller_tiles(problem: Problem, config: DecodeConfig) -> DecodeConfig:
    """Returns the next smaller tiles, unchanged if there are none.

    Two blocks in flight are enough. Fewer rows come late, since then more programs read the same keys.
    """
    wide = problem.dtype.is_float32
    if config.num_stages > 3:
        return msgspec.structs.replace(config, num_stages=config.num_stages - 1)
    if config.block_n > (16 if wide else MIN_KEYS):
        return msgspec.structs.replace(config, block_n=config.block_n // 2)
    if config.num_stages > 2:
        return msgspec.structs.replace(config, num_stages=2)
    if config.block_m > ROWS[0]:
        return msgspec.structs.replace(config, block_m=config.block_m // 2)
    return msgspec.structs.replace(config, num_stages=1) if wide else config


def _usual_tiles(problem: Problem, target: Target) -> DecodeConfig:
    """Returns tiles for any length, with three blocks in SRAM, two of them in flight."""
    rows = group_rows(problem)
    block_m = next((size for size in (16, 32) if rows <= size), 64)
    if problem.dtype.is_float32:
        wide = widest_tile(problem) > 128
        return DecodeConfig(block_m=min(block_m, 32), block_n=16 if wide else 32, num_warps=4, num_stages=2)
    if problem.mla:
        small = target.sram_per_block < 200 * 1024
        return DecodeConfig(
            block_m=16 if small else block_m, block_n=32 if small else 64, num_warps=8, num_stages=2
        )
    config = DecodeConfig(block_m=block_m, block_n=128, num_warps=4, num_stages=3)
    if problem.page_size and problem.kv_dtype is None and problem.head_dim == 128 and block_m < 64:
        # A block in one page needs fewer warps to compute addresses.
        warps, stages = (4, 4) if problem.page_size >= 64 else (8, 3)
        config = msgspec.structs.replace(config, block_n=64, num_warps=warps, num_stages=stages)
    if problem.block_mask:
        # A block of keys is in one block of a list.
        config = msgspec.structs.replace(config, block_n=min(config.block_n, problem.block_mask))
    while config.block_n > MIN_KEYS and 3 * block_bytes(problem, config) > target.sram_per_block:
        config = msgspec.structs.replace(config, block_n=config.block_n // 2)
    return config


FAMILY = DecodeSplitKV()
