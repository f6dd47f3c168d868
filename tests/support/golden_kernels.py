"""The kernels whose checksums are in tests/golden: some configs and features of each family.

    python -m tests.support.golden_kernels FOLDER

writes their texts, which `make render-diff` compares between two revisions. Lines of the checksums are in the
format of `sha256sum`.
"""

import hashlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from flashtune import testing
from flashtune.core.expressions.text import parse_functions
from flashtune.core.kernel import Alignment, Kernel, Specialization
from flashtune.core.problem import Bias, BlockLists, Causal, Dtype, KvDtype, KvScale, Problem
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from tests.problems import hopper_backward

SUMS = Path(__file__).parents[1] / "golden" / "SHA256SUMS"
Q, KV, HOPPER = "forward_q_outer", "forward_kv_outer", "forward_hopper"
MASKED, DECODE, LATENT = "forward_masked", "decode_split_kv", "decode_latent_hopper"
SPLIT, FUSED = "backward_split", "backward_fused"
SMALL = {"block_m": 32, "block_n": 32, "num_warps": 4, "num_stages": 1}
WIDE = {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3}
TALL = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 1}
DESCRIPTORS = {**WIDE, "loads": "descriptor"}
PARTS = {"block_m": 16, "block_n": 128, "num_warps": 4, "num_stages": 3, "num_splits": 16}
BOTH = {
    "block_m": 64, "block_n": 128, "num_warps": 8, "num_stages": 2,
    "dq_block_m": 128, "dq_block_n": 64, "dq_warps": 8, "dq_stages": 2,
}  # fmt: skip
NARROW = {
    **BOTH, "block_m": 32, "block_n": 64, "num_warps": 4,
    "dq_block_m": 64, "dq_block_n": 32, "dq_warps": 4,
}  # fmt: skip
SHARED = {"block_m": 64, "block_n": 128, "num_warps": 8, "num_stages": 2, "reduction": "copy_engine"}
GROUPS = {"num_consumer_groups": 2, "rows_per_group": 64, "block_n": 128, "num_warps": 4, "num_stages": 2}
ONE_QUERY = {"queries": 1, "num_warps": 4, "num_stages": 2, "num_splits": 1, "overlap_pv": True}
FOUR_QUERIES = {"queries": 4, "num_warps": 4, "num_stages": 2, "num_splits": 6, "overlap_pv": False}
# ALiBi with a softcap, and causal documents; a bias by distance; every fourth key of a window.
CAPPED_DOCUMENTS = parse_functions(
    "score.float_number.divide/0/1.tanh/2.multiply/3/1.key.query.subtract/5/6.to_float/7.float_nu"
    "mber@1.multiply/8/9.add/4/10.less_equal/5/6.load/5.load/6.equal/13/14.and/12/15:11:16:int64x1"
)
RELATIVE_BIAS = parse_functions(
    "score.head.int@32.int@-32.query.key.subtract/4/5.maximum/3/6.minimum/2/7.add/2/8.load/1/9.add/0/10:"
    "11:-1:fp32x2"
)
DILATED = parse_functions(
    "query.key.subtract/0/1.abs/2.int@512.less_equal/3/4.int@4.remainder/2/6.int.equal/7/8.and/5/9:-1:10:"
)
PLAIN = Specialization()
ROW_SUMS = Specialization(lse=True)
CONSTANT_BIAS = Specialization(constant_bias=True)
ANYWHERE = Specialization(Alignment.ANY, 64, True)


class Combination(NamedTuple):
    """A kernel. `features` has further fields of the problem."""

    family: str
    dtype: str
    widths: tuple[int, int]
    causal: str
    config: dict[str, Any]
    specialization: Specialization
    features: dict[str, Any]


def row(
    family: str,
    dtype: str,
    widths: tuple[int, int],
    causal: str,
    config: dict[str, Any],
    specialization: Specialization = PLAIN,
    **features: Any,
) -> Combination:
    return Combination(family, dtype, widths, causal, config, specialization, features)


# By the name of the file. `widths` are the head dim of keys and that of values.
COMBINATIONS = {
    "q_outer_bf16_d64": row(Q, "bf16", (64, 64), "none", WIDE),
    "q_outer_bf16_d128_descriptors": row(Q, "bf16", (128, 128), "none", DESCRIPTORS),
    "q_outer_fp16_d128_causal_ahead": row(
        Q, "fp16", (128, 128), "bottom_right", {**DESCRIPTORS, "overlap_qk": True}, ROW_SUMS
    ),
    "q_outer_bf16_d128_causal_one_phase": row(
        Q, "bf16", (128, 128), "top_left", {**WIDE, "split_masked_loop": False}
    ),
    "q_outer_bf16_d64_causal_long_first": row(
        Q, "bf16", (64, 64), "bottom_right", {**DESCRIPTORS, "lpt": True, "heads_innermost": True}
    ),
    "q_outer_bf16_d128_ahead": row(Q, "bf16", (128, 128), "none", {**DESCRIPTORS, "overlap_qk": True}),
    "q_outer_bf16_d64_few_registers": row(Q, "bf16", (64, 64), "none", {**WIDE, "maxnreg": 128}),
    "q_outer_fp16_d96_v80_decomposed": row(
        Q, "fp16", (96, 80), "none", {**TALL, "split_head_dim": True}, ROW_SUMS
    ),
    "q_outer_fp32_d40_unaligned": row(Q, "fp32", (40, 40), "bottom_right", SMALL, ANYWHERE),
    "q_outer_fp32_d96_v80_one_phase": row(
        Q, "fp32", (96, 80), "none", {**SMALL, "split_head_dim": True, "split_masked_loop": False}, ANYWHERE
    ),
    "kv_outer_bf16_d64": row(KV, "bf16", (64, 64), "none", TALL),
    "kv_outer_bf16_d128_causal": row(KV, "bf16", (128, 128), "bottom_right", TALL, ROW_SUMS),
    "kv_outer_fp16_d128_v64_top_left": row(KV, "fp16", (128, 64), "top_left", TALL),
    "kv_outer_fp16_d96_v80_decomposed": row(
        KV, "fp16", (96, 80), "none", {**TALL, "split_head_dim": True}, ROW_SUMS
    ),
    "kv_outer_fp32_d40_unaligned": row(KV, "fp32", (40, 40), "bottom_right", SMALL, ANYWHERE),
    "hopper_bf16_d128_causal": row(
        HOPPER, "bf16", (128, 128), "bottom_right",
        {**GROUPS, "ping_pong": True, "defer_pv_wait": True, "head_swizzle": 4, "order": "serpentine",
         "balanced_grid": True}
    ),
    "hopper_bf16_d64": row(
        HOPPER, "bf16", (64, 64), "none", {**GROUPS, "num_consumer_groups": 3, "q_stages": 2}
    ),
    "hopper_bf16_d64_packed": row(
        HOPPER, "bf16", (64, 64), "top_left",
        {**GROUPS, "num_consumer_groups": 1, "rows_per_group": 128, "block_n": 64, "pack_gqa": 4,
         "order": "lpt"}, ROW_SUMS
    ),
    "hopper_fp16_d96_v80_decomposed": row(
        HOPPER, "fp16", (96, 80), "bottom_right",
        {**GROUPS, "split_head_dim": True, "conditional_rescale": False}, ROW_SUMS
    ),
    "hopper_bf16_d256_halved": row(
        HOPPER, "bf16", (256, 256), "none", {**GROUPS, "block_n": 64, "split_epilogue": True, "q_stages": 1}
    ),
    "hopper_bf16_d128_window": row(
        HOPPER, "bf16", (128, 128), "bottom_right",
        {**GROUPS, "q_stages": 2, "ping_pong": True, "defer_pv_wait": True, "head_swizzle": 4,
         "balanced_grid": True}, ROW_SUMS, window_left=1024
    ),
    "hopper_fp16_d64_packed_sequences": row(
        HOPPER, "fp16", (64, 64), "none", {**GROUPS, "num_consumer_groups": 3, "q_stages": 2}, ROW_SUMS,
        packed=1
    ),
    "hopper_bf16_d128_packed_sequences_pages": row(
        HOPPER, "bf16", (128, 128), "bottom_right",
        {**GROUPS, "q_stages": 2, "ping_pong": True, "defer_pv_wait": True, "order": "lpt"}, ROW_SUMS,
        packed=1, page_size=16
    ),
    "hopper_bf16_d128_packed_sequences_pages_of_one": row(
        HOPPER, "bf16", (128, 128), "bottom_right",
        {**GROUPS, "q_stages": 2, "ping_pong": True, "defer_pv_wait": True, "order": "lpt"}, ROW_SUMS,
        packed=1, page_size=1
    ),
    "hopper_fp16_d96_v80_pages": row(
        HOPPER, "fp16", (96, 80), "none", {**GROUPS, "split_head_dim": True, "pack_gqa": 2}, page_size=256
    ),
    "hopper_bf16_d128_packed_sequences_eight_bit_pages": row(
        HOPPER, "bf16", (128, 128), "bottom_right",
        {**GROUPS, "split_epilogue": True, "ping_pong": True, "defer_pv_wait": True, "order": "lpt"},
        ROW_SUMS, packed=1, page_size=16, kv_dtype=KvDtype.E4M3, kv_scale=KvScale.TENSOR, window_left=1024
    ),
    "hopper_fp16_d64_eight_bit_pages": row(
        HOPPER, "fp16", (64, 64), "none", {**GROUPS, "q_stages": 2, "ping_pong": True}, page_size=64,
        kv_dtype=KvDtype.E4M3, kv_scale=KvScale.HEAD
    ),
    "hopper_bf16_d128_integer_pages": row(
        HOPPER, "bf16", (128, 128), "bottom_right", {**GROUPS, "ping_pong": True, "order": "lpt"},
        page_size=64, kv_dtype=KvDtype.INT8, kv_scale=KvScale.HEAD
    ),
    "hopper_bf16_d128_packed_sequences_page_scales": row(
        HOPPER, "bf16", (128, 128), "bottom_right",
        {**GROUPS, "ping_pong": True, "defer_pv_wait": True, "order": "lpt"}, ROW_SUMS, packed=1,
        page_size=16, kv_dtype=KvDtype.INT8, kv_scale=KvScale.PAGE, window_left=1024, sink_tokens=4
    ),
    "hopper_bf16_d64_page_scales": row(
        HOPPER, "bf16", (64, 64), "none", {**GROUPS, "q_stages": 2, "ping_pong": True}, page_size=64,
        kv_dtype=KvDtype.E4M3, kv_scale=KvScale.PAGE
    ),
    "hopper_bf16_d128_dropout": row(
        HOPPER, "bf16", (128, 128), "bottom_right",
        {**GROUPS, "q_stages": 2, "ping_pong": True, "defer_pv_wait": True}, ROW_SUMS, dropout=True
    ),
    "hopper_fp16_d96_v80_window_dropout": row(
        HOPPER, "fp16", (96, 80), "bottom_right",
        {**GROUPS, "split_head_dim": True, "conditional_rescale": False}, ROW_SUMS, window_left=1024,
        dropout=True
    ),
    "hopper_bf16_d128_scores": row(
        HOPPER, "bf16", (128, 128), "bottom_right",
        {**GROUPS, "q_stages": 2, "ping_pong": True, "defer_pv_wait": True, "order": "lpt"}, ROW_SUMS,
        softcap=True, alibi=True, sinks=True, chunk=2048
    ),
    "hopper_bf16_d64_masks": row(
        HOPPER, "bf16", (64, 64), "none", {**GROUPS, "num_consumer_groups": 3, "q_stages": 2}, ROW_SUMS,
        window_left=512, sink_tokens=4, prefix=True, kv_lengths=True
    ),
    "hopper_bf16_d64_boolean": row(
        HOPPER, "bf16", (64, 64), "bottom_right",
        {**GROUPS, "q_stages": 2, "defer_pv_wait": True, "order": "lpt"}, bias=Bias.BOOLEAN
    ),
    "hopper_bf16_d64_sinks": row(
        HOPPER, "bf16", (64, 64), "bottom_right", {**GROUPS, "num_consumer_groups": 3, "q_stages": 2},
        sinks=True
    ),
    "hopper_bf16_d64_window_sinks": row(
        HOPPER, "bf16", (64, 64), "bottom_right", {**GROUPS, "block_n": 64, "pack_gqa": 2}, sinks=True,
        window_left=127
    ),
    "hopper_bf16_d128_softcap": row(HOPPER, "bf16", (128, 128), "bottom_right", GROUPS, softcap=True),
    "hopper_bf16_d128_bias": row(
        HOPPER, "bf16", (128, 128), "none", {**GROUPS, "ping_pong": True}, bias=Bias.ADDITIVE
    ),
    "hopper_bf16_d128_blocks": row(
        HOPPER, "bf16", (128, 128), "bottom_right", {**GROUPS, "ping_pong": True, "dynamic_schedule": True},
        block_mask=128, block_lists=BlockLists.GROUP
    ),
    "hopper_bf16_d128_full_blocks": row(HOPPER, "bf16", (128, 128), "none", GROUPS, block_mask=128),
    "hopper_bf16_d128_blocks_functions": row(
        HOPPER, "bf16", (128, 128), "none", {**GROUPS, "ping_pong": True, "dynamic_schedule": True}, ROW_SUMS,
        functions=CAPPED_DOCUMENTS, block_mask=128
    ),
    "hopper_bf16_d64_score_function": row(
        HOPPER, "bf16", (64, 64), "none", GROUPS, functions=RELATIVE_BIAS
    ),
    "hopper_bf16_d64_mask_function": row(HOPPER, "bf16", (64, 64), "none", GROUPS, functions=DILATED),
    "hopper_bf16_d64_small_blocks": row(
        HOPPER, "bf16", (64, 64), "none", {**GROUPS, "block_n": 64}, block_mask=64
    ),
    "hopper_bf16_d64_boolean_full": row(
        HOPPER, "bf16", (64, 64), "none", {**GROUPS, "order": "lpt"}, bias=Bias.BOOLEAN
    ),
    "hopper_bf16_d64_bias_row_sums": row(
        HOPPER, "bf16", (64, 64), "none", GROUPS, ROW_SUMS, bias=Bias.ADDITIVE
    ),
    "hopper_bf16_d128_splits": row(
        HOPPER, "bf16", (128, 128), "bottom_right",
        {**GROUPS, "num_consumer_groups": 1, "q_stages": 2, "pack_gqa": 8, "num_splits": 44}, ROW_SUMS,
        sinks=True
    ),
    "hopper_bf16_d128_invariant": row(
        HOPPER, "bf16", (128, 128), "bottom_right", {**GROUPS, "ping_pong": True}, ROW_SUMS,
        window_left=4096, sink_tokens=4, sinks=True, softcap=True, batch_invariant=True
    ),
    "hopper_bf16_d64_invariant": row(
        HOPPER, "bf16", (64, 64), "bottom_right", {**GROUPS, "num_stages": 3, "q_stages": 2},
        Specialization(), batch_invariant=True
    ),
    "hopper_bf16_d128_invariant_splits": row(
        HOPPER, "bf16", (128, 128), "bottom_right",
        {**GROUPS, "num_consumer_groups": 1, "pack_gqa": 4, "num_splits": 2, "balanced_grid": True},
        Specialization(), batch_invariant=True
    ),
    "hopper_bf16_d96_pages_invariant_splits": row(
        HOPPER, "bf16", (96, 80), "bottom_right", {**GROUPS, "pack_gqa": 4, "num_splits": 2}, ROW_SUMS,
        page_size=16, sinks=True, alibi=True, batch_invariant=True
    ),
    "hopper_bf16_d64_packed_sequences_eight_bit_pages_splits": row(
        HOPPER, "bf16", (64, 64), "bottom_right", {**GROUPS, "ping_pong": True, "num_splits": 6}, ROW_SUMS,
        packed=1, page_size=16, kv_dtype=KvDtype.E4M3, kv_scale=KvScale.PAGE, window_left=4096, sink_tokens=4
    ),
    "hopper_bf16_d128_tree_splits": row(
        HOPPER, "bf16", (128, 128), "bottom_right", {**GROUPS, "pack_gqa": 2, "num_splits": 8}, ROW_SUMS,
        page_size=16, tree=True
    ),
    "hopper_e4m3_d128_one_tile_of_weights": row(
        HOPPER, "e4m3", (128, 128), "bottom_right", {**GROUPS, "ping_pong": True, "p_stages": 1}
    ),
    "hopper_e4m3_d128": row(HOPPER, "e4m3", (128, 128), "none", {**GROUPS, "ping_pong": True}, ROW_SUMS),
    "hopper_e4m3_d128_shared": row(
        HOPPER, "e4m3", (128, 128), "bottom_right",
        {**GROUPS, "num_consumer_groups": 3, "q_stages": 2, "ping_pong": True, "p_stages": 2}
    ),
    "masked_bf16_d64_window_sinks": row(
        MASKED, "bf16", (64, 64), "bottom_right", WIDE, ROW_SUMS, window_left=1024, sink_tokens=4, sinks=True
    ),
    "masked_fp16_d128_packed_pages": row(
        MASKED, "fp16", (128, 128), "bottom_right", {**TALL, "lpt": True}, ROW_SUMS, packed=1, page_size=16,
        kv_dtype=KvDtype.E4M3, kv_scale=KvScale.PAGE
    ),
    "masked_fp32_d40_scores": row(
        MASKED, "fp32", (40, 24), "none", {**SMALL, "split_masked_loop": False}, ANYWHERE, softcap=True,
        alibi=True, bias=Bias.ADDITIVE, chunk=64
    ),
    "masked_bf16_d128_dropout": row(MASKED, "bf16", (128, 128), "bottom_right", WIDE, ROW_SUMS, dropout=True),
    "masked_bf16_d128_window": row(MASKED, "bf16", (128, 128), "bottom_right", WIDE, window_left=1024),
    "masked_bf16_d128_softcap_dropout": row(
        MASKED, "bf16", (128, 128), "bottom_right", WIDE, window_left=1024, softcap=True, dropout=True
    ),
    "masked_bf16_d128_eight_bit_pages": row(
        MASKED, "bf16", (128, 128), "bottom_right", WIDE, page_size=16, kv_dtype=KvDtype.E4M3,
        kv_scale=KvScale.HEAD
    ),
    "masked_bf16_d128_packed_large_pages": row(
        MASKED, "bf16", (128, 128), "bottom_right", WIDE, packed=1, page_size=256
    ),
    "masked_bf16_d64_tree": row(MASKED, "bf16", (64, 64), "none", WIDE, packed=1, page_size=16, tree=True),
    "masked_bf16_d64_alibi": row(MASKED, "bf16", (64, 64), "bottom_right", WIDE, alibi=True),
    "masked_bf16_d64_boolean": row(MASKED, "bf16", (64, 64), "none", WIDE, bias=Bias.BOOLEAN),
    "masked_bf16_d128_full_blocks": row(MASKED, "bf16", (128, 128), "none", WIDE, block_mask=128),
    "masked_bf16_d128_blocks": row(
        MASKED, "bf16", (128, 128), "bottom_right", WIDE, ROW_SUMS, block_mask=128,
        block_lists=BlockLists.GROUP
    ),
    "masked_bf16_d64_bias": row(
        MASKED, "bf16", (64, 64), "bottom_right", {**WIDE, "lpt": True, "heads_innermost": True}, ROW_SUMS,
        bias=Bias.ADDITIVE
    ),
    "masked_bf16_d128_softcap_one_phase": row(
        MASKED, "bf16", (128, 128), "bottom_right", {**WIDE, "split_masked_loop": False}, softcap=True
    ),
    "masked_bf16_d128_splits": row(MASKED, "bf16", (128, 128), "bottom_right", {**WIDE, "num_splits": 12}),
    "masked_bf16_d64_lengths_one_phase_splits": row(
        MASKED, "bf16", (64, 64), "none", {**WIDE, "num_splits": 3, "split_masked_loop": False},
        kv_lengths=True
    ),
    "masked_fp16_d96_packed_pages_splits": row(
        MASKED, "fp16", (96, 80), "bottom_right", {**WIDE, "num_splits": 132}, ROW_SUMS, packed=1,
        page_size=16, window_left=1024, sink_tokens=4, sinks=True
    ),
    "backward_split_bf16_d64_dropout": row(
        SPLIT, "bf16", (64, 64), "bottom_right", BOTH, dropout=True, alibi=True
    ),
    "backward_fused_bf16_d64_dropout": row(FUSED, "bf16", (64, 64), "none", SHARED, dropout=True),
    "decode_bf16_d128": row(
        DECODE, "bf16", (128, 128), "bottom_right", {**PARTS, "early_combine": True}, ROW_SUMS
    ),
    "decode_bf16_d128_full": row(DECODE, "bf16", (128, 128), "none", PARTS),
    "decode_bf16_d128_early": row(
        DECODE, "bf16", (128, 128), "bottom_right", {**PARTS, "early_combine": True, "early_start": True}
    ),
    "decode_bf16_d128_tree": row(DECODE, "bf16", (128, 128), "none", PARTS, page_size=16, tree=True),
    "decode_bf16_d64_packed_pages": row(
        DECODE, "bf16", (64, 64), "bottom_right", {**PARTS, "num_stages": 5}, ROW_SUMS, packed=1,
        page_size=16, kv_dtype=KvDtype.INT8, kv_scale=KvScale.PAGE, window_left=1024, sink_tokens=4
    ),
    "decode_bf16_d64_window": row(
        DECODE, "bf16", (64, 64), "bottom_right", {**PARTS, "num_stages": 5, "num_splits": 1}, page_size=16,
        window_left=1024, sinks=True
    ),
    "decode_bf16_d64_window_splits": row(
        DECODE, "bf16", (64, 64), "bottom_right", {**PARTS, "num_stages": 5, "early_combine": True},
        page_size=16, window_left=1024, softcap=True
    ),
    "decode_bf16_d128_e4m3": row(
        DECODE, "bf16", (128, 128), "bottom_right", PARTS, kv_dtype=KvDtype.E4M3, kv_scale=KvScale.HEAD
    ),
    "decode_bf16_latent": row(
        DECODE, "bf16", (576, 512), "bottom_right",
        {"block_m": 64, "block_n": 64, "num_warps": 8, "num_stages": 2}, page_size=64, mla=True
    ),
    "decode_fp32_d40_scores": row(
        DECODE, "fp32", (40, 24), "none", {**SMALL, "num_splits": 3}, ANYWHERE, softcap=True, alibi=True,
        bias=Bias.BOOLEAN, chunk=64, prefix=True, sinks=True
    ),
    "backward_split_bf16_d128": row(SPLIT, "bf16", (128, 128), "none", {**BOTH, "split_masked_loop": False}),
    "backward_split_bf16_d64_causal": row(SPLIT, "bf16", (64, 64), "bottom_right", BOTH, ROW_SUMS),
    "backward_split_fp16_d192_v128_window": row(
        SPLIT, "fp16", (192, 128), "top_left", {**NARROW, "split_head_dim": True}, window_left=1024,
        sink_tokens=4, sinks=True
    ),
    "backward_split_bf16_d64_packed": row(
        SPLIT, "bf16", (64, 64), "bottom_right", NARROW, packed=1, alibi=True
    ),
    "backward_split_bf16_d64_packed_dropout": row(
        SPLIT, "bf16", (64, 64), "bottom_right", NARROW, packed=1, alibi=True, dropout=True
    ),
    "backward_split_fp32_d40_scores": row(
        SPLIT, "fp32", (40, 24), "none",
        {**NARROW, "num_stages": 1, "dq_stages": 1, "block_n": 32, "dq_block_m": 32, "heads_innermost": True},
        ANYWHERE, softcap=True, alibi=True, bias=Bias.ADDITIVE, chunk=64, prefix=True, kv_lengths=True
    ),
    "backward_split_bf16_d64_constant_bias": row(
        SPLIT, "bf16", (64, 64), "none", BOTH, CONSTANT_BIAS, bias=Bias.ADDITIVE
    ),
    "backward_fused_bf16_d128_causal": row(FUSED, "bf16", (128, 128), "bottom_right", SHARED, ROW_SUMS),
    "backward_split_bf16_d128_softcap": row(
        SPLIT, "bf16", (128, 128), "bottom_right", {**BOTH, "split_masked_loop": False, "lpt": True},
        softcap=True
    ),
    "backward_fused_bf16_d64_bias": row(
        FUSED, "bf16", (64, 64), "bottom_right", {**SHARED, "split_masked_loop": False}, bias=Bias.ADDITIVE
    ),
    "backward_split_bf16_d64_blocks": row(
        SPLIT, "bf16", (64, 64), "bottom_right", NARROW, block_mask=64, block_lists=BlockLists.GROUP
    ),
    "backward_fused_bf16_d64_mask": row(FUSED, "bf16", (64, 64), "none", SHARED, bias=Bias.BOOLEAN),
    "backward_fused_bf16_d256": row(
        FUSED, "bf16", (256, 256), "none",
        {**SHARED, "block_m": 32, "block_n": 64, "split_masked_loop": False, "transpose_dq": True}
    ),
    "backward_fused_fp16_d192_v128_packed": row(
        FUSED, "fp16", (192, 128), "bottom_right",
        {**SHARED, "block_m": 32, "block_n": 64, "split_head_dim": True}, packed=1, alibi=True
    ),
    "backward_fused_fp32_d40_scores": row(
        FUSED, "fp32", (40, 24), "none", {**SMALL, "reduction": "atomics", "heads_innermost": True}, ANYWHERE,
        softcap=True, bias=Bias.ADDITIVE, chunk=64, prefix=True, kv_lengths=True
    ),
    "hopper_bf16_latent_pages": row(
        LATENT, "bf16", (576, 512), "bottom_right", ONE_QUERY, ROW_SUMS, page_size=64, mla=True
    ),
    "hopper_bf16_latent_small_pages": row(
        LATENT, "bf16", (576, 512), "bottom_right", ONE_QUERY, ROW_SUMS, page_size=16, mla=True
    ),
    "hopper_bf16_latent_outputs": row(
        LATENT, "bf16", (576, 512), "bottom_right", ONE_QUERY, page_size=64, mla=True
    ),
    "hopper_fp16_latent_parts": row(
        LATENT, "fp16", (576, 512), "bottom_right", FOUR_QUERIES, ROW_SUMS, kv_lengths=True, mla=True
    ),
    "hopper_fp16_latent_page_parts": row(
        LATENT, "fp16", (576, 512), "bottom_right", FOUR_QUERIES, page_size=64, mla=True
    ),
}  # fmt: skip


def problem_of(name: str) -> Problem:
    """Returns the problem of a combination or of a row of HOPPER_BACKWARD."""
    if name in HOPPER_BACKWARD:
        widths, _, features, _ = HOPPER_BACKWARD[name]
        return hopper_backward.a_problem(*widths, **features)
    chosen = COMBINATIONS[name]
    return testing.problem(
        "heads=8,kv_heads=4,seqlen=1024,head_dim=64,batch=2",
        dtype=Dtype(chosen.dtype),
        head_dim=chosen.widths[0],
        value_head_dim=chosen.widths[1],
        causal=Causal(chosen.causal),
        direction=find_family(chosen.family).direction,
        **chosen.features,
    )


def kernel_of(name: str) -> Kernel:
    """Returns the kernel of that combination."""
    chosen = COMBINATIONS[name]
    family = find_family(chosen.family)
    config = msgspec.convert(chosen.config, family.config_type)
    return render(family, problem_of(name), config, chosen.specialization)


# Widths, specialisation, changes of the problem and of the default config of the family `backward_hopper`.
HOPPER_BACKWARD: dict[str, tuple[tuple[int, int], Specialization, dict[str, Any], dict[str, Any]]] = {
    "backward_hopper_bf16_d128_causal": ((128, 128), ROW_SUMS, {"causal": Causal.BOTTOM_RIGHT}, {}),
    "backward_hopper_fp16_d64_delay": ((64, 64), PLAIN, {"dtype": Dtype.FP16}, {"alternate_dq": False}),
    "backward_hopper_bf16_d96_v80_plain": (
        (96, 80), PLAIN, {},
        {"init_accumulators": False, "early_dv": True, "defer_dp_wait": False, "early_dk": False,
         "defer_dq": False, "alternate_dq": False, "num_stages": 3}
    ),
    "backward_hopper_bf16_d96_v80": ((96, 80), ROW_SUMS, {}, {}),
    "backward_hopper_fp16_d64_turns": ((64, 64), PLAIN, {"dtype": Dtype.FP16}, {}),
    "backward_hopper_bf16_d128_dropout": (
        (128, 128), ROW_SUMS, {"causal": Causal.BOTTOM_RIGHT, "dropout": True}, {}
    ),
    "backward_hopper_bf16_d256_causal": ((256, 256), ROW_SUMS, {"causal": Causal.BOTTOM_RIGHT}, {}),
    "backward_hopper_bf16_d128_ordered": (
        (128, 128), PLAIN, {"causal": Causal.BOTTOM_RIGHT, "deterministic": True}, {}
    ),
    "backward_hopper_bf16_d128_ordered_dropout": (
        (128, 128), PLAIN, {"causal": Causal.BOTTOM_RIGHT, "dropout": True, "deterministic": True},
        {"early_dk": False, "defer_dq": False, "alternate_dq": False}
    ),
    "backward_hopper_fp16_d256_ordered": (
        (256, 256), PLAIN, {"dtype": Dtype.FP16, "deterministic": True}, {}
    ),
    "backward_hopper_bf16_d128_window_softcap": (
        (128, 128), ROW_SUMS, {"causal": Causal.BOTTOM_RIGHT, "window_left": 1023, "softcap": True}, {}
    ),
    "backward_hopper_bf16_d128_packed": (
        (128, 128), ROW_SUMS, {"causal": Causal.BOTTOM_RIGHT, "packed": 1, "sinks": True}, {}
    ),
    "backward_hopper_fp16_d96_packed_full": ((96, 96), PLAIN, {"dtype": Dtype.FP16, "packed": 1}, {}),
    "backward_hopper_bf16_d64_packed_window_ordered": (
        (64, 64), PLAIN, {"packed": 1, "window_left": 100, "window_right": 50, "deterministic": True},
        {"alternate_dq": False}
    ),
    "backward_hopper_bf16_d256_packed_window_softcap": (
        (256, 256), PLAIN, {"causal": Causal.TOP_LEFT, "packed": 1, "window_left": 512, "softcap": True}, {}
    ),
    "backward_hopper_bf16_d256_packed_ordered": ((256, 256), PLAIN, {"packed": 1, "deterministic": True}, {}),
    "backward_hopper_bf16_d128_sinks_ordered": (
        (128, 128), ROW_SUMS, {"sinks": True, "deterministic": True}, {}
    ),
    "backward_hopper_bf16_d256_packed_full": ((256, 256), PLAIN, {"packed": 1}, {}),
    "backward_hopper_bf16_d128_window_ordered": (
        (128, 128), PLAIN, {"causal": Causal.BOTTOM_RIGHT, "window_left": 512, "deterministic": True}, {}
    ),
    "backward_hopper_bf16_d64_bias": (
        (64, 64), PLAIN, {"causal": Causal.BOTTOM_RIGHT, "bias": Bias.ADDITIVE}, {}
    ),
    "backward_hopper_bf16_d128_bias": ((128, 128), PLAIN, {"bias": Bias.ADDITIVE}, {}),
    "backward_hopper_fp16_d128_constant_bias": (
        (128, 128), CONSTANT_BIAS, {"dtype": Dtype.FP16, "bias": Bias.ADDITIVE}, {"alternate_dq": False}
    ),
    "backward_hopper_fp16_d192_plain": (
        (192, 192), PLAIN, {"dtype": Dtype.FP16}, {"init_accumulators": False}
    ),
}  # fmt: skip


def kernel_of_gradient(name: str) -> Kernel:
    """Returns the kernel of that row of HOPPER_BACKWARD."""
    _, specialization, _, config = HOPPER_BACKWARD[name]
    return hopper_backward.kernel_of(problem_of(name), specialization, **config)


KERNELS: dict[str, Callable[[], Kernel]] = {
    **{name: partial(kernel_of, name) for name in COMBINATIONS},
    **{name: partial(kernel_of_gradient, name) for name in HOPPER_BACKWARD},
}


def checksums() -> str:
    """Returns the lines of the kernels' checksums."""
    return "".join(
        f"{hashlib.sha256(KERNELS[name]().source.encode()).hexdigest()}  {name}.py\n"
        for name in sorted(KERNELS)
    )


if __name__ == "__main__":
    for name, kernel in KERNELS.items():
        Path(sys.argv[1], f"{name}.py").write_text(kernel().source, encoding="utf-8")
