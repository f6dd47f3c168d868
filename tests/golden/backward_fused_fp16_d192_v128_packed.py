"""Attention backward in one pass: a program keeps a block of keys and walks queries, for dk and dv, and adds its
share of dq to sums in float32 that all blocks of keys share. Their order decides the last bits of dq: runs may differ.

Computes     fp16, head dim 192, value head dim 128, causal: bottom_right
With         alibi, packed
Config       block_m 32, block_n 64, 8 warps, 2 stages, reduction copy_engine, split_masked_loop True,
             transpose_dq False, split_head_dim True, heads_innermost False, maxnreg 0, input_precision ieee
Assumes      strides that are multiples of 16, 32-bit offsets
Template     backward_fused b50fe3cff63f

  delta:            for each row: delta = rowsum(dout * out) - dlse; lse in units of log2; sums of dq = 0
  backward_fused:   for each block of keys, in parallel:
                      dk, dv = 0
                      for each query head of the group, for each block of queries that sees the keys:
                        P = exp2(scale q k^T - lse), masked; dv += P^T dout
                        dS = P * (dout v^T - delta); dk += dS^T q
                        add dS k to the sums of dq, atomically
                      store scale dk, dv
  convert_sums:     for each block of queries: dq = scale sums, in the type of q

Tunables
  block_m, block_n                  queries and keys of a tile
  num_warps, num_stages             warps and pipeline stages
  reduction                         whether the copy engine (TMA) or atomics of threads add to the sums of dq
  split_masked_loop                 blocks that no mask cuts have a loop of their own
  transpose_dq                      dq tiles are computed transposed
  split_head_dim                    a head dim that is no power of two is two tiles instead of a padded one
  heads_innermost                   neighbouring programs have different heads
  maxnreg                           limit of registers per thread, 0 for none
Notation
  stride_qb, stride_qh, stride_qs   elements between batches, heads and positions of q; k, v, out (o), dout (do)
                                    and the gradients dq, dk, dv alike
  workspace_0, workspace_1          delta and row_lse, float32 [batch, heads, seqlen_q]
  workspace_2                       sums of dq, float32 [batch, heads, blocks, BLOCK_M, HEAD_DIM]: each sequence begins
                                    with a block of its own, so that no block reaches into another's rows
  workspace_3                       with dropout: two random words of each row, in float32 [batch, heads, seqlen_q, 2]
  position                          position of a query among the keys of its sequence
  *_tile                            a block on the chip, its shape in a comment
  d*                                the gradient of *
  *_log2, row_lse                   a quantity in units of log2, for exp2
References: Dao, 2023 (FlashAttention-2); Shah et al., 2024 (FlashAttention-3).
"""

import torch
import triton
import triton.language as tl

BLOCK_M = tl.constexpr(32)
BLOCK_N = tl.constexpr(64)
DELTA_ROWS = tl.constexpr(64)
SUM_PIECE = tl.constexpr(2048)
SUM_ROWS = tl.constexpr(32)
HEAD_DIM = tl.constexpr(192)
VALUE_HEAD_DIM = tl.constexpr(128)
LOG2_E = tl.constexpr(1.4426950408889634)
SEARCHED = tl.constexpr(256)
# Triton's interpreter has no reductions by the copy engine: there atomics do the same.
COPY_ENGINE = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def count_sequences(tile, cu_seqlens, sequences, BLOCK: tl.constexpr):
    """Returns how many sequences begin by a tile. Sequence b's tiles begin at its first row // BLOCK + b."""
    # Of many sequences, first some at equal steps, then those from the last of them that begins by the tile.
    step = (sequences + SEARCHED - 1) // SEARCHED
    others = step * tl.arange(0, SEARCHED)
    begins = tl.load(cu_seqlens + others, mask=others < sequences, other=0) // BLOCK + others
    begun = tl.sum(((begins <= tile) & (others < sequences)).to(tl.int32), 0)
    if step > 1:
        first = tl.maximum(begun - 1, 0) * step
        end = tl.minimum(first + step, sequences)
        begun = first
        for start in tl.range(first, end, SEARCHED):
            others = start + tl.arange(0, SEARCHED)
            begins = tl.load(cu_seqlens + others, mask=others < end, other=0) // BLOCK + others
            begun += tl.sum(((begins <= tile) & (others < end)).to(tl.int32), 0)
    return begun


@triton.jit
def key_stop(position, seqlen_kv):
    """Returns the key after the last one that a query sees, by causality, the right window and the chunk."""
    stop = tl.minimum(position + 1, seqlen_kv)
    return stop


@triton.jit
def query_start(key, diagonal):
    """Returns the first query that sees a key: by causality, or by the right window and the chunk."""
    query = key
    return tl.maximum(query - diagonal, 0)


@triton.jit
def delta(
    out,
    dout,
    lse,
    workspace_0,
    workspace_1,
    workspace_2,
    dslopes,
    stride_ob,
    stride_oh,
    stride_os,
    stride_dob,
    stride_doh,
    stride_dos,
    heads,
    seqlen_q,
    sum_pieces,
    slope_count,
):
    # What others add up begins at zero.
    piece_numbers = tl.arange(0, SUM_PIECE)
    for piece in tl.range(tl.program_id(0), sum_pieces, tl.num_programs(0)):
        nothing = tl.zeros([SUM_PIECE], tl.float32)
        tl.store(workspace_2 + tl.cast(piece, tl.int64) * SUM_PIECE + piece_numbers, nothing)
    # No other program writes the slopes' gradients of a sequence without queries.
    if tl.program_id(0) == 0:
        for start in tl.range(0, slope_count, DELTA_ROWS):
            numbers = start + tl.arange(0, DELTA_ROWS)
            tl.store(dslopes + numbers, tl.zeros([DELTA_ROWS], tl.float32), mask=numbers < slope_count)
    # Of each row delta = rowsum(dout * out) [- dlse], which the softmax's gradient takes off those of the probabilities,
    # and its log-sum-exp in units of log2: infinite where it sees nothing, so that its probabilities are zero.
    tiles = tl.cdiv(seqlen_q, DELTA_ROWS)
    tile = tl.program_id(0) % tiles
    batch_head = tl.program_id(0) // tiles
    batch = batch_head // heads
    head = batch_head % heads
    queries = tile * DELTA_ROWS + tl.arange(0, DELTA_ROWS)
    query_exists = queries < seqlen_q
    columns_128 = tl.arange(0, 128)
    out_base = out + batch * stride_ob + head * stride_oh
    dout_base = dout + batch * stride_dob + head * stride_doh
    # [DELTA_ROWS, 128]
    out_tile = tl.load(
        out_base + queries[:, None] * stride_os + columns_128[None, :],
        mask=query_exists[:, None],
        other=0.0,
    )
    dout_tile = tl.load(
        dout_base + queries[:, None] * stride_dos + columns_128[None, :],
        mask=query_exists[:, None],
        other=0.0,
    )
    row_delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    rows = batch_head.to(tl.int64) * seqlen_q + queries
    tl.store(workspace_0 + rows, row_delta, mask=query_exists)
    row_lse = tl.load(lse + rows, mask=query_exists, other=0.0) * LOG2_E
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
    tl.store(workspace_1 + rows, row_lse, mask=query_exists)


@triton.jit
def backward_fused(
    q,
    k,
    v,
    dout,
    workspace_0,
    workspace_1,
    workspace_2,
    dk,
    dv,
    dslopes,
    slopes,
    cu_seqlens_q,
    cu_seqlens_kv,
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
    stride_slopes_b,
    heads,
    group_size,
    seqlen_q,
    seqlen_kv,
    sequences,
):
    # Which block of keys, of which KV head of which sequence.
    tiles = seqlen_kv // BLOCK_N + sequences
    tile = tl.program_id(0) % tiles
    kv_head = tl.program_id(0) // tiles
    if COPY_ENGINE:
        rows_of_sums = heads * (seqlen_q // BLOCK_M + sequences) * BLOCK_M
        dq_sums_0 = tl.make_tensor_descriptor(workspace_2, [rows_of_sums, HEAD_DIM], [HEAD_DIM, 1], [BLOCK_M, 128])
        dq_sums_1 = tl.make_tensor_descriptor(workspace_2, [rows_of_sums, HEAD_DIM], [HEAD_DIM, 1], [BLOCK_M, 64])
    begun = count_sequences(tile, cu_seqlens_kv, sequences, BLOCK_N)
    if begun == 0:
        return
    sequence = begun - 1
    key_row = tl.load(cu_seqlens_kv + sequence)
    all_keys = tl.load(cu_seqlens_kv + sequence + 1) - key_row
    tile -= key_row // BLOCK_N + sequence
    if tile * BLOCK_N >= all_keys:
        return
    all_queries = seqlen_q
    first_row = tl.load(cu_seqlens_q + sequence)
    seqlen_q = tl.load(cu_seqlens_q + sequence + 1) - first_row
    key_begin = tile * BLOCK_N
    keys = key_begin + tl.arange(0, BLOCK_N)
    query_offsets = tl.arange(0, BLOCK_M)
    columns_64 = tl.arange(0, 64)
    columns_128 = tl.arange(0, 128)

    first_key = tl.load(cu_seqlens_kv + sequence)
    seqlen_kv = tl.load(cu_seqlens_kv + sequence + 1) - first_key
    k_base = k + first_key.to(tl.int64) * stride_ks + kv_head * stride_kh
    v_base = v + first_key.to(tl.int64) * stride_vs + kv_head * stride_vh
    dk_base = dk + key_row.to(tl.int64) * stride_dks + kv_head * stride_dkh
    dv_base = dv + key_row.to(tl.int64) * stride_dvs + kv_head * stride_dvh
    key_exists = keys < seqlen_kv
    # [BLOCK_N, 128]
    k_tile_0 = tl.load(
        k_base + keys[:, None] * stride_ks + columns_128[None, :],
        mask=key_exists[:, None],
        other=0.0,
    )
    dk_sum_0 = tl.zeros([BLOCK_N, 128], tl.float32)
    # [BLOCK_N, 64]
    k_tile_1 = tl.load(
        k_base + keys[:, None] * stride_ks + (columns_64 + 128)[None, :],
        mask=key_exists[:, None],
        other=0.0,
    )
    dk_sum_1 = tl.zeros([BLOCK_N, 64], tl.float32)
    # [BLOCK_N, 128]
    v_tile = tl.load(
        v_base + keys[:, None] * stride_vs + columns_128[None, :],
        mask=key_exists[:, None],
        other=0.0,
    )
    dv_sum = tl.zeros([BLOCK_N, 128], tl.float32)
    diagonal = seqlen_kv - seqlen_q
    scale_log2 = scale * LOG2_E
    key_numbers = keys.to(tl.float32)
    last_key = tl.minimum(key_begin + BLOCK_N, seqlen_kv) - 1
    m_min = query_start(key_begin, diagonal)
    m_full_min = query_start(last_key, diagonal)
    m_max = seqlen_q
    m_full_max = seqlen_q
    m_min = m_min // BLOCK_M * BLOCK_M
    m_full_min = tl.cdiv(m_full_min, BLOCK_M) * BLOCK_M
    m_full_max = tl.maximum(m_full_max, 0) // BLOCK_M * BLOCK_M
    # The last block of keys is masked throughout: nothing of what is not there may get into dq.
    m_full_max = tl.where(key_begin + BLOCK_N <= seqlen_kv, m_full_max, 0)
    # Blocks of all heads of the group in one loop: sums that cross two loops cost registers.
    full_blocks = tl.maximum(m_full_max - m_full_min, 0) // BLOCK_M
    for index in tl.range(0, group_size * full_blocks):
        # Before the loop is entered the first division may be made, whatever its divisor is.
        member = index // tl.maximum(full_blocks, 1)
        block = index - member * full_blocks
        start = m_full_min + block * BLOCK_M
        head = kv_head * group_size + member
        q_base = q + first_row.to(tl.int64) * stride_qs + head * stride_qh
        dout_base = dout + first_row.to(tl.int64) * stride_dos + head * stride_doh
        row_base = head.to(tl.int64) * all_queries + first_row
        slope_log2 = tl.load(slopes + sequence * stride_slopes_b + head) * LOG2_E
        queries = start + query_offsets
        positions = queries + diagonal
        # [BLOCK_M, 128]
        q_tile_0 = tl.load(
            q_base + queries[:, None] * stride_qs + columns_128[None, :],
        )
        # [BLOCK_M, 64]
        q_tile_1 = tl.load(
            q_base + queries[:, None] * stride_qs + (columns_64 + 128)[None, :],
        )
        row_lse = tl.load(workspace_1 + row_base + queries)
        position_numbers = positions.to(tl.float32)
        # Scores and all that is made of them are [BLOCK_N, BLOCK_M].
        s = tl.dot(k_tile_0, q_tile_0.T)
        s = tl.dot(k_tile_1, q_tile_1.T, s)
        s *= scale_log2
        distance = position_numbers[None, :] - key_numbers[:, None]
        s -= slope_log2 * distance
        p = tl.exp2(s - row_lse[None, :])
        p_low = p.to(q.dtype.element_ty)
        # [BLOCK_M, 128]
        dout_tile = tl.load(
            dout_base + queries[:, None] * stride_dos + columns_128[None, :],
        )
        dv_sum = tl.dot(p_low, dout_tile, dv_sum)
        dp = tl.dot(v_tile, dout_tile.T)
        # Loaded late: every thread holds those of many queries.
        row_delta = tl.load(workspace_0 + row_base + queries)
        ds = p * (dp - row_delta[None, :])
        tl.atomic_add(dslopes + sequence * heads + head, -tl.sum(ds * distance), sem="relaxed")
        ds_low = ds.to(q.dtype.element_ty)
        dk_sum_0 = tl.dot(ds_low, q_tile_0, dk_sum_0)
        dk_sum_1 = tl.dot(ds_low, q_tile_1, dk_sum_1)
        sum_block = head * (all_queries // BLOCK_M + sequences) + first_row // BLOCK_M + sequence + start // BLOCK_M
        # [BLOCK_M, 128]
        dq_tile = tl.dot(ds_low.T, k_tile_0)
        if COPY_ENGINE:
            dq_sums_0.atomic_add([sum_block * BLOCK_M, 0], dq_tile)
        else:
            sums_base = workspace_2 + sum_block.to(tl.int64) * (BLOCK_M * HEAD_DIM)
            sums_at = sums_base + query_offsets[:, None] * HEAD_DIM + columns_128[None, :]
            tl.atomic_add(sums_at, dq_tile, sem="relaxed")
        # [BLOCK_M, 64]
        dq_tile = tl.dot(ds_low.T, k_tile_1)
        if COPY_ENGINE:
            dq_sums_1.atomic_add([sum_block * BLOCK_M, 128], dq_tile)
        else:
            sums_base = workspace_2 + sum_block.to(tl.int64) * (BLOCK_M * HEAD_DIM)
            sums_at = sums_base + query_offsets[:, None] * HEAD_DIM + (columns_64 + 128)[None, :]
            tl.atomic_add(sums_at, dq_tile, sem="relaxed")
    # Blocks that some queries see in part, or where some are missing: on both sides of the others.
    m_right_min = tl.maximum(m_full_min, m_full_max)
    left_blocks = tl.cdiv(tl.maximum(tl.minimum(m_full_min, m_max) - m_min, 0), BLOCK_M)
    partial_blocks = left_blocks + tl.cdiv(tl.maximum(m_max - m_right_min, 0), BLOCK_M)
    for index in tl.range(0, group_size * partial_blocks):
        # Before the loop is entered the first division may be made, whatever its divisor is.
        member = index // tl.maximum(partial_blocks, 1)
        block = index - member * partial_blocks
        start = m_min + block * BLOCK_M
        start = tl.where(block < left_blocks, start, m_right_min + (block - left_blocks) * BLOCK_M)
        head = kv_head * group_size + member
        q_base = q + first_row.to(tl.int64) * stride_qs + head * stride_qh
        dout_base = dout + first_row.to(tl.int64) * stride_dos + head * stride_doh
        row_base = head.to(tl.int64) * all_queries + first_row
        slope_log2 = tl.load(slopes + sequence * stride_slopes_b + head) * LOG2_E
        queries = start + query_offsets
        query_exists = queries < seqlen_q
        positions = queries + diagonal
        row_end = key_stop(positions, seqlen_kv)
        # [BLOCK_M, 128]
        q_tile_0 = tl.load(
            q_base + queries[:, None] * stride_qs + columns_128[None, :],
            mask=query_exists[:, None],
            other=0.0,
        )
        # [BLOCK_M, 64]
        q_tile_1 = tl.load(
            q_base + queries[:, None] * stride_qs + (columns_64 + 128)[None, :],
            mask=query_exists[:, None],
            other=0.0,
        )
        row_lse = tl.load(workspace_1 + row_base + queries, mask=query_exists, other=float("inf"))
        position_numbers = positions.to(tl.float32)
        # Scores and all that is made of them are [BLOCK_N, BLOCK_M].
        s = tl.dot(k_tile_0, q_tile_0.T)
        s = tl.dot(k_tile_1, q_tile_1.T, s)
        s *= scale_log2
        distance = position_numbers[None, :] - key_numbers[:, None]
        s -= slope_log2 * distance
        p = tl.exp2(s - row_lse[None, :])
        visible = keys[:, None] < row_end[None, :]
        p = tl.where(visible, p, 0.0)
        p_low = p.to(q.dtype.element_ty)
        # [BLOCK_M, 128]
        dout_tile = tl.load(
            dout_base + queries[:, None] * stride_dos + columns_128[None, :],
            mask=query_exists[:, None],
            other=0.0,
        )
        dv_sum = tl.dot(p_low, dout_tile, dv_sum)
        dp = tl.dot(v_tile, dout_tile.T)
        # Loaded late: every thread holds those of many queries.
        row_delta = tl.load(workspace_0 + row_base + queries, mask=query_exists, other=0.0)
        ds = p * (dp - row_delta[None, :])
        tl.atomic_add(dslopes + sequence * heads + head, -tl.sum(ds * distance), sem="relaxed")
        ds_low = ds.to(q.dtype.element_ty)
        dk_sum_0 = tl.dot(ds_low, q_tile_0, dk_sum_0)
        dk_sum_1 = tl.dot(ds_low, q_tile_1, dk_sum_1)
        sum_block = head * (all_queries // BLOCK_M + sequences) + first_row // BLOCK_M + sequence + start // BLOCK_M
        # [BLOCK_M, 128]
        dq_tile = tl.dot(ds_low.T, k_tile_0)
        if COPY_ENGINE:
            dq_sums_0.atomic_add([sum_block * BLOCK_M, 0], dq_tile)
        else:
            sums_base = workspace_2 + sum_block.to(tl.int64) * (BLOCK_M * HEAD_DIM)
            sums_at = sums_base + query_offsets[:, None] * HEAD_DIM + columns_128[None, :]
            tl.atomic_add(sums_at, dq_tile, sem="relaxed")
        # [BLOCK_M, 64]
        dq_tile = tl.dot(ds_low.T, k_tile_1)
        if COPY_ENGINE:
            dq_sums_1.atomic_add([sum_block * BLOCK_M, 128], dq_tile)
        else:
            sums_base = workspace_2 + sum_block.to(tl.int64) * (BLOCK_M * HEAD_DIM)
            sums_at = sums_base + query_offsets[:, None] * HEAD_DIM + (columns_64 + 128)[None, :]
            tl.atomic_add(sums_at, dq_tile, sem="relaxed")

    dk_tile_0 = (dk_sum_0 * scale).to(dk.dtype.element_ty)
    tl.store(
        dk_base + keys[:, None] * stride_dks + columns_128[None, :],
        dk_tile_0,
        mask=key_exists[:, None],
    )
    dk_tile_1 = (dk_sum_1 * scale).to(dk.dtype.element_ty)
    tl.store(
        dk_base + keys[:, None] * stride_dks + (columns_64 + 128)[None, :],
        dk_tile_1,
        mask=key_exists[:, None],
    )
    dv_tile = dv_sum.to(dv.dtype.element_ty)
    tl.store(
        dv_base + keys[:, None] * stride_dvs + columns_128[None, :],
        dv_tile,
        mask=key_exists[:, None],
    )


@triton.jit
def convert_sums(
    workspace_2,
    dq,
    cu_seqlens_q,
    scale,
    stride_dqb,
    stride_dqh,
    stride_dqs,
    heads,
    seqlen_q,
    sequences,
):
    # One block of sums becomes as many rows of dq.
    tiles = seqlen_q // BLOCK_M + sequences
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles
    begun = count_sequences(tile, cu_seqlens_q, sequences, BLOCK_M)
    if begun == 0:
        return
    sequence = begun - 1
    first_row = tl.load(cu_seqlens_q + sequence)
    seqlen_q = tl.load(cu_seqlens_q + sequence + 1) - first_row
    tile -= first_row // BLOCK_M + sequence
    if tile * BLOCK_M >= seqlen_q:
        return
    dq_base = dq + first_row.to(tl.int64) * stride_dqs + head * stride_dqh
    sums = workspace_2 + tl.program_id(0).to(tl.int64) * (BLOCK_M * HEAD_DIM)
    columns_256 = tl.arange(0, 256)
    for begin in tl.range(0, BLOCK_M, SUM_ROWS):
        rows = begin + tl.arange(0, SUM_ROWS)
        queries = tile * BLOCK_M + rows
        exists = (queries < seqlen_q)[:, None] & (columns_256 < HEAD_DIM)[None, :]
        # [SUM_ROWS, 256]
        dq_sum = tl.load(sums + rows[:, None] * HEAD_DIM + columns_256[None, :], mask=exists, other=0.0)
        dq_tile = (dq_sum * scale).to(dq.dtype.element_ty)
        tl.store(
            dq_base + queries[:, None] * stride_dqs + columns_256[None, :],
            dq_tile,
            mask=exists,
        )


def prologue_plan(q, k, v, out, dout, dq, dk, dv, slopes, cu_seqlens_q, cu_seqlens_kv):
    """Grid of `delta`, and its integers."""
    batch, heads, seqlen_q, _ = q.shape
    strides = [tensor.stride(axis) for tensor in (out, dout) for axis in (0, 1, 2)]
    # Room for the blocks of each sequence, wherever the sequences begin.
    sequences = cu_seqlens_q.shape[0] - 1
    blocks = (seqlen_q // 32 + sequences) * heads
    pieces = blocks * 3
    grid = (triton.cdiv(seqlen_q, 64) * heads * batch,)
    return grid, (*strides, heads, seqlen_q, pieces, slopes.numel())


def launch_plan(q, k, v, out, dout, dq, dk, dv, slopes, cu_seqlens_q, cu_seqlens_kv):
    """Grid of the kernel, shapes of float32 workspaces, and its integers."""
    batch, heads, seqlen_q, _ = q.shape
    kv_heads, seqlen_kv = k.shape[1], k.shape[2]
    # Room for the blocks of each sequence, wherever the sequences begin.
    sequences = cu_seqlens_q.shape[0] - 1
    blocks = (seqlen_q // 32 + sequences) * heads
    grid = ((seqlen_kv // 64 + sequences) * kv_heads,)
    strides = [tensor.stride(axis) for tensor in (q, k, v, dout, dk, dv) for axis in (0, 1, 2)]
    strides += [
        slopes.stride(0),
    ]
    rows = (batch, heads, seqlen_q)
    return grid, (rows, rows, (blocks, 32, 192)), (*strides, heads, heads // kv_heads, seqlen_q, seqlen_kv, sequences)


def epilogue_plan(q, k, v, out, dout, dq, dk, dv, slopes, cu_seqlens_q, cu_seqlens_kv):
    """Grid of `convert_sums`, and its integers."""
    _, heads, seqlen_q, _ = q.shape
    # Room for the blocks of each sequence, wherever the sequences begin.
    sequences = cu_seqlens_q.shape[0] - 1
    blocks = (seqlen_q // 32 + sequences) * heads
    strides = [dq.stride(axis) for axis in (0, 1, 2)]
    return (blocks,), (*strides, heads, seqlen_q, sequences)


def attention_backward(q, k, v, out, lse, dout, scale=None, *, slopes, cu_seqlens_q, cu_seqlens_kv):
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
        ("cu_seqlens_q", cu_seqlens_q),
    ]:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, expected a tensor")
    dtype = torch.float16
    if triton.knobs.runtime.interpret:
        if q.dtype != torch.float32:
            raise ValueError(f"q has dtype {q.dtype}, expected float32: TRITON_INTERPRET corrupts 16-bit products")
        dtype = torch.float32
    for name, tensor in large:
        if tensor.ndim != 4:
            raise ValueError(f"{name} has {tensor.ndim} dimensions, expected 4")
    heads, seqlen_q = q.shape[1:3]
    kv_heads = k.shape[1]
    batch = max(cu_seqlens_q.numel() - 1, 0)
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"k has {kv_heads} heads, expected a divisor of the {heads} heads of q")
    rows = (1, heads, seqlen_q)
    keys = (1, kv_heads, k.shape[2])
    for name, tensor, expected, shape in (
        ("q", q, dtype, (*rows, 192)),
        ("k", k, dtype, (*keys, 192)),
        ("v", v, dtype, (*keys, 128)),
        ("out", out, dtype, (*rows, 128)),
        ("dout", dout, dtype, (*rows, 128)),
        ("lse", lse, torch.float32, rows),
        ("slopes", slopes, torch.float32, (batch, heads)),
        ("cu_seqlens_q", cu_seqlens_q, torch.int32, (batch + 1,)),
        ("cu_seqlens_kv", cu_seqlens_kv, torch.int32, (batch + 1,)),
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
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    negative = scale < 0
    if negative:
        q, scale = -q, -scale
    scale = max(scale, 1e-30)
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    dslopes = torch.zeros(slopes.shape, dtype=torch.float32, device=q.device)
    if q.numel() == 0 or k.numel() == 0:
        return dq, dk, dv, dslopes
    # Tensor descriptors are made on the device, in scratch memory that Triton asks for.
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=q.device))
    planned = (q, k, v, out, dout, dq, dk, dv, slopes, cu_seqlens_q, cu_seqlens_kv)
    grid, shapes, integers = launch_plan(*planned)
    workspaces = [torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes]
    first_grid, first_integers = prologue_plan(*planned)
    last_grid, last_integers = epilogue_plan(*planned)
    # Only the prologue reads the seed.
    inputs = [slopes, cu_seqlens_q, cu_seqlens_kv, scale]
    delta[first_grid](
        *(out, dout, lse, *workspaces),
        dslopes,
        *first_integers,
        num_warps=4,
        num_stages=1,
    )
    backward_fused[grid](
        *(q, k, v, dout, *workspaces, dk, dv, dslopes),
        *inputs,
        *integers,
        num_warps=8,
        num_stages=2,
    )
    convert_sums[last_grid](
        *(workspaces[2], dq, cu_seqlens_q),
        scale,
        *last_integers,
        num_warps=4,
        num_stages=1,
    )
    return -dq if negative else dq, dk, dv, dslopes
