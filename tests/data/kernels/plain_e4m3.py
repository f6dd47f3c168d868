"""Attention of e4m3 inputs as plainly as Triton has it: no family's, but what families' kernels are to do.

Head dim 64, no mask. A first kernel writes V transposed, keys padded with zeros to whole tiles.
"""

import triton
import triton.language as tl

BLOCK_M = tl.constexpr(64)
BLOCK_N = tl.constexpr(64)
HEAD_DIM = tl.constexpr(64)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Weights are rounded between 0 and this.
WEIGHT_RANGE = tl.constexpr(256.0)


@triton.jit
def transpose_values(v, values, stride_vb, stride_vh, stride_vs, kv_heads, seqlen_kv):
    padded = tl.cdiv(seqlen_kv, BLOCK_N) * BLOCK_N
    keys = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, HEAD_DIM)
    batch_head = tl.program_id(1).to(tl.int64)
    base = v + (batch_head // kv_heads) * stride_vb + (batch_head % kv_heads) * stride_vh
    # [BLOCK_N, HEAD_DIM]
    tile = tl.load(
        base + keys[:, None] * stride_vs + columns[None, :], mask=(keys < seqlen_kv)[:, None], other=0.0
    )
    tl.store(values + batch_head * HEAD_DIM * padded + columns[:, None] * padded + keys[None, :], tile.T)


@triton.jit
def attend(
    q,
    k,
    v,
    out,
    lse,
    q_scale,
    k_scale,
    v_scale,
    values,
    scale,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_ob,
    stride_oh,
    stride_os,
    heads,
    group_size,
    all_heads,
    seqlen_q,
    seqlen_kv,
):
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // group_size
    kv_batch_head = batch * (heads // group_size) + kv_head
    queries = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, HEAD_DIM)
    padded = tl.cdiv(seqlen_kv, BLOCK_N) * BLOCK_N
    query_exists = queries < seqlen_q

    q_base = q + batch * stride_qb + head * stride_qh
    k_base = k + batch * stride_kb + kv_head * stride_kh
    values_base = values + kv_batch_head * HEAD_DIM * padded
    # [BLOCK_M, HEAD_DIM]
    q_tile = tl.load(
        q_base + queries[:, None] * stride_qs + columns[None, :], mask=query_exists[:, None], other=0.0
    )
    scale_log2 = scale * LOG2_E * tl.load(q_scale + batch_head) * tl.load(k_scale + kv_batch_head)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for start in tl.range(0, seqlen_kv, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        # [BLOCK_N, HEAD_DIM]
        k_tile = tl.load(
            k_base + keys[:, None] * stride_ks + columns[None, :], mask=(keys < seqlen_kv)[:, None], other=0.0
        )
        # Masked after they were scaled: the product of faint scales is zero, and zero times -inf is NaN.
        logits = tl.where((keys < seqlen_kv)[None, :], tl.dot(q_tile, k_tile.T) * scale_log2, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(logits, 1))
        weights = tl.exp2(logits - new_max[:, None])
        rescale = tl.exp2(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(weights, 1)
        running_max = new_max
        low_weights = (weights * WEIGHT_RANGE).to(q.dtype.element_ty)
        # [HEAD_DIM, BLOCK_N]
        v_tile = tl.load(values_base + columns[:, None] * padded + keys[None, :])
        accumulator = tl.dot(low_weights, v_tile.T, accumulator * rescale[:, None])

    factor = tl.load(v_scale + kv_batch_head) / WEIGHT_RANGE
    o_tile = (accumulator * factor / running_sum[:, None]).to(out.dtype.element_ty)
    o_base = out + batch * stride_ob + head * stride_oh
    tl.store(o_base + queries[:, None] * stride_os + columns[None, :], o_tile, mask=query_exists[:, None])
    row_lse = (running_max + tl.log2(running_sum)) * LN_2
    tl.store(lse + batch_head * seqlen_q + queries, row_lse, mask=query_exists)


def prologue_plan(q, k, v, out):
    """Grid and integers of `transpose_values`."""
    batch, kv_heads, seqlen_kv, _ = v.shape
    grid = (triton.cdiv(seqlen_kv, 64), batch * kv_heads)
    return grid, (v.stride(0), v.stride(1), v.stride(2), kv_heads, seqlen_kv)


def launch_plan(q, k, v, out):
    """Grid, the workspace in float32 elements, and the integers of `attend`."""
    batch, heads, seqlen_q, _ = q.shape
    kv_heads, seqlen_kv = k.shape[1], k.shape[2]
    grid = (triton.cdiv(seqlen_q, 64) * heads * batch,)
    strides = [tensor.stride(axis) for tensor in (q, k, v, out) for axis in (0, 1, 2)]
    workspace = (batch * kv_heads * 64 * triton.cdiv(seqlen_kv, 64) * 64 // 4,)
    return grid, (workspace,), (*strides, heads, heads // kv_heads, heads * batch, seqlen_q, seqlen_kv)
