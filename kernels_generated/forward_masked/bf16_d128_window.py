# A stand-alone kernel by flashtune; it needs torch and triton alone.
# `attention` runs it. Selected on nvidia-h100 and nvidia-h200.

"""Attention forward, queries outermost: one program keeps a tile of queries and streams K and V.

Computes     bf16, head dim 128, value head dim 128, causal: bottom_right
With         window
Config       block_m 128, block_n 64, 8 warps, 3 stages, split_masked_loop True, split_head_dim False,
             lpt False, heads_innermost False, maxnreg 0
Assumes      strides that are multiples of 16, 32-bit offsets
Template     forward_masked 1e23f4dc9199

Algorithm of a program, for a tile of queries
  find the visible keys and the full blocks among them by key_bounds
  running_max, running_sum, accumulator = -inf, 0, 0
  for each full block of keys, then for each partial block:
      s = q_tile k_tile^T
      s = -inf where hidden
      p, rescale, running_max, running_sum = softmax_step(s)
      accumulator = accumulator * rescale + p v_tile
  out = accumulator / running_sum;  lse = running_max + log2(running_sum), in natural units
The order of loops is FlashAttention-2's (Dao, 2023); the softmax is online (Milakov and Gimelshein, 2018).

Notation
  stride_qb, stride_qh, stride_qs   elements between batches, heads and positions of q; k, v, o alike
  position                          position of a query among the keys of its sequence
  *_tile*                           a block that is held on the chip, its shape in a comment
  *_log2                            a quantity in units of log2, so that exp2 serves for exp
  n_min                             first visible key of a tile of queries, in whole blocks
  n_max                             end of its visible keys
  n_full_min                        first key of its full blocks
  n_full_max                        end of its full blocks
Tunables
  BLOCK_M, BLOCK_N                  queries and keys of a tile
  num_warps, num_stages             warps and pipeline stages
  split_masked_loop                 blocks that no mask cuts have a loop of their own
"""

import torch
import triton
import triton.language as tl

BLOCK_M = tl.constexpr(128)
BLOCK_N = tl.constexpr(64)
HEAD_DIM = tl.constexpr(128)
VALUE_HEAD_DIM = tl.constexpr(128)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
WINDOW_LEFT = tl.constexpr(4095)


@triton.jit
def key_stop(position, seqlen_kv):
    """Returns the key after the last one that a query sees."""
    stop = tl.minimum(position + 1, seqlen_kv)
    return stop


@triton.jit
def key_start(position):
    """Returns the first key that a query sees, by the left window and the chunk."""
    return tl.maximum(position - WINDOW_LEFT, 0)


@triton.jit
def key_bounds(first_position, last_position, seqlen_kv):
    """Returns ranges of keys for queries at first_position .. last_position. All bounds grow with the position.

    Blocks in n_min .. n_max have a key that some query sees.
    Blocks in n_full_min .. n_full_max have no key that some query does not see.
    An end may be less than its begin: then there is nothing.
    """
    first_start = key_start(first_position)
    n_max = key_stop(last_position, seqlen_kv)
    n_min = first_start // BLOCK_N * BLOCK_N
    n_full_min = tl.cdiv(key_start(last_position), BLOCK_N) * BLOCK_N
    n_full_max = tl.maximum(key_stop(first_position, seqlen_kv), 0) // BLOCK_N * BLOCK_N
    return n_min, n_max, n_full_min, n_full_max


@triton.jit
def softmax_step(s, running_max, running_sum, scale_log2, IS_PARTIAL: tl.constexpr):
    """Returns p of a block of scores, the factor of earlier sums and outputs, the new row maxima and row sums."""
    new_max = tl.maximum(running_max, tl.max(s, 1) * scale_log2)
    if IS_PARTIAL:
        # A row that has seen no key yet: its maximum is -inf, and -inf - -inf would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        shift = new_max
    p = tl.exp2(s * scale_log2 - shift[:, None])
    rescale = tl.exp2(running_max - shift)
    return p, rescale, new_max, running_sum * rescale + tl.sum(p, 1)


@triton.jit
def forward_masked(
    q,
    k,
    v,
    out,
    lse,
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
    columns_128 = tl.arange(0, 128)

    q_base = q + sequence * stride_qb + head * stride_qh
    o_base = out + sequence * stride_ob + head * stride_oh
    k_base = k + sequence * stride_kb + kv_head * stride_kh
    v_base = v + sequence * stride_vb + kv_head * stride_vh
    # [BLOCK_M, 128]
    q_tile = tl.load(
        q_base + queries[:, None] * stride_qs + columns_128[None, :],
        mask=query_exists[:, None],
        other=0.0,
    )

    diagonal = seqlen_kv - seqlen_q
    positions = queries + diagonal
    first_position = first_query + diagonal
    last_position = tl.minimum(first_query + BLOCK_M, seqlen_q) - 1 + diagonal
    row_end = key_stop(positions, seqlen_kv)
    row_start = key_start(positions)
    n_min, n_max, n_full_min, n_full_max = key_bounds(first_position, last_position, seqlen_kv)

    scale_log2 = scale * LOG2_E
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, 128], tl.float32)

    # Blocks that all queries of the tile see whole.
    for start in tl.range(n_full_min, n_full_max, BLOCK_N):
        keys = start + key_offsets
        # [BLOCK_N, 128]
        k_tile = tl.load(
            k_base + keys[:, None] * stride_ks + columns_128[None, :],
        )
        s = tl.dot(q_tile, k_tile.T)
        p, rescale, running_max, running_sum = softmax_step(s, running_max, running_sum, scale_log2, IS_PARTIAL=False)
        p_low = p.to(q.dtype.element_ty)
        # [BLOCK_N, 128]
        v_tile = tl.load(
            v_base + keys[:, None] * stride_vs + columns_128[None, :],
        )
        accumulator = tl.dot(p_low, v_tile, accumulator * rescale[:, None])
    # Blocks that some queries see in part: on both sides of the others, and at the sequence's start.
    n_right_min = tl.maximum(n_full_min, n_full_max)
    left_keys = tl.minimum(n_full_min, n_max) - n_min
    left_blocks = tl.cdiv(tl.maximum(left_keys, 0), BLOCK_N)
    right_blocks = left_blocks + tl.cdiv(tl.maximum(n_max - n_right_min, 0), BLOCK_N)
    # Several ranges in one loop, so that the code of a block is there once.
    for index in tl.range(0, right_blocks):
        start = n_min + index * BLOCK_N
        start = tl.where(index < left_blocks, start, n_right_min + (index - left_blocks) * BLOCK_N)
        keys = start + key_offsets
        # [BLOCK_N, 128]
        k_tile = tl.load(
            k_base + keys[:, None] * stride_ks + columns_128[None, :],
            mask=(keys < seqlen_kv)[:, None],
            other=0.0,
        )
        s = tl.dot(q_tile, k_tile.T)
        visible = (keys[None, :] >= row_start[:, None]) & (keys[None, :] < row_end[:, None])
        s = tl.where(visible, s, float("-inf"))
        p, rescale, running_max, running_sum = softmax_step(s, running_max, running_sum, scale_log2, IS_PARTIAL=True)
        p_low = p.to(q.dtype.element_ty)
        # [BLOCK_N, 128]
        v_tile = tl.load(
            v_base + keys[:, None] * stride_vs + columns_128[None, :],
            mask=(keys < seqlen_kv)[:, None],
            other=0.0,
        )
        accumulator = tl.dot(p_low, v_tile, accumulator * rescale[:, None])

    # Without a visible key the output is zero, and the log-sum-exp is the sink or -inf.
    divisor = tl.where(running_sum == 0.0, 1.0, running_sum)
    o_tile = (accumulator / divisor[:, None]).to(out.dtype.element_ty)
    tl.store(
        o_base + queries[:, None] * stride_os + columns_128[None, :],
        o_tile,
        mask=query_exists[:, None],
    )
    row_lse = (running_max + tl.log2(running_sum)) * LN_2
    tl.store(lse + batch_head.to(tl.int64) * seqlen_q + queries, row_lse, mask=query_exists)


def launch_plan(q, k, v, out):
    """Grid, shapes of float32 workspaces, and the kernel's arguments from `stride_qb` on."""
    batch, heads, seqlen_q, _ = q.shape
    kv_heads, seqlen_kv = k.shape[1], k.shape[2]
    grid = (triton.cdiv(seqlen_q, 128) * heads * batch,)
    strides = [tensor.stride(axis) for tensor in (q, k, v, out) for axis in (0, 1, 2)]
    return grid, (), (*strides, heads, heads // kv_heads, heads * batch, seqlen_q, seqlen_kv)


def attention(q, k, v, scale=None):
    """Returns the output [batch, heads, seqlen_q, value_head_dim] and the log-sum-exp of each row.

    q, k, v           [batch, heads, seqlen, head_dim] with a contiguous last dimension
    The checks state the dtype and the shape of each input. The log-sum-exp is float32 [batch, heads, seqlen_q].
    """
    # The kernel itself checks nothing: other sizes, types or strides would read and write other memory.
    large = [("q", q), ("k", k), ("v", v)]
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
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if out.numel() == 0 or k.shape[2] == 0:
        lse.copy_(torch.full_like(lse, float("-inf")))
        return out.zero_(), lse
    side = ()
    grid, workspace_shapes, integers = launch_plan(q, k, v, out, *side)
    workspaces = [torch.empty(shape, dtype=torch.float32, device=q.device) for shape in workspace_shapes]
    forward_masked[grid](
        *(q, k, v, out, out if lse is None else lse),
        *side,
        *workspaces,
        max(scale, 1e-30),
        *integers,
        num_warps=8,
        num_stages=3,
    )
    return out, lse
