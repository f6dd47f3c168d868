"""Attention forward, keys outermost: one program keeps a tile of K and V and cycles through a head's queries.

Computes     fp16, head dim 128, value head dim 64, causal: top_left
Config       block_m 64, block_n 64, 4 warps, 1 stages, split_head_dim False, maxnreg 0
Assumes      strides that are multiples of 16, 32-bit offsets
Template     forward_kv_outer 0e92b2a1f9d6

Algorithm of a program, for a head
  running_max, running_sum, accumulator = -inf, 0, 0, of all rows, in global memory, float32
  for each block of keys before n_max:
      for each tile of queries from m_min on, which sees some of the keys:
          s = q_tile k_tile^T, and -inf where row_end or seqlen_kv hides it
          new_max = max(running_max, rows of s * scale_log2)
          p, rescale = exp2(s * scale_log2 - new_max), exp2(running_max - new_max)
          running_max, running_sum = new_max, running_sum * rescale + sum(p)
          accumulator = accumulator * rescale + p v_tile
  out = accumulator / running_sum;  lse = running_max + log2(running_sum), in natural units
The order of loops is FlashAttention-1's (Dao et al., 2022). Programs on the same rows would race, so one program
loops over all keys of its head. The softmax is online (Milakov and Gimelshein, 2018).

Notation
  stride_qb, stride_qh, stride_qs   elements between batches, heads and positions of q; k, v, o alike
  carried_*                         the state of all rows between blocks of keys, in global memory
  *_tile                            a block that is held on the chip, its shape in a comment
  *_log2                            a quantity in units of log2, so that exp2 serves for exp
  n_max, m_min                      the end of the visible keys; the first query that sees a block
Tunables
  block_m, block_n                  queries and keys of a tile: BLOCK_M, BLOCK_N
  num_warps, num_stages             warps and pipeline stages
  split_head_dim                    a head dim as several tiles instead of one padded tile
  maxnreg                           limit of registers per thread, 0 for none
"""

import torch
import triton
import triton.language as tl

BLOCK_M = tl.constexpr(64)
BLOCK_N = tl.constexpr(64)
HEAD_DIM = tl.constexpr(128)
VALUE_HEAD_DIM = tl.constexpr(64)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def softmax_step(s, running_max, running_sum, scale_log2):
    """Returns p of a block of scores, the factor of earlier sums and outputs, the new row maxima and row sums."""
    new_max = tl.maximum(running_max, tl.max(s, 1) * scale_log2)
    # A row that has seen no key yet: its maximum is -inf, and -inf - -inf would be NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(s * scale_log2 - shift[:, None])
    rescale = tl.exp2(running_max - shift)
    return p, rescale, new_max, running_sum * rescale + tl.sum(p, 1)


@triton.jit
def forward_kv_outer(
    q,
    k,
    v,
    out,
    lse,
    carried_max,
    carried_sum,
    carried_out,
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
    # Which head of which sequence.
    batch_head = tl.program_id(0)
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // group_size

    q_base = q + batch * stride_qb + head * stride_qh
    k_base = k + batch * stride_kb + kv_head * stride_kh
    v_base = v + batch * stride_vb + kv_head * stride_vh
    o_base = out + batch * stride_ob + head * stride_oh
    first_row = batch_head.to(tl.int64) * seqlen_q
    max_base = carried_max + first_row
    sum_base = carried_sum + first_row
    carried_base = carried_out + first_row * VALUE_HEAD_DIM
    query_offsets = tl.arange(0, BLOCK_M)
    key_offsets = tl.arange(0, BLOCK_N)
    columns_64 = tl.arange(0, 64)
    columns_128 = tl.arange(0, 128)
    scale_log2 = scale * LOG2_E

    # The state of a row that has seen no key.
    for first_query in tl.range(0, seqlen_q, BLOCK_M):
        queries = first_query + query_offsets
        query_exists = queries < seqlen_q
        running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        running_sum = tl.zeros([BLOCK_M], tl.float32)
        accumulator = tl.zeros([BLOCK_M, 64], tl.float32)
        tl.store(max_base + queries, running_max, mask=query_exists)
        tl.store(sum_base + queries, running_sum, mask=query_exists)
        tl.store(
            carried_base + queries[:, None] * VALUE_HEAD_DIM + columns_64[None, :],
            accumulator,
            mask=query_exists[:, None],
        )

    # Nothing but a barrier makes what one thread stored visible to another thread's load.
    tl.debug_barrier()

    # Query i sees keys up to i + diagonal; no query sees a key from n_max on.
    diagonal = 0
    n_max = tl.minimum(seqlen_q, seqlen_kv)
    for start in tl.range(0, n_max, BLOCK_N):
        keys = start + key_offsets
        key_exists = keys < seqlen_kv
        # [BLOCK_N, 128]
        k_tile = tl.load(
            k_base + keys[:, None] * stride_ks + columns_128[None, :],
            mask=key_exists[:, None],
            other=0.0,
        )
        # [BLOCK_N, 64]
        v_tile = tl.load(
            v_base + keys[:, None] * stride_vs + columns_64[None, :],
            mask=key_exists[:, None],
            other=0.0,
        )
        # Earlier queries see none of these keys.
        m_min = tl.maximum(start - diagonal, 0) // BLOCK_M * BLOCK_M
        for first_query in tl.range(m_min, seqlen_q, BLOCK_M):
            queries = first_query + query_offsets
            query_exists = queries < seqlen_q
            running_max = tl.load(max_base + queries, mask=query_exists, other=float("-inf"))
            running_sum = tl.load(sum_base + queries, mask=query_exists, other=0.0)
            # [BLOCK_M, 64]
            accumulator = tl.load(
                carried_base + queries[:, None] * VALUE_HEAD_DIM + columns_64[None, :],
                mask=query_exists[:, None],
                other=0.0,
            )
            # [BLOCK_M, 128]
            q_tile = tl.load(
                q_base + queries[:, None] * stride_qs + columns_128[None, :],
                mask=query_exists[:, None],
                other=0.0,
            )
            s = tl.dot(q_tile, k_tile.T)
            row_end = tl.minimum(queries + diagonal + 1, seqlen_kv)
            s = tl.where(keys[None, :] < row_end[:, None], s, float("-inf"))
            p, rescale, running_max, running_sum = softmax_step(s, running_max, running_sum, scale_log2)
            p_low = p.to(v.dtype.element_ty)
            accumulator = tl.dot(p_low, v_tile, accumulator * rescale[:, None])
            # No warp may overwrite rows that another has yet to read.
            tl.debug_barrier()
            tl.store(max_base + queries, running_max, mask=query_exists)
            tl.store(sum_base + queries, running_sum, mask=query_exists)
            tl.store(
                carried_base + queries[:, None] * VALUE_HEAD_DIM + columns_64[None, :],
                accumulator,
                mask=query_exists[:, None],
            )

        # The next block of keys re-reads these rows, in other threads.
        tl.debug_barrier()

    # Rows that saw no key have a sum of zero: their output is zero and their log-sum-exp -inf.
    for first_query in tl.range(0, seqlen_q, BLOCK_M):
        queries = first_query + query_offsets
        query_exists = queries < seqlen_q
        running_max = tl.load(max_base + queries, mask=query_exists, other=float("-inf"))
        running_sum = tl.load(sum_base + queries, mask=query_exists, other=0.0)
        # [BLOCK_M, 64]
        accumulator = tl.load(
            carried_base + queries[:, None] * VALUE_HEAD_DIM + columns_64[None, :],
            mask=query_exists[:, None],
            other=0.0,
        )
        divisor = tl.where(running_sum == 0.0, 1.0, running_sum)
        o_tile = (accumulator / divisor[:, None]).to(out.dtype.element_ty)
        tl.store(
            o_base + queries[:, None] * stride_os + columns_64[None, :],
            o_tile,
            mask=query_exists[:, None],
        )


def launch_plan(q, k, v, out):
    """Grid, shapes of float32 workspaces, and the kernel's arguments from `stride_qb` on."""
    batch, heads, seqlen_q, _ = q.shape
    kv_heads, seqlen_kv = k.shape[1], k.shape[2]
    rows = (batch, heads, seqlen_q)
    strides = [tensor.stride(axis) for tensor in (q, k, v, out) for axis in (0, 1, 2)]
    counts = (heads, heads // kv_heads, heads * batch, seqlen_q, seqlen_kv)
    return (batch * heads,), (rows, rows, (*rows, v.shape[-1])), (*strides, *counts)


def attention(q, k, v, scale=None):
    """Returns the output [batch, heads, seqlen_q, value_head_dim] and the log-sum-exp of each row.

    q, k and v are [batch, heads, seqlen, head_dim] with a contiguous last dimension. The checks state the dtype
    and the shape of each input. The log-sum-exp is float32 [batch, heads, seqlen_q], or None if this kernel does
    not write it.
    """
    # The kernel itself checks nothing: other sizes, types or strides would read and write other memory.
    large = [("q", q), ("k", k), ("v", v)]
    for name, tensor in [
        *large,
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
    batch = q.shape[0]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"k has {kv_heads} heads, expected a divisor of the {heads} heads of q")
    rows = (batch, heads, seqlen_q)
    keys = (batch, kv_heads, k.shape[2])
    for name, tensor, expected, shape in (
        ("q", q, dtype, (*rows, 128)),
        ("k", k, dtype, (*keys, 128)),
        ("v", v, dtype, (*keys, 64)),
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
    if scale < 0:
        q, scale = -q, -scale
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = None
    if out.numel() == 0 or k.shape[2] == 0:
        return out.zero_(), lse
    side = ()
    grid, workspace_shapes, integers = launch_plan(q, k, v, out, *side)
    workspaces = [torch.empty(shape, dtype=torch.float32, device=q.device) for shape in workspace_shapes]
    forward_kv_outer[grid](
        *(q, k, v, out, out if lse is None else lse),
        *side,
        *workspaces,
        max(scale, 1e-30),
        *integers,
        num_warps=4,
        num_stages=1,
    )
    return out, lse
