# A stand-alone kernel by flashtune; it needs torch and triton alone.
# `attention_backward` runs it. Selected on nvidia-h100 and nvidia-h200.

"""Attention backward in two passes: one program keeps a block of keys and walks queries, for dk and dv; then
one keeps a tile of queries and walks keys, for dq. Nothing is added up by atomics: every run gives the same bits.

Computes     bf16, head dim 128, value head dim 128, causal: bottom_right
With         no features
Config       block_m 64, block_n 128, 8 warps, 2 stages; for dq block_m 128, block_n 64, 8 warps, 2 stages;
             split_masked_loop True, split_head_dim False, lpt True, heads_innermost False, maxnreg 0, input_precision ieee
Assumes      strides that are multiples of 16, 32-bit offsets
Template     backward_split 596f3b1593bc

  delta:                 for each row: delta = rowsum(dout * out); lse in units of log2
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
  DQ_BLOCK_M, DQ_BLOCK_N            queries and keys of a tile where queries stay
  BLOCK_M, BLOCK_N                  queries and keys of a tile
  num_warps, num_stages             warps and pipeline stages
  split_masked_loop                 blocks that no mask cuts have a loop of their own
  lpt                               tiles with the most keys are first
Notation
  stride_qb, stride_qh, stride_qs   elements between batches, heads and positions of q; k, v, out (o), dout (do)
                                    and the gradients dq, dk, dv alike
  workspace_0, workspace_1          delta and row_lse, float32 [batch, heads, seqlen_q]
  position                          position of a query among the keys of its sequence
  *_tile*                           a block on the chip, its shape in a comment
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
DELTA_ROWS = tl.constexpr(64)
HEAD_DIM = tl.constexpr(128)
VALUE_HEAD_DIM = tl.constexpr(128)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def key_stop(position, seqlen_kv):
    """Returns the key after the last one that a query sees."""
    stop = tl.minimum(position + 1, seqlen_kv)
    return stop


@triton.jit
def key_bounds(first_position, last_position, seqlen_kv):
    """Returns ranges of keys for queries at first_position .. last_position. All bounds grow with the position.

    Blocks in 0 .. n_max have a key that some query sees.
    Blocks in 0 .. n_full_max have no key that some query does not see.
    An end may be less than its begin: then there is nothing.
    """
    n_max = key_stop(last_position, seqlen_kv)
    n_full_max = tl.maximum(key_stop(first_position, seqlen_kv), 0) // DQ_BLOCK_N * DQ_BLOCK_N
    return n_max, n_full_max


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
    stride_ob,
    stride_oh,
    stride_os,
    stride_dob,
    stride_doh,
    stride_dos,
    heads,
    seqlen_q,
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
def backward_split(
    q,
    k,
    v,
    dout,
    workspace_0,
    workspace_1,
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
def gradient_of_queries(
    q,
    k,
    v,
    dout,
    workspace_0,
    workspace_1,
    dq,
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
    # The last tiles see the most keys: started first, they do not end last.
    tile = tiles - 1 - tile
    sequence = batch_head // heads
    head = batch_head % heads
    kv_head = head // group_size
    first_query = tile * BLOCK_M
    queries = first_query + tl.arange(0, BLOCK_M)
    query_exists = queries < seqlen_q
    key_offsets = tl.arange(0, BLOCK_N)
    columns_128 = tl.arange(0, 128)

    q_base = q + sequence * stride_qb + head * stride_qh
    dout_base = dout + sequence * stride_dob + head * stride_doh
    dq_base = dq + sequence * stride_dqb + head * stride_dqh
    row_base = (sequence * heads + head).to(tl.int64) * seqlen_q
    k_base = k + sequence * stride_kb + kv_head * stride_kh
    v_base = v + sequence * stride_vb + kv_head * stride_vh
    # [BLOCK_M, 128]
    q_tile = tl.load(
        q_base + queries[:, None] * stride_qs + columns_128[None, :],
        mask=query_exists[:, None],
        other=0.0,
    )
    # [BLOCK_M, 128]
    dout_tile = tl.load(
        dout_base + queries[:, None] * stride_dos + columns_128[None, :],
        mask=query_exists[:, None],
        other=0.0,
    )
    row_lse = tl.load(workspace_1 + row_base + queries, mask=query_exists, other=float("inf"))
    row_delta = tl.load(workspace_0 + row_base + queries, mask=query_exists, other=0.0)
    dq_sum = tl.zeros([BLOCK_M, 128], tl.float32)
    diagonal = seqlen_kv - seqlen_q
    positions = queries + diagonal
    first_position = first_query + diagonal
    last_position = tl.minimum(first_query + BLOCK_M, seqlen_q) - 1 + diagonal
    row_end = key_stop(positions, seqlen_kv)
    n_max, n_full_max = key_bounds(first_position, last_position, seqlen_kv)
    scale_log2 = scale * LOG2_E

    for start in tl.range(0, n_full_max, BLOCK_N):
        keys = start + key_offsets
        # [BLOCK_N, 128]
        k_tile = tl.load(
            k_base + keys[:, None] * stride_ks + columns_128[None, :],
        )
        s = tl.dot(q_tile, k_tile.T)
        p = tl.exp2(s * scale_log2 - row_lse[:, None])
        # [BLOCK_N, 128]
        v_tile = tl.load(
            v_base + keys[:, None] * stride_vs + columns_128[None, :],
        )
        dp = tl.dot(dout_tile, v_tile.T)
        ds = p * (dp - row_delta[:, None])
        ds_low = ds.to(q.dtype.element_ty)
        dq_sum = tl.dot(ds_low, k_tile, dq_sum)
    for start in tl.range(n_full_max, n_max, BLOCK_N):
        keys = start + key_offsets
        # [BLOCK_N, 128]
        k_tile = tl.load(
            k_base + keys[:, None] * stride_ks + columns_128[None, :],
            mask=(keys < seqlen_kv)[:, None],
            other=0.0,
        )
        s = tl.dot(q_tile, k_tile.T)
        p = tl.exp2(s * scale_log2 - row_lse[:, None])
        visible = keys[None, :] < row_end[:, None]
        p = tl.where(visible, p, 0.0)
        # [BLOCK_N, 128]
        v_tile = tl.load(
            v_base + keys[:, None] * stride_vs + columns_128[None, :],
            mask=(keys < seqlen_kv)[:, None],
            other=0.0,
        )
        dp = tl.dot(dout_tile, v_tile.T)
        ds = p * (dp - row_delta[:, None])
        ds_low = ds.to(q.dtype.element_ty)
        dq_sum = tl.dot(ds_low, k_tile, dq_sum)
    dq_tile = (dq_sum * scale).to(dq.dtype.element_ty)
    tl.store(
        dq_base + queries[:, None] * stride_dqs + columns_128[None, :],
        dq_tile,
        mask=query_exists[:, None],
    )


def prologue_plan(q, k, v, out, dout, dq, dk, dv):
    """Grid of `delta`, and its integers."""
    batch, heads, seqlen_q, _ = q.shape
    strides = [tensor.stride(axis) for tensor in (out, dout) for axis in (0, 1, 2)]
    return (triton.cdiv(seqlen_q, 64) * heads * batch,), (*strides, heads, seqlen_q)


def launch_plan(q, k, v, out, dout, dq, dk, dv):
    """Grid of the kernel, shapes of float32 workspaces, and its integers."""
    batch, heads, seqlen_q, _ = q.shape
    kv_heads, seqlen_kv = k.shape[1], k.shape[2]
    grid = (triton.cdiv(seqlen_kv, 128) * kv_heads * batch,)
    strides = [tensor.stride(axis) for tensor in (q, k, v, dout, dk, dv) for axis in (0, 1, 2)]
    rows = (batch, heads, seqlen_q)
    workspaces = (rows, rows)
    return grid, workspaces, (*strides, heads, heads // kv_heads, seqlen_q, seqlen_kv)


def epilogue_plan(q, k, v, out, dout, dq, dk, dv):
    """Grid of `gradient_of_queries`, and its integers."""
    batch, heads, seqlen_q, _ = q.shape
    kv_heads, seqlen_kv = k.shape[1], k.shape[2]
    grid = (triton.cdiv(seqlen_q, 128) * heads * batch,)
    strides = [tensor.stride(axis) for tensor in (q, k, v, dout, dq) for axis in (0, 1, 2)]
    return grid, (*strides, heads, heads // kv_heads, seqlen_q, seqlen_kv)


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
    planned = (q, k, v, out, dout, dq, dk, dv)
    grid, shapes, integers = launch_plan(*planned)
    workspaces = [torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes]
    first_grid, first_integers = prologue_plan(*planned)
    last_grid, last_integers = epilogue_plan(*planned)
    # Only the prologue reads the seed.
    inputs = [scale]
    delta[first_grid](
        *(out, dout, lse, *workspaces[:2]),
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
