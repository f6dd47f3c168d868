# A stand-alone kernel by flashtune; it needs torch and triton alone.
# `attention_backward` runs it. Selected on nvidia-h100.

"""Attention backward in one pass: a program keeps a block of keys and walks queries, for dk and dv, and adds its
share of dq to sums in float32 that all blocks of keys share. Their order decides the last bits of dq: runs may differ.

Computes     bf16, head dim 128, value head dim 128, causal: bottom_right
With         no features
Config       block_m 64, block_n 128, 8 warps, 2 stages, reduction copy_engine, split_masked_loop True,
             transpose_dq False, split_head_dim False, heads_innermost False, maxnreg 0, input_precision ieee
Assumes      strides that are multiples of 16, 32-bit offsets
Template     backward_fused 0febfeb1d787

  delta:            for each row: delta = rowsum(dout * out); lse in units of log2; sums of dq = 0
  backward_fused:   for each block of keys, in parallel:
                      dk, dv = 0
                      for each query head of the group, for each block of queries that sees the keys:
                        P = exp2(scale q k^T - lse), masked; dv += P^T dout
                        dS = P * (dout v^T - delta); dk += dS^T q
                        the copy engine (TMA) adds dS k to the sums of dq
                      store scale dk, dv
  convert_sums:     for each block of queries: dq = scale sums, in the type of q

Tunables
  BLOCK_M, BLOCK_N                  queries and keys of a tile
  num_warps, num_stages             warps and pipeline stages
  split_masked_loop                 blocks that no mask cuts have a loop of their own
Notation
  stride_qb, stride_qh, stride_qs   elements between batches, heads and positions of q; k, v, out (o), dout (do)
                                    and the gradients dq, dk, dv alike
  workspace_0, workspace_1          delta and row_lse, float32 [batch, heads, seqlen_q]
  workspace_2                       sums of dq, float32 [batch, heads, blocks, BLOCK_M, HEAD_DIM]: each sequence begins
                                    with a block of its own, so that no block reaches into another's rows
  position                          position of a query among the keys of its sequence
  *_tile*                           a block on the chip, its shape in a comment
  d*                                the gradient of *
  *_log2, row_lse                   a quantity in units of log2, for exp2
References: Dao, 2023 (FlashAttention-2); Shah et al., 2024 (FlashAttention-3).
"""

import torch
import triton
import triton.language as tl

BLOCK_M = tl.constexpr(64)
BLOCK_N = tl.constexpr(128)
DELTA_ROWS = tl.constexpr(64)
SUM_PIECE = tl.constexpr(4096)
SUM_ROWS = tl.constexpr(64)
HEAD_DIM = tl.constexpr(128)
VALUE_HEAD_DIM = tl.constexpr(128)
LOG2_E = tl.constexpr(1.4426950408889634)
# Triton's interpreter has no reductions by the copy engine: there atomics do the same.
COPY_ENGINE = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def key_stop(position, seqlen_kv):
    """Returns the key after the last one that a query sees."""
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
    stride_ob,
    stride_oh,
    stride_os,
    stride_dob,
    stride_doh,
    stride_dos,
    heads,
    seqlen_q,
    sum_pieces,
):
    # Sums that other programs add to start at zero.
    piece_numbers = tl.arange(0, SUM_PIECE)
    for piece in tl.range(tl.program_id(0), sum_pieces, tl.num_programs(0)):
        nothing = tl.zeros([SUM_PIECE], tl.float32)
        tl.store(workspace_2 + tl.cast(piece, tl.int64) * SUM_PIECE + piece_numbers, nothing)
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
    if COPY_ENGINE:
        rows_of_sums = tl.num_programs(0) // tiles * group_size * tl.cdiv(seqlen_q, BLOCK_M) * BLOCK_M
        dq_sums = tl.make_tensor_descriptor(workspace_2, [rows_of_sums, HEAD_DIM], [HEAD_DIM, 1], [BLOCK_M, 128])
    sequence = batch_head // kv_heads
    kv_head = batch_head % kv_heads
    key_begin = tile * BLOCK_N
    keys = key_begin + tl.arange(0, BLOCK_N)
    query_offsets = tl.arange(0, BLOCK_M)
    columns_128 = tl.arange(0, 128)

    k_base = k + sequence * stride_kb + kv_head * stride_kh
    v_base = v + sequence * stride_vb + kv_head * stride_vh
    dk_base = dk + sequence * stride_dkb + kv_head * stride_dkh
    dv_base = dv + sequence * stride_dvb + kv_head * stride_dvh
    key_exists = keys < seqlen_kv
    # [BLOCK_N, 128]
    k_tile = tl.load(
        k_base + keys[:, None] * stride_ks + columns_128[None, :],
        mask=key_exists[:, None],
        other=0.0,
    )
    dk_sum = tl.zeros([BLOCK_N, 128], tl.float32)
    # [BLOCK_N, 128]
    v_tile = tl.load(
        v_base + keys[:, None] * stride_vs + columns_128[None, :],
        mask=key_exists[:, None],
        other=0.0,
    )
    dv_sum = tl.zeros([BLOCK_N, 128], tl.float32)
    diagonal = seqlen_kv - seqlen_q
    scale_log2 = scale * LOG2_E
    last_key = tl.minimum(key_begin + BLOCK_N, seqlen_kv) - 1
    m_min = query_start(key_begin, diagonal)
    m_full_min = query_start(last_key, diagonal)
    m_max = seqlen_q
    m_full_max = seqlen_q
    m_min = m_min // BLOCK_M * BLOCK_M
    m_full_min = tl.cdiv(m_full_min, BLOCK_M) * BLOCK_M
    m_full_max = tl.maximum(m_full_max, 0) // BLOCK_M * BLOCK_M
    # The last block of keys is masked throughout: keys that do not exist must not change dq.
    m_full_max = tl.where(key_begin + BLOCK_N <= seqlen_kv, m_full_max, 0)
    # Blocks of all heads of the group in one loop: sums that cross two loops cost registers.
    full_blocks = tl.maximum(m_full_max - m_full_min, 0) // BLOCK_M
    for index in tl.range(0, group_size * full_blocks):
        # Before the loop is entered the first division may be made, whatever its divisor is.
        member = index // tl.maximum(full_blocks, 1)
        block = index - member * full_blocks
        start = m_full_min + block * BLOCK_M
        head = kv_head * group_size + member
        q_base = q + sequence * stride_qb + head * stride_qh
        dout_base = dout + sequence * stride_dob + head * stride_doh
        row_base = (sequence * heads + head).to(tl.int64) * seqlen_q
        queries = start + query_offsets
        # [BLOCK_M, 128]
        q_tile = tl.load(
            q_base + queries[:, None] * stride_qs + columns_128[None, :],
        )
        row_lse = tl.load(workspace_1 + row_base + queries)
        # Scores and all that is made of them are [BLOCK_N, BLOCK_M].
        s = tl.dot(k_tile, q_tile.T)
        p = tl.exp2(s * scale_log2 - row_lse[None, :])
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
        ds_low = ds.to(q.dtype.element_ty)
        dk_sum = tl.dot(ds_low, q_tile, dk_sum)
        sum_block = (sequence * heads + head) * tl.cdiv(seqlen_q, BLOCK_M) + start // BLOCK_M
        # [BLOCK_M, 128]
        dq_tile = tl.dot(ds_low.T, k_tile)
        if COPY_ENGINE:
            dq_sums.atomic_add([sum_block * BLOCK_M, 0], dq_tile)
        else:
            sums_base = workspace_2 + sum_block.to(tl.int64) * (BLOCK_M * HEAD_DIM)
            sums_at = sums_base + query_offsets[:, None] * HEAD_DIM + columns_128[None, :]
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
        q_base = q + sequence * stride_qb + head * stride_qh
        dout_base = dout + sequence * stride_dob + head * stride_doh
        row_base = (sequence * heads + head).to(tl.int64) * seqlen_q
        queries = start + query_offsets
        query_exists = queries < seqlen_q
        positions = queries + diagonal
        row_end = key_stop(positions, seqlen_kv)
        # [BLOCK_M, 128]
        q_tile = tl.load(
            q_base + queries[:, None] * stride_qs + columns_128[None, :],
            mask=query_exists[:, None],
            other=0.0,
        )
        row_lse = tl.load(workspace_1 + row_base + queries, mask=query_exists, other=float("inf"))
        # Scores and all that is made of them are [BLOCK_N, BLOCK_M].
        s = tl.dot(k_tile, q_tile.T)
        p = tl.exp2(s * scale_log2 - row_lse[None, :])
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
        ds_low = ds.to(q.dtype.element_ty)
        dk_sum = tl.dot(ds_low, q_tile, dk_sum)
        sum_block = (sequence * heads + head) * tl.cdiv(seqlen_q, BLOCK_M) + start // BLOCK_M
        # [BLOCK_M, 128]
        dq_tile = tl.dot(ds_low.T, k_tile)
        if COPY_ENGINE:
            dq_sums.atomic_add([sum_block * BLOCK_M, 0], dq_tile)
        else:
            sums_base = workspace_2 + sum_block.to(tl.int64) * (BLOCK_M * HEAD_DIM)
            sums_at = sums_base + query_offsets[:, None] * HEAD_DIM + columns_128[None, :]
            tl.atomic_add(sums_at, dq_tile, sem="relaxed")

    dk_tile = (dk_sum * scale).to(dk.dtype.element_ty)
    tl.store(
        dk_base + keys[:, None] * stride_dks + columns_128[None, :],
        dk_tile,
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
    scale,
    stride_dqb,
    stride_dqh,
    stride_dqs,
    heads,
    seqlen_q,
):
    # One block of sums becomes as many rows of dq.
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile = tl.program_id(0) % tiles
    batch_head = tl.program_id(0) // tiles
    sequence = batch_head // heads
    head = batch_head % heads
    dq_base = dq + sequence * stride_dqb + head * stride_dqh
    sums = workspace_2 + tl.program_id(0).to(tl.int64) * (BLOCK_M * HEAD_DIM)
    columns_128 = tl.arange(0, 128)
    for begin in tl.range(0, BLOCK_M, SUM_ROWS):
        rows = begin + tl.arange(0, SUM_ROWS)
        queries = tile * BLOCK_M + rows
        exists = (queries < seqlen_q)[:, None]
        # [SUM_ROWS, 128]
        dq_sum = tl.load(sums + rows[:, None] * HEAD_DIM + columns_128[None, :], mask=exists, other=0.0)
        dq_tile = (dq_sum * scale).to(dq.dtype.element_ty)
        tl.store(
            dq_base + queries[:, None] * stride_dqs + columns_128[None, :],
            dq_tile,
            mask=exists,
        )


def prologue_plan(q, k, v, out, dout, dq, dk, dv):
    """Grid of `delta`, and its integers."""
    batch, heads, seqlen_q, _ = q.shape
    strides = [tensor.stride(axis) for tensor in (out, dout) for axis in (0, 1, 2)]
    blocks = triton.cdiv(seqlen_q, 64) * heads * batch
    pieces = blocks * 2
    grid = (triton.cdiv(seqlen_q, 64) * heads * batch,)
    return grid, (*strides, heads, seqlen_q, pieces)


def launch_plan(q, k, v, out, dout, dq, dk, dv):
    """Grid of the kernel, shapes of float32 workspaces, and its integers."""
    batch, heads, seqlen_q, _ = q.shape
    kv_heads, seqlen_kv = k.shape[1], k.shape[2]
    blocks = triton.cdiv(seqlen_q, 64) * heads * batch
    grid = (triton.cdiv(seqlen_kv, 128) * kv_heads * batch,)
    strides = [tensor.stride(axis) for tensor in (q, k, v, dout, dk, dv) for axis in (0, 1, 2)]
    rows = (batch, heads, seqlen_q)
    return grid, (rows, rows, (blocks, 64, 128)), (*strides, heads, heads // kv_heads, seqlen_q, seqlen_kv)


def epilogue_plan(q, k, v, out, dout, dq, dk, dv):
    """Grid of `convert_sums`, and its integers."""
    batch, heads, seqlen_q, _ = q.shape
    blocks = triton.cdiv(seqlen_q, 64) * heads * batch
    strides = [dq.stride(axis) for axis in (0, 1, 2)]
    return (blocks,), (*strides, heads, seqlen_q)


def attention_backward(q, k, v, out, lse, dout, scale=None):
    """Returns dq, dk, dv.

    q, k, v, out, dout  [batch, heads, seqlen, head_dim] with a contiguous last dimension
    lse                 log-sum-exp of each row, float32 and contiguous
    The checks state the dtype and the shape of each input.
    """
    # The kernel itself checks nothing: other sizes, types or strides would read and write other memory.
    large = [("q", q), ("k", k), ("v", v), ("out", out), ("dout", dout)]
    for name, tensor in [
        *large,
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
        ("q", q, dtype, (*rows, 128)),
        ("k", k, dtype, (*keys, 128)),
        ("v", v, dtype, (*keys, 128)),
        ("out", out, dtype, (*rows, 128)),
        ("dout", dout, dtype, (*rows, 128)),
        ("lse", lse, torch.float32, rows),
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
    if q.numel() == 0 or k.numel() == 0:
        return dq, dk, dv
    # Tensor descriptors are made on the device, in scratch memory that Triton asks for.
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=q.device))
    planned = (q, k, v, out, dout, dq, dk, dv)
    grid, shapes, integers = launch_plan(*planned)
    workspaces = [torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes]
    first_grid, first_integers = prologue_plan(*planned)
    last_grid, last_integers = epilogue_plan(*planned)
    # Only the prologue reads the seed.
    inputs = [scale]
    delta[first_grid](
        *(out, dout, lse, *workspaces),
        *first_integers,
        num_warps=4,
        num_stages=1,
    )
    backward_fused[grid](
        *(q, k, v, dout, *workspaces, dk, dv),
        *inputs,
        *integers,
        num_warps=8,
        num_stages=2,
    )
    convert_sums[last_grid](
        *(workspaces[2], dq),
        scale,
        *last_integers,
        num_warps=4,
        num_stages=1,
    )
    return -dq if negative else dq, dk, dv
