"""Attention backward in two passes: one program keeps a block of keys and walks queries, for dk and dv; then
one keeps a tile of queries and walks keys, for dq. Nothing is added up by atomics: every run gives the same bits.

Computes     bf16, head dim 64, value head dim 64, causal: none
With         bias
Config       block_m 64, block_n 128, 8 warps, 2 stages; for dq block_m 128, block_n 64, 8 warps, 2 stages;
             split_masked_loop True, split_head_dim False, lpt False, heads_innermost False, maxnreg 0, input_precision ieee
Assumes      strides that are multiples of 16, 32-bit offsets, no gradient of the bias
Template     backward_split bfb6e4998891

  delta:                 for each row: delta = rowsum(dout * out) - dlse; lse in units of log2
  backward_split:        for each block of keys, in parallel:
                           dk, dv = 0
                           for each query head of the group, for each block of queries that sees the keys:
                             P = exp2(scale q k^T - lse), masked; dv += P^T dout
                             dS = P * (dout v^T - delta); dk += dS^T q
                           store scale dk, dv
  gradient_of_queries:   for each tile of queries, in parallel:
                           dq = 0
                           for each block of keys that the queries see: the same P and dS; dq += dS k
                           store scale dq

Tunables
  block_m, block_n                  queries and keys of a tile where keys stay
  dq_block_m, dq_block_n            queries and keys of a tile where queries stay
  num_warps, num_stages, dq_*       warps and pipeline stages of the two kernels
  split_masked_loop                 blocks that no mask cuts have a loop of their own
  split_head_dim                    a head dim that is no power of two is two tiles instead of a padded one
  lpt                               the tiles of queries with the most keys are first
  heads_innermost                   neighbouring programs have different heads
  maxnreg                           limit of registers per thread, 0 for none
Notation
  stride_qb, stride_qh, stride_qs   elements between batches, heads and positions of q; k, v, out (o), dout (do)
                                    and the gradients dq, dk, dv alike
  workspace_0                       delta, float32 [batch, heads, seqlen_q]
  workspace_1                       row_max and row_sum_log2, float32 [batch, heads, seqlen_q, 2]: the maximum of a row with
                                    large scores and the logarithm of its sum, else lse and 0. A large lse is rounded
  workspace_2                       with ALiBi: parts of the slopes' gradients, float32 [batch, heads, seqlen_kv]
  the last workspace                with dropout: two random words of each row, in float32 [batch, heads, seqlen_q, 2]
  position                          position of a query among the keys of its sequence
  *_tile                            a block on the chip, its shape in a comment
  d*                                the gradient of *
  *_log2, row_lse                   a quantity in units of log2, for exp2
References: Dao, 2023 (FlashAttention-2); Tillet et al., 2019 (Triton's tutorial).
"""

import torch
import triton
import triton.language as tl

BLOCK_M = tl.constexpr(64)
BLOCK_N = tl.constexpr(128)
DQ_BLOCK_M = tl.constexpr(128)
DQ_BLOCK_N = tl.constexpr(64)
DELTA_ROWS = tl.constexpr(128)
HEAD_DIM = tl.constexpr(64)
VALUE_HEAD_DIM = tl.constexpr(64)
LOG2_E = tl.constexpr(1.4426950408889634)
# Larger log-sum-exps have a rounding error that matters.
LARGE = tl.constexpr(1024.0)
SUMMED_KEYS = tl.constexpr(32)


@triton.jit
def delta(
    out,
    dout,
    lse,
    workspace_0,
    workspace_1,
    q,
    k,
    bias,
    scale,
    stride_ob,
    stride_oh,
    stride_os,
    stride_dob,
    stride_doh,
    stride_dos,
    heads,
    seqlen_q,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_bias_b,
    stride_bias_h,
    stride_bias_s,
    group_size,
    seqlen_kv,
):
    # Of each row delta = rowsum(dout * out) [- dlse], which the softmax's gradient takes off those of the probabilities,
    # and its log-sum-exp in units of log2: infinite where it sees nothing, so that its probabilities are zero.
    tiles = tl.cdiv(seqlen_q, DELTA_ROWS)
    tile = tl.program_id(0) % tiles
    batch_head = tl.program_id(0) // tiles
    batch = batch_head // heads
    head = batch_head % heads
    queries = tile * DELTA_ROWS + tl.arange(0, DELTA_ROWS)
    query_exists = queries < seqlen_q
    columns_64 = tl.arange(0, 64)
    out_base = out + batch * stride_ob + head * stride_oh
    dout_base = dout + batch * stride_dob + head * stride_doh
    # [DELTA_ROWS, 64]
    out_tile = tl.load(
        out_base + queries[:, None] * stride_os + columns_64[None, :],
        mask=query_exists[:, None],
        other=0.0,
    )
    dout_tile = tl.load(
        dout_base + queries[:, None] * stride_dos + columns_64[None, :],
        mask=query_exists[:, None],
        other=0.0,
    )
    row_delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    rows = batch_head.to(tl.int64) * seqlen_q + queries
    tl.store(workspace_0 + rows, row_delta, mask=query_exists)
    row_lse = tl.load(lse + rows, mask=query_exists, other=0.0)
    row_max = tl.where(row_lse == float("-inf"), 0.0, row_lse)
    row_sum_log2 = tl.where(row_lse == float("-inf"), float("inf"), 0.0)
    is_large = tl.abs(row_max) > LARGE
    if tl.max(is_large.to(tl.int32), 0) != 0:
        sequence = batch
        k_base = k + batch * stride_kb + head // group_size * stride_kh
        q_base = q + batch * stride_qb + head * stride_qh
        columns_64 = tl.arange(0, 64)
        # [DELTA_ROWS, 64]
        q_tile = tl.load(
            q_base + queries[:, None] * stride_qs + columns_64[None, :],
            mask=query_exists[:, None],
            other=0.0,
        )
        key_offsets = tl.arange(0, SUMMED_KEYS)
        bias_queries = tl.minimum(queries, seqlen_q - 1)
        score_scale = scale
        # Offsets of a bias over all pairs exceed 2^31. Offsets within a tile do not.
        bias_base = (
            bias + sequence.to(tl.int64) * stride_bias_b + head * stride_bias_h + tile * DELTA_ROWS * stride_bias_s
        )
        bias_rows = ((bias_queries - tile * DELTA_ROWS) * stride_bias_s).to(tl.int32)
        running_max = tl.full([DELTA_ROWS], float("-inf"), tl.float32)
        running_sum = tl.zeros([DELTA_ROWS], tl.float32)
        for start in tl.range(0, seqlen_kv, SUMMED_KEYS):
            keys = start + key_offsets
            # [SUMMED_KEYS, 64]
            k_tile = tl.load(
                k_base + keys[:, None] * stride_ks + columns_64[None, :],
                mask=(keys < seqlen_kv)[:, None],
                other=0.0,
            )
            s = tl.dot(q_tile, k_tile.T)
            bias_at = bias_base + (bias_rows[:, None] + keys[None, :])
            bias_tile = tl.load(bias_at, mask=(keys < seqlen_kv)[None, :], other=0.0)
            # In natural units, where sums are rounded as in unfused attention.
            s = s * score_scale + bias_tile.to(tl.float32)
            visible = (keys < seqlen_kv)[None, :]
            s = tl.where(visible, s, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(s, 1))
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = tl.exp2((s - shift[:, None]) * LOG2_E)
            running_sum = running_sum * tl.exp2((running_max - shift) * LOG2_E) + tl.sum(p, 1)
            running_max = new_max
        row_max = tl.where(is_large, running_max, row_max)
        row_sum_log2 = tl.where(is_large, tl.log2(running_sum), row_sum_log2)
    tl.store(workspace_1 + rows * 2, row_max, mask=query_exists)
    tl.store(workspace_1 + rows * 2 + 1, row_sum_log2, mask=query_exists)


@triton.jit
def backward_split(
    q,
    k,
    v,
    dout,
    workspace_0,
    workspace_1,
    dk,
    dv,
    bias,
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
    stride_dob,
    stride_doh,
    stride_dos,
    stride_dkb,
    stride_dkh,
    stride_dks,
    stride_dvb,
    stride_dvh,
    stride_dvs,
    stride_bias_b,
    stride_bias_h,
    stride_bias_s,
    heads,
    group_size,
    seqlen_q,
    seqlen_kv,
):
    # Which block of keys, of which KV head of which sequence.
    tiles = tl.cdiv(seqlen_kv, BLOCK_N)
    kv_heads = heads // group_size
    tile = tl.program_id(0) % tiles
    batch_head = tl.program_id(0) // tiles
    sequence = batch_head // kv_heads
    kv_head = batch_head % kv_heads
    key_begin = tile * BLOCK_N
    keys = key_begin + tl.arange(0, BLOCK_N)
    query_offsets = tl.arange(0, BLOCK_M)
    columns_64 = tl.arange(0, 64)

    k_base = k + sequence * stride_kb + kv_head * stride_kh
    v_base = v + sequence * stride_vb + kv_head * stride_vh
    dk_base = dk + sequence * stride_dkb + kv_head * stride_dkh
    dv_base = dv + sequence * stride_dvb + kv_head * stride_dvh
    key_exists = keys < seqlen_kv
    # [BLOCK_N, 64]
    k_tile = tl.load(
        k_base + keys[:, None] * stride_ks + columns_64[None, :],
        mask=key_exists[:, None],
        other=0.0,
    )
    dk_sum = tl.zeros([BLOCK_N, 64], tl.float32)
    # [BLOCK_N, 64]
    v_tile = tl.load(
        v_base + keys[:, None] * stride_vs + columns_64[None, :],
        mask=key_exists[:, None],
        other=0.0,
    )
    dv_sum = tl.zeros([BLOCK_N, 64], tl.float32)
    score_scale = scale
    # Offsets of a bias over all pairs pass 2^31 soon, those within a tile do not.
    bias_rows = (query_offsets * stride_bias_s).to(tl.int32)
    bias_keys = tl.minimum(keys, seqlen_kv - 1)
    m_max = seqlen_q
    m_full_max = seqlen_q
    m_full_max = tl.maximum(m_full_max, 0) // BLOCK_M * BLOCK_M
    # Blocks of all heads of the group in one loop: sums that cross two loops cost registers.
    full_blocks = m_full_max // BLOCK_M
    for index in tl.range(0, group_size * full_blocks):
        # Before the loop is entered the first division may be made, whatever its divisor is.
        member = index // tl.maximum(full_blocks, 1)
        block = index - member * full_blocks
        start = block * BLOCK_M
        head = kv_head * group_size + member
        q_base = q + sequence * stride_qb + head * stride_qh
        dout_base = dout + sequence * stride_dob + head * stride_doh
        row_base = (sequence * heads + head).to(tl.int64) * seqlen_q
        bias_base = bias + sequence.to(tl.int64) * stride_bias_b + head * stride_bias_h
        queries = start + query_offsets
        # [BLOCK_M, 64]
        q_tile = tl.load(
            q_base + queries[:, None] * stride_qs + columns_64[None, :],
        )
        row_max = tl.load(workspace_1 + (row_base + queries) * 2)
        row_sum_log2 = tl.load(workspace_1 + (row_base + queries) * 2 + 1)
        # [BLOCK_N, BLOCK_M]
        bias_at = bias_base + start.to(tl.int64) * stride_bias_s + (bias_rows[None, :] + bias_keys[:, None])
        # Scores and all that is made of them are [BLOCK_N, BLOCK_M].
        s = tl.dot(k_tile, q_tile.T)
        bias_tile = tl.load(bias_at)
        s = s * score_scale + bias_tile.to(tl.float32)
        p = tl.exp2((s - row_max[None, :]) * LOG2_E - row_sum_log2[None, :])
        p_low = p.to(q.dtype.element_ty)
        # [BLOCK_M, 64]
        dout_tile = tl.load(
            dout_base + queries[:, None] * stride_dos + columns_64[None, :],
        )
        dv_sum = tl.dot(p_low, dout_tile, dv_sum)
        dp = tl.dot(v_tile, dout_tile.T)
        # Loaded late: every thread holds those of many queries.
        row_delta = tl.load(workspace_0 + row_base + queries)
        ds = p * (dp - row_delta[None, :])
        ds_low = ds.to(q.dtype.element_ty)
        dk_sum = tl.dot(ds_low, q_tile, dk_sum)
    # The last block, where queries are missing.
    partial_blocks = tl.cdiv(tl.maximum(m_max - m_full_max, 0), BLOCK_M)
    for index in tl.range(0, group_size * partial_blocks):
        # Before the loop is entered the first division may be made, whatever its divisor is.
        member = index // tl.maximum(partial_blocks, 1)
        block = index - member * partial_blocks
        start = m_full_max + block * BLOCK_M
        head = kv_head * group_size + member
        q_base = q + sequence * stride_qb + head * stride_qh
        dout_base = dout + sequence * stride_dob + head * stride_doh
        row_base = (sequence * heads + head).to(tl.int64) * seqlen_q
        bias_base = bias + sequence.to(tl.int64) * stride_bias_b + head * stride_bias_h
        queries = start + query_offsets
        query_exists = queries < seqlen_q
        # [BLOCK_M, 64]
        q_tile = tl.load(
            q_base + queries[:, None] * stride_qs + columns_64[None, :],
            mask=query_exists[:, None],
            other=0.0,
        )
        row_max = tl.load(workspace_1 + (row_base + queries) * 2, mask=query_exists, other=0.0)
        row_sum_log2 = tl.load(workspace_1 + (row_base + queries) * 2 + 1, mask=query_exists, other=float("inf"))
        # [BLOCK_N, BLOCK_M]
        bias_at = bias_base + start.to(tl.int64) * stride_bias_s + (bias_rows[None, :] + bias_keys[:, None])
        # Scores and all that is made of them are [BLOCK_N, BLOCK_M].
        s = tl.dot(k_tile, q_tile.T)
        bias_tile = tl.load(bias_at, mask=query_exists[None, :], other=0.0)
        s = s * score_scale + bias_tile.to(tl.float32)
        p = tl.exp2((s - row_max[None, :]) * LOG2_E - row_sum_log2[None, :])
        p_low = p.to(q.dtype.element_ty)
        # [BLOCK_M, 64]
        dout_tile = tl.load(
            dout_base + queries[:, None] * stride_dos + columns_64[None, :],
            mask=query_exists[:, None],
            other=0.0,
        )
        dv_sum = tl.dot(p_low, dout_tile, dv_sum)
        dp = tl.dot(v_tile, dout_tile.T)
        # Loaded late: every thread holds those of many queries.
        row_delta = tl.load(workspace_0 + row_base + queries, mask=query_exists, other=0.0)
        ds = p * (dp - row_delta[None, :])
        ds_low = ds.to(q.dtype.element_ty)
        dk_sum = tl.dot(ds_low, q_tile, dk_sum)

    dk_tile = (dk_sum * scale).to(dk.dtype.element_ty)
    tl.store(
        dk_base + keys[:, None] * stride_dks + columns_64[None, :],
        dk_tile,
        mask=key_exists[:, None],
    )
    dv_tile = dv_sum.to(dv.dtype.element_ty)
    tl.store(
        dv_base + keys[:, None] * stride_dvs + columns_64[None, :],
        dv_tile,
        mask=key_exists[:, None],
    )


@triton.jit
def gradient_of_queries(
    q,
    k,
    v,
    dout,
    workspace_0,
    workspace_1,
    dq,
    bias,
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
    stride_dob,
    stride_doh,
    stride_dos,
    stride_dqb,
    stride_dqh,
    stride_dqs,
    stride_bias_b,
    stride_bias_h,
    stride_bias_s,
    heads,
    group_size,
    seqlen_q,
    seqlen_kv,
):
    BLOCK_M: tl.constexpr = DQ_BLOCK_M
    BLOCK_N: tl.constexpr = DQ_BLOCK_N
    # Which tile of queries, of which head of which sequence.
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile = tl.program_id(0) % tiles
    batch_head = tl.program_id(0) // tiles
    sequence = batch_head // heads
    head = batch_head % heads
    kv_head = head // group_size
    first_query = tile * BLOCK_M
    queries = first_query + tl.arange(0, BLOCK_M)
    query_exists = queries < seqlen_q
    key_offsets = tl.arange(0, BLOCK_N)
    columns_64 = tl.arange(0, 64)

    q_base = q + sequence * stride_qb + head * stride_qh
    dout_base = dout + sequence * stride_dob + head * stride_doh
    dq_base = dq + sequence * stride_dqb + head * stride_dqh
    row_base = (sequence * heads + head).to(tl.int64) * seqlen_q
    k_base = k + sequence * stride_kb + kv_head * stride_kh
    v_base = v + sequence * stride_vb + kv_head * stride_vh
    # [BLOCK_M, 64]
    q_tile = tl.load(
        q_base + queries[:, None] * stride_qs + columns_64[None, :],
        mask=query_exists[:, None],
        other=0.0,
    )
    # [BLOCK_M, 64]
    dout_tile = tl.load(
        dout_base + queries[:, None] * stride_dos + columns_64[None, :],
        mask=query_exists[:, None],
        other=0.0,
    )
    row_max = tl.load(workspace_1 + (row_base + queries) * 2, mask=query_exists, other=0.0)
    row_sum_log2 = tl.load(workspace_1 + (row_base + queries) * 2 + 1, mask=query_exists, other=float("inf"))
    row_delta = tl.load(workspace_0 + row_base + queries, mask=query_exists, other=0.0)
    dq_sum = tl.zeros([BLOCK_M, 64], tl.float32)
    n_max = seqlen_kv
    n_full_max = seqlen_kv // BLOCK_N * BLOCK_N
    bias_queries = tl.minimum(queries, seqlen_q - 1)
    score_scale = scale
    # Offsets of a bias over all pairs exceed 2^31. Offsets within a tile do not.
    bias_base = bias + sequence.to(tl.int64) * stride_bias_b + head * stride_bias_h + first_query * stride_bias_s
    bias_rows = ((bias_queries - first_query) * stride_bias_s).to(tl.int32)

    for start in tl.range(0, n_full_max, BLOCK_N):
        keys = start + key_offsets
        # [BLOCK_N, 64]
        k_tile = tl.load(
            k_base + keys[:, None] * stride_ks + columns_64[None, :],
        )
        s = tl.dot(q_tile, k_tile.T)
        # [BLOCK_M, BLOCK_N]
        bias_at = bias_base + (bias_rows[:, None] + keys[None, :])
        bias_tile = tl.load(bias_at)
        s = s * score_scale + bias_tile.to(tl.float32)
        p = tl.exp2((s - row_max[:, None]) * LOG2_E - row_sum_log2[:, None])
        # [BLOCK_N, 64]
        v_tile = tl.load(
            v_base + keys[:, None] * stride_vs + columns_64[None, :],
        )
        dp = tl.dot(dout_tile, v_tile.T)
        ds = p * (dp - row_delta[:, None])
        ds_low = ds.to(q.dtype.element_ty)
        dq_sum = tl.dot(ds_low, k_tile, dq_sum)

    for start in tl.range(n_full_max, n_max, BLOCK_N):
        keys = start + key_offsets
        # [BLOCK_N, 64]
        k_tile = tl.load(
            k_base + keys[:, None] * stride_ks + columns_64[None, :],
            mask=(keys < seqlen_kv)[:, None],
            other=0.0,
        )
        s = tl.dot(q_tile, k_tile.T)
        # [BLOCK_M, BLOCK_N]
        bias_at = bias_base + (bias_rows[:, None] + keys[None, :])
        bias_tile = tl.load(bias_at, mask=(keys < seqlen_kv)[None, :], other=0.0)
        s = s * score_scale + bias_tile.to(tl.float32)
        p = tl.exp2((s - row_max[:, None]) * LOG2_E - row_sum_log2[:, None])
        visible = (keys < seqlen_kv)[None, :]
        p = tl.where(visible, p, 0.0)
        # [BLOCK_N, 64]
        v_tile = tl.load(
            v_base + keys[:, None] * stride_vs + columns_64[None, :],
            mask=(keys < seqlen_kv)[:, None],
            other=0.0,
        )
        dp = tl.dot(dout_tile, v_tile.T)
        ds = p * (dp - row_delta[:, None])
        ds_low = ds.to(q.dtype.element_ty)
        dq_sum = tl.dot(ds_low, k_tile, dq_sum)
    dq_tile = (dq_sum * scale).to(dq.dtype.element_ty)
    tl.store(
        dq_base + queries[:, None] * stride_dqs + columns_64[None, :],
        dq_tile,
        mask=query_exists[:, None],
    )


def prologue_plan(q, k, v, out, dout, dq, dk, dv, bias):
    """Grid of `delta`, and its integers."""
    batch, heads, seqlen_q, _ = q.shape
    strides = [tensor.stride(axis) for tensor in (out, dout) for axis in (0, 1, 2)]
    scores = [tensor.stride(axis) for tensor in (q, k) for axis in (0, 1, 2)]
    scores += [bias.stride(0), bias.stride(1), bias.stride(2), heads // k.shape[1], k.shape[2]]
    return (triton.cdiv(seqlen_q, 128) * heads * batch,), (*strides, heads, seqlen_q, *scores)


def launch_plan(q, k, v, out, dout, dq, dk, dv, bias):
    """Grid of the kernel, shapes of float32 workspaces, and its integers."""
    batch, heads, seqlen_q, _ = q.shape
    kv_heads, seqlen_kv = k.shape[1], k.shape[2]
    grid = (triton.cdiv(seqlen_kv, 128) * kv_heads * batch,)
    strides = [tensor.stride(axis) for tensor in (q, k, v, dout, dk, dv) for axis in (0, 1, 2)]
    strides += [
        bias.stride(0),
        bias.stride(1),
        bias.stride(2),
    ]
    rows = (batch, heads, seqlen_q)
    workspaces = (rows, (*rows, 2))
    return grid, workspaces, (*strides, heads, heads // kv_heads, seqlen_q, seqlen_kv)


def epilogue_plan(q, k, v, out, dout, dq, dk, dv, bias):
    """Grid of `gradient_of_queries`, and its integers."""
    batch, heads, seqlen_q, _ = q.shape
    kv_heads, seqlen_kv = k.shape[1], k.shape[2]
    grid = (triton.cdiv(seqlen_q, 128) * heads * batch,)
    strides = [tensor.stride(axis) for tensor in (q, k, v, dout, dq) for axis in (0, 1, 2)]
    strides += [
        bias.stride(0),
        bias.stride(1),
        bias.stride(2),
    ]
    return grid, (*strides, heads, heads // kv_heads, seqlen_q, seqlen_kv)


def attention_backward(q, k, v, out, lse, dout, scale=None, *, bias):
    """Returns dq, dk, dv, and the gradients of an additive bias and of ALiBi's slopes if the kernel writes them.

    q, k, v, out, dout are [batch, heads, seqlen, head_dim] with a contiguous last dimension. lse is the log-sum-exp
    of each row and dlse its gradient, float32 and contiguous. Packed sequences have a batch of one; sequence b has
    rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]. A boolean bias is True where a query sees a key. softcap, dropout
    and seed are those of the forward pass. The checks give the dtype and the shape of each tensor.
    """
    # The kernel itself checks nothing: other sizes, types or strides would read and write other memory.
    large = [("q", q), ("k", k), ("v", v), ("out", out), ("dout", dout)]
    for name, tensor in [
        *large,
        ("bias", bias),
    ]:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, expected a tensor")
    dtype = torch.bfloat16
    if triton.knobs.runtime.interpret:
        if q.dtype != torch.float32:
            raise ValueError(f"q has dtype {q.dtype}, expected float32: TRITON_INTERPRET corrupts 16-bit products")
        dtype = torch.float32
    for name, tensor in large:
        if tensor.ndim != 4:
            raise ValueError(f"{name} has {tensor.ndim} dimensions, expected 4")
    heads, seqlen_q = q.shape[1:3]
    kv_heads = k.shape[1]
    batch = q.shape[0]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"k has {kv_heads} heads, expected a divisor of the {heads} heads of q")
    rows = (batch, heads, seqlen_q)
    keys = (batch, kv_heads, k.shape[2])
    for name, tensor, expected, shape in (
        ("q", q, dtype, (*rows, 64)),
        ("k", k, dtype, (*keys, 64)),
        ("v", v, dtype, (*keys, 64)),
        ("out", out, dtype, (*rows, 64)),
        ("dout", dout, dtype, (*rows, 64)),
        ("lse", lse, torch.float32, rows),
        ("bias", bias, dtype, (*rows, *k.shape[2:3])),
    ):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, expected a tensor")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, expected {q.device}, the device of q")
        if tensor.dtype != expected:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected {expected}")
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}, expected 1 for the last dimension")
    for name, tensor in [("lse", lse)]:
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}, expected a contiguous tensor")
    for name, tensor in large:
        if any(stride % 16 for stride in tensor.stride()[:3]):
            raise ValueError(f"{name} has strides {tensor.stride()}, expected multiples of 16 before the last")
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name} has the address {tensor.data_ptr()}, expected a multiple of 16")
        # Offsets have 32 bits. A tile may lie past the end of a sequence by 1,024 masked rows.
        span = 1024 * tensor.stride(2) + sum((tensor.shape[i] - 1) * tensor.stride(i) for i in range(4))
        if span >= 2**31:
            raise ValueError(f"{name} spans {span} elements, expected fewer than 2**31")
    # Offsets within a batch have 32 bits.
    span = sum((bias.shape[i] - 1) * bias.stride(i) for i in (1, 2, 3)) + 1024 * (bias.stride(2) + 1)
    if span >= 2**31:
        raise ValueError(f"bias spans {span} elements in one batch, expected fewer than 2**31")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    negative = scale < 0
    if negative:
        q, scale = -q, -scale
    scale = max(scale, 1e-30)
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        return dq, dk, dv
    planned = (q, k, v, out, dout, dq, dk, dv, bias)
    grid, shapes, integers = launch_plan(*planned)
    workspaces = [torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes]
    first_grid, first_integers = prologue_plan(*planned)
    last_grid, last_integers = epilogue_plan(*planned)
    # Only the prologue reads the seed.
    inputs = [bias, scale]
    delta[first_grid](
        *(out, dout, lse, *workspaces[:2]),
        *(q, k, bias, scale),
        *first_integers,
        num_warps=4,
        num_stages=1,
    )
    backward_split[grid](
        *(q, k, v, dout, *workspaces, dk, dv),
        *inputs,
        *integers,
        num_warps=8,
        num_stages=2,
    )
    gradient_of_queries[last_grid](
        *(q, k, v, dout, *workspaces, dq),
        *inputs,
        *last_integers,
        num_warps=8,
        num_stages=2,
    )
    return -dq if negative else dq, dk, dv
