"""Attention backward in two passes: one program keeps a block of keys and walks queries, for dk and dv; then
one keeps a tile of queries and walks keys, for dq. Nothing is added up by atomics: every run gives the same bits.

Computes     fp32, head dim 40, value head dim 24, causal: none
With         alibi, bias, chunk, kv_lengths, prefix, softcap, gradient of the log-sum-exp
Config       block_m 32, block_n 32, 4 warps, 1 stages; for dq block_m 32, block_n 32, 4 warps, 1 stages;
             split_masked_loop True, split_head_dim False, lpt False, heads_innermost True, maxnreg 0, input_precision ieee
Assumes      strides that are multiples of 1, 64-bit offsets
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

BLOCK_M = tl.constexpr(32)
BLOCK_N = tl.constexpr(32)
DQ_BLOCK_M = tl.constexpr(32)
DQ_BLOCK_N = tl.constexpr(32)
DELTA_ROWS = tl.constexpr(128)
HEAD_DIM = tl.constexpr(40)
VALUE_HEAD_DIM = tl.constexpr(24)
LOG2_E = tl.constexpr(1.4426950408889634)
# Larger log-sum-exps have a rounding error that matters.
LARGE = tl.constexpr(1024.0)
SUMMED_KEYS = tl.constexpr(32)
LN_2 = tl.constexpr(0.6931471805599453)
CHUNK = tl.constexpr(64)


@triton.jit
def key_stop(position, seqlen_kv):
    """Returns the key after the last one that a query sees, by causality, the right window and the chunk."""
    stop = tl.minimum(seqlen_kv, tl.where(position < 0, 0, position // CHUNK * CHUNK + CHUNK))
    return stop


@triton.jit
def key_start(position):
    """Returns the first key that a query sees, by the left window and the chunk."""
    return tl.maximum(position, 0) // CHUNK * CHUNK


@triton.jit
def key_bounds(first_position, last_position, seqlen_kv, prefix_end):
    """Returns ranges of keys for queries at first_position .. last_position. All bounds grow with the position.

    Blocks in n_min .. n_max have a key that some query sees.
    Blocks in n_full_min .. n_full_max have no key that some query does not see.
    Blocks in 0 .. n_lifted are at the start of the sequence, before n_min, and visible despite window and chunk.
    An end may be less than its begin: then there is nothing. Ranges without a begin start at 0.
    """
    first_start = key_start(first_position)
    n_max = key_stop(last_position, seqlen_kv)
    last_lifted = prefix_end
    n_max = tl.maximum(n_max, last_lifted)
    n_min = first_start // DQ_BLOCK_N * DQ_BLOCK_N
    n_lifted = tl.minimum(tl.cdiv(last_lifted, DQ_BLOCK_N) * DQ_BLOCK_N, n_min)
    n_full_min = tl.cdiv(key_start(last_position), DQ_BLOCK_N) * DQ_BLOCK_N
    n_full_max = tl.maximum(key_stop(first_position, seqlen_kv), 0) // DQ_BLOCK_N * DQ_BLOCK_N
    return n_min, n_max, n_lifted, n_full_min, n_full_max


@triton.jit
def cap_scores(s, score_factor, cap_log2):
    """Returns scores after the softcap, in units of log2."""
    s *= score_factor
    # Near zero 1 - 2 / (1 + exp(2x)) has lost the digits that float32 has: there its series, odd like tanh.
    square = s * s
    series = 0.021869488536155203 - square * 0.008863235529902197
    series = -0.05396825396825397 + square * series
    series = -0.3333333333333333 + square * (0.13333333333333333 + square * series)
    steep = 1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 * LOG2_E)))
    return cap_log2 * tl.where(square < 0.16, s + s * square * series, steep)


@triton.jit
def query_start(key, diagonal):
    """Returns the first query that sees a key: by causality, or by the right window and the chunk."""
    query = key // CHUNK * CHUNK
    return tl.maximum(query - diagonal, 0)


@triton.jit
def query_stop(key, diagonal, seqlen_q):
    """Returns the query after the last one that sees a key, by the left window and the chunk."""
    query = key // CHUNK * CHUNK + CHUNK
    return tl.minimum(query - diagonal, seqlen_q)


@triton.jit
def delta(
    out,
    dout,
    lse,
    dlse,
    workspace_0,
    workspace_1,
    q,
    k,
    slopes,
    bias,
    prefix,
    seqlens_kv,
    scale,
    softcap,
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
    stride_slopes_b,
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
    columns_32 = tl.arange(0, 32)
    out_base = out + batch * stride_ob + head * stride_oh
    dout_base = dout + batch * stride_dob + head * stride_doh
    # [DELTA_ROWS, 32]
    out_tile = tl.load(
        out_base + queries[:, None] * stride_os + columns_32[None, :],
        mask=query_exists[:, None] & (columns_32 < VALUE_HEAD_DIM)[None, :],
        other=0.0,
    )
    dout_tile = tl.load(
        dout_base + queries[:, None] * stride_dos + columns_32[None, :],
        mask=query_exists[:, None] & (columns_32 < VALUE_HEAD_DIM)[None, :],
        other=0.0,
    )
    row_delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    rows = batch_head.to(tl.int64) * seqlen_q + queries
    row_delta -= tl.load(dlse + rows, mask=query_exists, other=0.0)
    tl.store(workspace_0 + rows, row_delta, mask=query_exists)
    row_lse = tl.load(lse + rows, mask=query_exists, other=0.0)
    row_max = tl.where(row_lse == float("-inf"), 0.0, row_lse)
    row_sum_log2 = tl.where(row_lse == float("-inf"), float("inf"), 0.0)
    is_large = tl.abs(row_max) > LARGE
    if tl.max(is_large.to(tl.int32), 0) != 0:
        sequence = batch
        k_base = k + batch * stride_kb + head // group_size * stride_kh
        # A length beyond the tensors counts as their end.
        seqlen_kv = tl.minimum(tl.load(seqlens_kv + batch), seqlen_kv)
        prefix_end = tl.minimum(tl.load(prefix + batch), seqlen_kv)
        q_base = q + batch * stride_qb + head * stride_qh
        columns_64 = tl.arange(0, 64)
        # [DELTA_ROWS, 64]
        q_tile = tl.load(
            q_base + queries[:, None] * stride_qs + columns_64[None, :],
            mask=query_exists[:, None] & (columns_64 < HEAD_DIM)[None, :],
            other=0.0,
        )
        key_offsets = tl.arange(0, SUMMED_KEYS)
        positions = queries + (seqlen_kv - seqlen_q)
        row_end = key_stop(positions, seqlen_kv)
        row_lifted = prefix_end
        row_start = key_start(positions)
        bias_queries = tl.minimum(queries, seqlen_q - 1)
        # tanh(x) is 1 - 2 / (1 + exp(2x)).
        cap_log2 = softcap * LOG2_E
        score_factor = scale / softcap
        slope_log2 = tl.load(slopes + sequence * stride_slopes_b + head) * LOG2_E
        position_numbers = positions.to(tl.float32)
        key_numbers = key_offsets.to(tl.float32)
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
                mask=(keys < seqlen_kv)[:, None] & (columns_64 < HEAD_DIM)[None, :],
                other=0.0,
            )
            s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
            s = cap_scores(s, score_factor, cap_log2)
            distance = (position_numbers - start)[:, None] - key_numbers[None, :]
            s -= slope_log2 * tl.abs(distance)
            bias_at = bias_base + (bias_rows[:, None] + keys[None, :])
            bias_tile = tl.load(bias_at, mask=(keys < seqlen_kv)[None, :], other=0.0)
            # In natural units, where sums are rounded as in unfused attention.
            s = s * LN_2 + bias_tile.to(tl.float32)
            visible = (keys[None, :] >= row_start[:, None]) & (keys[None, :] < row_end[:, None])
            visible |= (keys < row_lifted)[None, :]
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
    workspace_2,
    dk,
    dv,
    slopes,
    bias,
    prefix,
    seqlens_kv,
    scale,
    softcap,
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
    stride_slopes_b,
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
    all_heads = tl.num_programs(0) // tiles
    tile = tl.program_id(0) // all_heads
    batch_head = tl.program_id(0) % all_heads
    slope_stride = seqlen_kv
    sequence = batch_head // kv_heads
    kv_head = batch_head % kv_heads
    all_keys = seqlen_kv
    key_begin = tile * BLOCK_N
    keys = key_begin + tl.arange(0, BLOCK_N)
    query_offsets = tl.arange(0, BLOCK_M)
    columns_32 = tl.arange(0, 32)
    columns_64 = tl.arange(0, 64)

    k_base = k + sequence * stride_kb + kv_head * stride_kh
    v_base = v + sequence * stride_vb + kv_head * stride_vh
    # A length beyond the tensors counts as their end.
    seqlen_kv = tl.minimum(tl.load(seqlens_kv + sequence), seqlen_kv)
    prefix_end = tl.minimum(tl.load(prefix + sequence), seqlen_kv)
    dk_base = dk + sequence * stride_dkb + kv_head * stride_dkh
    dv_base = dv + sequence * stride_dvb + kv_head * stride_dvh
    key_exists = keys < seqlen_kv
    # [BLOCK_N, 64]
    k_tile = tl.load(
        k_base + keys[:, None] * stride_ks + columns_64[None, :],
        mask=key_exists[:, None] & (columns_64 < HEAD_DIM)[None, :],
        other=0.0,
    )
    dk_sum = tl.zeros([BLOCK_N, 64], tl.float32)
    # [BLOCK_N, 32]
    v_tile = tl.load(
        v_base + keys[:, None] * stride_vs + columns_32[None, :],
        mask=key_exists[:, None] & (columns_32 < VALUE_HEAD_DIM)[None, :],
        other=0.0,
    )
    dv_sum = tl.zeros([BLOCK_N, 32], tl.float32)
    diagonal = seqlen_kv - seqlen_q
    # tanh(x) is 1 - 2 / (1 + exp(2x)).
    cap_log2 = softcap * LOG2_E
    score_factor = scale / softcap
    # Offsets of a bias over all pairs pass 2^31 soon, those within a tile do not.
    bias_rows = (query_offsets * stride_bias_s).to(tl.int32)
    bias_keys = tl.minimum(keys, seqlen_kv - 1)
    key_numbers = keys.to(tl.float32)
    slope_base = (sequence * heads).to(tl.int64) * slope_stride
    slope_sum = tl.zeros([BLOCK_N], tl.float32)
    last_key = tl.minimum(key_begin + BLOCK_N, seqlen_kv) - 1
    m_min = query_start(key_begin, diagonal)
    m_max = query_stop(last_key, diagonal, seqlen_q)
    # All queries see the keys of the prefix.
    m_min = tl.where(key_begin < prefix_end, 0, m_min)
    # The first keys are seen however far back.
    m_max = tl.where(key_begin < prefix_end, seqlen_q, m_max)
    # Keys behind the sequence's last have no queries.
    m_max = tl.where(key_begin < seqlen_kv, m_max, 0)
    m_min = m_min // BLOCK_M * BLOCK_M
    # Blocks of all heads of the group in one loop: sums that cross two loops cost registers.
    partial_blocks = tl.cdiv(tl.maximum(m_max - m_min, 0), BLOCK_M)
    if partial_blocks == 0:
        for member in tl.range(0, group_size):
            head = kv_head * group_size + member
            slope_at = workspace_2 + slope_base + head.to(tl.int64) * slope_stride + keys
            tl.store(slope_at, slope_sum, mask=key_exists)
    for index in tl.range(0, group_size * partial_blocks):
        # Before the loop is entered the first division may be made, whatever its divisor is.
        member = index // tl.maximum(partial_blocks, 1)
        block = index - member * partial_blocks
        start = m_min + block * BLOCK_M
        head = kv_head * group_size + member
        q_base = q + sequence * stride_qb + head * stride_qh
        dout_base = dout + sequence * stride_dob + head * stride_doh
        row_base = (sequence * heads + head).to(tl.int64) * seqlen_q
        slope_log2 = tl.load(slopes + sequence * stride_slopes_b + head) * LOG2_E
        bias_base = bias + sequence.to(tl.int64) * stride_bias_b + head * stride_bias_h
        queries = start + query_offsets
        query_exists = queries < seqlen_q
        positions = queries + diagonal
        row_end = key_stop(positions, seqlen_kv)
        row_lifted = prefix_end
        row_start = key_start(positions)
        # [BLOCK_M, 64]
        q_tile = tl.load(
            q_base + queries[:, None] * stride_qs + columns_64[None, :],
            mask=query_exists[:, None] & (columns_64 < HEAD_DIM)[None, :],
            other=0.0,
        )
        row_max = tl.load(workspace_1 + (row_base + queries) * 2, mask=query_exists, other=0.0)
        row_sum_log2 = tl.load(workspace_1 + (row_base + queries) * 2 + 1, mask=query_exists, other=float("inf"))
        # [BLOCK_N, BLOCK_M]
        bias_at = bias_base + start.to(tl.int64) * stride_bias_s + (bias_rows[None, :] + bias_keys[:, None])
        position_numbers = positions.to(tl.float32)
        # Scores and all that is made of them are [BLOCK_N, BLOCK_M].
        s = tl.dot(k_tile, q_tile.T, input_precision="ieee")
        s = cap_scores(s, score_factor, cap_log2)
        # How steep the cap is there: the derivative of cap * tanh(x / cap).
        tangent = s * (1.0 / cap_log2)
        steepness = 1.0 - tangent * tangent
        distance = tl.abs(position_numbers[None, :] - key_numbers[:, None])
        s -= slope_log2 * distance
        bias_tile = tl.load(bias_at, mask=query_exists[None, :], other=0.0)
        s = s * LN_2 + bias_tile.to(tl.float32)
        p = tl.exp2((s - row_max[None, :]) * LOG2_E - row_sum_log2[None, :])
        visible = (keys[:, None] >= row_start[None, :]) & (keys[:, None] < row_end[None, :])
        visible |= (keys < row_lifted)[:, None]
        p = tl.where(visible, p, 0.0)
        p_low = p.to(q.dtype.element_ty)
        # [BLOCK_M, 32]
        dout_tile = tl.load(
            dout_base + queries[:, None] * stride_dos + columns_32[None, :],
            mask=query_exists[:, None] & (columns_32 < VALUE_HEAD_DIM)[None, :],
            other=0.0,
        )
        dv_sum = tl.dot(p_low, dout_tile, dv_sum, input_precision="ieee")
        dp = tl.dot(v_tile, dout_tile.T, input_precision="ieee")
        # Loaded late: every thread holds those of many queries.
        row_delta = tl.load(workspace_0 + row_base + queries, mask=query_exists, other=0.0)
        ds = p * (dp - row_delta[None, :])
        slope_sum = tl.where(block == 0, 0.0, slope_sum) - tl.sum(ds * distance, 1)
        slope_at = workspace_2 + slope_base + head.to(tl.int64) * slope_stride + keys
        tl.store(slope_at, slope_sum, mask=key_exists)
        ds_low = (ds * steepness).to(q.dtype.element_ty)
        dk_sum = tl.dot(ds_low, q_tile, dk_sum, input_precision="ieee")

    dk_sum = tl.where(key_exists[:, None], dk_sum, 0.0)
    dk_tile = (dk_sum * scale).to(dk.dtype.element_ty)
    tl.store(
        dk_base + keys[:, None] * stride_dks + columns_64[None, :],
        dk_tile,
        mask=(keys < all_keys)[:, None] & (columns_64 < HEAD_DIM)[None, :],
    )
    dv_sum = tl.where(key_exists[:, None], dv_sum, 0.0)
    dv_tile = dv_sum.to(dv.dtype.element_ty)
    tl.store(
        dv_base + keys[:, None] * stride_dvs + columns_32[None, :],
        dv_tile,
        mask=(keys < all_keys)[:, None] & (columns_32 < VALUE_HEAD_DIM)[None, :],
    )


@triton.jit
def gradient_of_queries(
    q,
    k,
    v,
    dout,
    workspace_0,
    workspace_1,
    workspace_2,
    dq,
    dbias,
    dslopes,
    slopes,
    bias,
    prefix,
    seqlens_kv,
    scale,
    softcap,
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
    stride_slopes_b,
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
    all_heads = tl.num_programs(0) // tiles
    tile = tl.program_id(0) // all_heads
    batch_head = tl.program_id(0) % all_heads
    slope_stride = seqlen_kv
    sequence = batch_head // heads
    head = batch_head % heads
    all_keys = seqlen_kv
    kv_head = head // group_size
    first_query = tile * BLOCK_M
    queries = first_query + tl.arange(0, BLOCK_M)
    query_exists = queries < seqlen_q
    key_offsets = tl.arange(0, BLOCK_N)
    columns_32 = tl.arange(0, 32)
    columns_64 = tl.arange(0, 64)

    q_base = q + sequence * stride_qb + head * stride_qh
    dout_base = dout + sequence * stride_dob + head * stride_doh
    dq_base = dq + sequence * stride_dqb + head * stride_dqh
    row_base = (sequence * heads + head).to(tl.int64) * seqlen_q
    k_base = k + sequence * stride_kb + kv_head * stride_kh
    v_base = v + sequence * stride_vb + kv_head * stride_vh
    # A length beyond the tensors counts as their end.
    seqlen_kv = tl.minimum(tl.load(seqlens_kv + sequence), seqlen_kv)
    prefix_end = tl.minimum(tl.load(prefix + sequence), seqlen_kv)
    # [BLOCK_M, 64]
    q_tile = tl.load(
        q_base + queries[:, None] * stride_qs + columns_64[None, :],
        mask=query_exists[:, None] & (columns_64 < HEAD_DIM)[None, :],
        other=0.0,
    )
    # [BLOCK_M, 32]
    dout_tile = tl.load(
        dout_base + queries[:, None] * stride_dos + columns_32[None, :],
        mask=query_exists[:, None] & (columns_32 < VALUE_HEAD_DIM)[None, :],
        other=0.0,
    )
    row_max = tl.load(workspace_1 + (row_base + queries) * 2, mask=query_exists, other=0.0)
    row_sum_log2 = tl.load(workspace_1 + (row_base + queries) * 2 + 1, mask=query_exists, other=float("inf"))
    row_delta = tl.load(workspace_0 + row_base + queries, mask=query_exists, other=0.0)
    dq_sum = tl.zeros([BLOCK_M, 64], tl.float32)
    diagonal = seqlen_kv - seqlen_q
    positions = queries + diagonal
    first_position = first_query + diagonal
    last_position = tl.minimum(first_query + BLOCK_M, seqlen_q) - 1 + diagonal
    row_end = key_stop(positions, seqlen_kv)
    row_lifted = prefix_end
    row_start = key_start(positions)
    n_min, n_max, n_lifted, n_full_min, n_full_max = key_bounds(first_position, last_position, seqlen_kv, prefix_end)
    bias_queries = tl.minimum(queries, seqlen_q - 1)
    # tanh(x) is 1 - 2 / (1 + exp(2x)).
    cap_log2 = softcap * LOG2_E
    score_factor = scale / softcap
    slope_log2 = tl.load(slopes + sequence * stride_slopes_b + head) * LOG2_E
    position_numbers = positions.to(tl.float32)
    key_numbers = key_offsets.to(tl.float32)
    # Offsets of a bias over all pairs exceed 2^31. Offsets within a tile do not.
    bias_base = bias + sequence.to(tl.int64) * stride_bias_b + head * stride_bias_h + first_query * stride_bias_s
    bias_rows = ((bias_queries - first_query) * stride_bias_s).to(tl.int32)
    dbias_base = dbias + (row_base + first_query) * all_keys
    dbias_rows = tl.arange(0, BLOCK_M) * all_keys

    for start in tl.range(n_full_min, n_full_max, BLOCK_N):
        keys = start + key_offsets
        # [BLOCK_N, 64]
        k_tile = tl.load(
            k_base + keys[:, None] * stride_ks + columns_64[None, :],
            mask=(columns_64 < HEAD_DIM)[None, :],
            other=0.0,
        )
        s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        # [BLOCK_M, BLOCK_N]
        bias_at = bias_base + (bias_rows[:, None] + keys[None, :])
        s = cap_scores(s, score_factor, cap_log2)
        # How steep the cap is there: the derivative of cap * tanh(x / cap).
        tangent = s * (1.0 / cap_log2)
        steepness = 1.0 - tangent * tangent
        distance = tl.abs((position_numbers - start)[:, None] - key_numbers[None, :])
        s -= slope_log2 * distance
        bias_tile = tl.load(bias_at)
        s = s * LN_2 + bias_tile.to(tl.float32)
        p = tl.exp2((s - row_max[:, None]) * LOG2_E - row_sum_log2[:, None])
        # [BLOCK_N, 32]
        v_tile = tl.load(
            v_base + keys[:, None] * stride_vs + columns_32[None, :],
            mask=(columns_32 < VALUE_HEAD_DIM)[None, :],
            other=0.0,
        )
        dp = tl.dot(dout_tile, v_tile.T, input_precision="ieee")
        ds = p * (dp - row_delta[:, None])
        dbias_at = dbias_base + (dbias_rows[:, None] + keys[None, :])
        tl.store(dbias_at, ds.to(q.dtype.element_ty), mask=query_exists[:, None])
        ds_low = (ds * steepness).to(q.dtype.element_ty)
        dq_sum = tl.dot(ds_low, k_tile, dq_sum, input_precision="ieee")

    lifted_blocks = n_lifted // BLOCK_N
    # Blocks that some queries see in part: on both sides of the others, and at the sequence's start.
    n_right_min = tl.maximum(n_full_min, n_full_max)
    left_keys = tl.minimum(n_full_min, n_max) - n_min
    left_blocks = lifted_blocks + tl.cdiv(tl.maximum(left_keys, 0), BLOCK_N)
    right_blocks = left_blocks + tl.cdiv(tl.maximum(n_max - n_right_min, 0), BLOCK_N)
    for index in tl.range(0, right_blocks):
        start = index * BLOCK_N
        start = tl.where(index < lifted_blocks, start, n_min + (index - lifted_blocks) * BLOCK_N)
        start = tl.where(index < left_blocks, start, n_right_min + (index - left_blocks) * BLOCK_N)
        keys = start + key_offsets
        # [BLOCK_N, 64]
        k_tile = tl.load(
            k_base + keys[:, None] * stride_ks + columns_64[None, :],
            mask=(keys < seqlen_kv)[:, None] & (columns_64 < HEAD_DIM)[None, :],
            other=0.0,
        )
        s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        # [BLOCK_M, BLOCK_N]
        bias_at = bias_base + (bias_rows[:, None] + keys[None, :])
        s = cap_scores(s, score_factor, cap_log2)
        # How steep the cap is there: the derivative of cap * tanh(x / cap).
        tangent = s * (1.0 / cap_log2)
        steepness = 1.0 - tangent * tangent
        distance = tl.abs((position_numbers - start)[:, None] - key_numbers[None, :])
        s -= slope_log2 * distance
        bias_tile = tl.load(bias_at, mask=(keys < seqlen_kv)[None, :], other=0.0)
        s = s * LN_2 + bias_tile.to(tl.float32)
        p = tl.exp2((s - row_max[:, None]) * LOG2_E - row_sum_log2[:, None])
        visible = (keys[None, :] >= row_start[:, None]) & (keys[None, :] < row_end[:, None])
        visible |= (keys < row_lifted)[None, :]
        p = tl.where(visible, p, 0.0)
        # [BLOCK_N, 32]
        v_tile = tl.load(
            v_base + keys[:, None] * stride_vs + columns_32[None, :],
            mask=(keys < seqlen_kv)[:, None] & (columns_32 < VALUE_HEAD_DIM)[None, :],
            other=0.0,
        )
        dp = tl.dot(dout_tile, v_tile.T, input_precision="ieee")
        ds = p * (dp - row_delta[:, None])
        dbias_at = dbias_base + (dbias_rows[:, None] + keys[None, :])
        tl.store(dbias_at, ds.to(q.dtype.element_ty), mask=query_exists[:, None] & (keys < all_keys)[None, :])
        ds_low = (ds * steepness).to(q.dtype.element_ty)
        dq_sum = tl.dot(ds_low, k_tile, dq_sum, input_precision="ieee")
    # Blocks of keys that no query of the tile sees add nothing.
    for start in tl.range(n_lifted, tl.minimum(n_min, all_keys), BLOCK_N):
        keys = start + key_offsets
        dbias_at = dbias_base + (dbias_rows[:, None] + keys[None, :])
        nothing = tl.zeros([BLOCK_M, BLOCK_N], dbias.dtype.element_ty)
        tl.store(dbias_at, nothing, mask=query_exists[:, None] & (keys < tl.minimum(n_min, all_keys))[None, :])
    n_end = n_min + tl.cdiv(tl.maximum(n_max - n_min, 0), BLOCK_N) * BLOCK_N
    for start in tl.range(n_end, all_keys, BLOCK_N):
        keys = start + key_offsets
        dbias_at = dbias_base + (dbias_rows[:, None] + keys[None, :])
        nothing = tl.zeros([BLOCK_M, BLOCK_N], dbias.dtype.element_ty)
        tl.store(dbias_at, nothing, mask=query_exists[:, None] & (keys < all_keys)[None, :])
    if tile == 0:
        # The gradient of the head's slope is the sum over the keys of the sequence.
        slope_at = workspace_2 + (sequence * heads + head).to(tl.int64) * slope_stride
        slope_sums = tl.zeros([BLOCK_N], tl.float32)
        for start in tl.range(0, seqlen_kv, BLOCK_N):
            slope_sums += tl.load(slope_at + start + key_offsets, mask=start + key_offsets < seqlen_kv, other=0.0)
        tl.store(dslopes + sequence * heads + head, tl.sum(slope_sums))
    dq_tile = (dq_sum * scale).to(dq.dtype.element_ty)
    tl.store(
        dq_base + queries[:, None] * stride_dqs + columns_64[None, :],
        dq_tile,
        mask=query_exists[:, None] & (columns_64 < HEAD_DIM)[None, :],
    )


def prologue_plan(q, k, v, out, dout, dq, dk, dv, slopes, bias, prefix, seqlens_kv):
    """Grid of `delta`, and its integers."""
    batch, heads, seqlen_q, _ = q.shape
    strides = [tensor.stride(axis) for tensor in (out, dout) for axis in (0, 1, 2)]
    scores = [tensor.stride(axis) for tensor in (q, k) for axis in (0, 1, 2)]
    scores += [slopes.stride(0), bias.stride(0), bias.stride(1), bias.stride(2), heads // k.shape[1], k.shape[2]]
    return (triton.cdiv(seqlen_q, 128) * heads * batch,), (*strides, heads, seqlen_q, *scores)


def launch_plan(q, k, v, out, dout, dq, dk, dv, slopes, bias, prefix, seqlens_kv):
    """Grid of the kernel, shapes of float32 workspaces, and its integers."""
    batch, heads, seqlen_q, _ = q.shape
    kv_heads, seqlen_kv = k.shape[1], k.shape[2]
    grid = (triton.cdiv(seqlen_kv, 32) * kv_heads * batch,)
    strides = [tensor.stride(axis) for tensor in (q, k, v, dout, dk, dv) for axis in (0, 1, 2)]
    strides += [
        slopes.stride(0),
        bias.stride(0),
        bias.stride(1),
        bias.stride(2),
    ]
    rows = (batch, heads, seqlen_q)
    workspaces = (rows, (*rows, 2), (batch, heads, seqlen_kv))
    return grid, workspaces, (*strides, heads, heads // kv_heads, seqlen_q, seqlen_kv)


def epilogue_plan(q, k, v, out, dout, dq, dk, dv, slopes, bias, prefix, seqlens_kv):
    """Grid of `gradient_of_queries`, and its integers."""
    batch, heads, seqlen_q, _ = q.shape
    kv_heads, seqlen_kv = k.shape[1], k.shape[2]
    grid = (triton.cdiv(seqlen_q, 32) * heads * batch,)
    strides = [tensor.stride(axis) for tensor in (q, k, v, dout, dq) for axis in (0, 1, 2)]
    strides += [
        slopes.stride(0),
        bias.stride(0),
        bias.stride(1),
        bias.stride(2),
    ]
    return grid, (*strides, heads, heads // kv_heads, seqlen_q, seqlen_kv)


def attention_backward(q, k, v, out, lse, dout, scale=None, *, dlse, slopes, bias, prefix, seqlens_kv, softcap):
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
    dtype = torch.float32
    if triton.knobs.runtime.interpret:
        # The interpreter computes all products in float32, but it does not know all names of precisions.
        options = triton.runtime.interpreter.interpreter_builder.options
        precisions = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")
        object.__setattr__(options, "allowed_dot_input_precisions", precisions)
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
        ("q", q, dtype, (*rows, 40)),
        ("k", k, dtype, (*keys, 40)),
        ("v", v, dtype, (*keys, 24)),
        ("out", out, dtype, (*rows, 24)),
        ("dout", dout, dtype, (*rows, 24)),
        ("lse", lse, torch.float32, rows),
        ("dlse", dlse, torch.float32, rows),
        ("slopes", slopes, torch.float32, (batch, heads)),
        ("bias", bias, dtype, (*rows, *k.shape[2:3])),
        ("prefix", prefix, torch.int32, (batch,)),
        ("seqlens_kv", seqlens_kv, torch.int32, (batch,)),
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
    for name, tensor in [("lse", lse), ("dlse", dlse)]:
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}, expected a contiguous tensor")
    for name, tensor in large:
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
    dbias = torch.zeros(bias.shape, dtype=q.dtype, device=q.device)
    dslopes = torch.zeros(slopes.shape, dtype=torch.float32, device=q.device)
    if q.numel() == 0 or k.numel() == 0:
        return dq, dk, dv, dbias, dslopes
    planned = (q, k, v, out, dout, dq, dk, dv, slopes, bias, prefix, seqlens_kv)
    grid, shapes, integers = launch_plan(*planned)
    workspaces = [torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes]
    first_grid, first_integers = prologue_plan(*planned)
    last_grid, last_integers = epilogue_plan(*planned)
    # Only the prologue reads the seed.
    inputs = [slopes, bias, prefix, seqlens_kv, scale, softcap]
    delta[first_grid](
        *(out, dout, lse, dlse, *workspaces[:2]),
        *(q, k, slopes, bias, prefix, seqlens_kv, scale, softcap),
        *first_integers,
        num_warps=4,
        num_stages=1,
    )
    backward_split[grid](
        *(q, k, v, dout, *workspaces, dk, dv),
        *inputs,
        *integers,
        num_warps=4,
        num_stages=1,
    )
    gradient_of_queries[last_grid](
        *(q, k, v, dout, *workspaces, dq, dbias, dslopes),
        *inputs,
        *last_integers,
        num_warps=4,
        num_stages=1,
    )
    return -dq if negative else dq, dk, dv, dbias, dslopes
