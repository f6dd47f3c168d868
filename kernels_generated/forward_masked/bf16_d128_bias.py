# A stand-alone kernel by flashtune; it needs torch and triton alone.
# `attention` runs it. Selected on nvidia-h100 and nvidia-h200.

"""Attention forward, queries outermost: one program keeps a tile of queries and streams K and V.

Computes     bf16, head dim 128, value head dim 128, causal: none
With         bias
Config       block_m 64, block_n 128, 4 warps, 1 stages, split_masked_loop False, split_head_dim False,
             lpt False, heads_innermost False, maxnreg 0
Assumes      strides that are multiples of 16, 32-bit offsets
Template     forward_masked 1e23f4dc9199

Algorithm of a program, for a tile of queries
  find the visible keys and the full blocks among them
  running_max, running_sum, accumulator = -inf, 0, 0
  for each full block of keys, then for each partial block:
      s = q_tile k_tile^T
      s = -inf where hidden                         in full blocks by the mask tensor alone
      p, rescale, running_max, running_sum = softmax_step(s)
      accumulator = accumulator * rescale + p v_tile
  out = accumulator / running_sum;  lse = running_max + log2(running_sum), in natural units
The order of loops is FlashAttention-2's (Dao, 2023); the softmax is online (Milakov and Gimelshein, 2018).

Notation
  stride_qb, stride_qh, stride_qs   elements between batches, heads and positions of q; k, v, o alike
  *_tile*                           a block that is held on the chip, its shape in a comment
  *_log2                            a quantity in units of log2, so that exp2 serves for exp
  n_max                             end of its visible keys
Tunables
  BLOCK_M, BLOCK_N                  queries and keys of a tile
  num_warps, num_stages             warps and pipeline stages
"""

import torch
import triton
import triton.language as tl

BLOCK_M = tl.constexpr(64)
BLOCK_N = tl.constexpr(128)
HEAD_DIM = tl.constexpr(128)
VALUE_HEAD_DIM = tl.constexpr(128)
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
def forward_masked(
    q,
    k,
    v,
    out,
    lse,
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
    stride_ob,
    stride_oh,
    stride_os,
    stride_bias_b,
    stride_bias_h,
    stride_bias_s,
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

    n_max = seqlen_kv

    bias_queries = tl.minimum(queries, seqlen_q - 1)
    scale_log2 = scale * LOG2_E
    # Offsets of a bias over all pairs exceed 2^31. Offsets within a tile do not.
    bias_base = bias + sequence.to(tl.int64) * stride_bias_b + head * stride_bias_h + first_query * stride_bias_s
    bias_rows = ((bias_queries - first_query) * stride_bias_s).to(tl.int32)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, 128], tl.float32)

    # Blocks that all queries of the tile see whole.
    for start in tl.range(0, n_max, BLOCK_N):
        keys = start + key_offsets
        # [BLOCK_N, 128]
        k_tile = tl.load(
            k_base + keys[:, None] * stride_ks + columns_128[None, :],
            mask=(keys < seqlen_kv)[:, None],
            other=0.0,
        )
        s = tl.dot(q_tile, k_tile.T)
        visible = (keys < seqlen_kv)[None, :]
        bias_at = bias_base + (bias_rows[:, None] + keys[None, :])
        visible &= tl.load(bias_at, mask=(keys < seqlen_kv)[None, :], other=0) != 0
        s = tl.where(visible, s, float("-inf"))
        p, rescale, running_max, running_sum = softmax_step(s, running_max, running_sum, scale_log2)
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


def launch_plan(q, k, v, out, bias):
    """Grid, shapes of float32 workspaces, and the kernel's arguments from `stride_qb` on."""
    batch, heads, seqlen_q, _ = q.shape
    kv_heads, seqlen_kv = k.shape[1], k.shape[2]
    grid = (triton.cdiv(seqlen_q, 64) * heads * batch,)
    strides = [tensor.stride(axis) for tensor in (q, k, v, out) for axis in (0, 1, 2)]
    strides += [
        bias.stride(0),
        bias.stride(1),
        bias.stride(2),
    ]
    return grid, (), (*strides, heads, heads // kv_heads, heads * batch, seqlen_q, seqlen_kv)


def attention(q, k, v, scale=None, *, bias):
    """Returns the output [batch, heads, seqlen_q, value_head_dim] and the log-sum-exp of each row.

    q, k, v           [batch, heads, seqlen, head_dim] with a contiguous last dimension
    The checks state the dtype and the shape of each input. The log-sum-exp is None: this kernel does not write it.
    """
    # The kernel itself checks nothing: other sizes, types or strides would read and write other memory.
    large = [("q", q), ("k", k), ("v", v)]
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
        ("q", q, dtype, (*rows, 128)),
        ("k", k, dtype, (*keys, 128)),
        ("v", v, dtype, (*keys, 128)),
        ("bias", bias, torch.bool, (*rows, *k.shape[2:3])),
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
    # Offsets within a batch have 32 bits.
    span = sum((bias.shape[i] - 1) * bias.stride(i) for i in (1, 2, 3)) + 1024 * (bias.stride(2) + 1)
    if span >= 2**31:
        raise ValueError(f"bias spans {span} elements in one batch, expected fewer than 2**31")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if scale < 0:
        q, scale = -q, -scale
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = None
    if out.numel() == 0 or k.shape[2] == 0:
        return out.zero_(), lse
    side = (bias,)
    grid, workspace_shapes, integers = launch_plan(q, k, v, out, *side)
    workspaces = [torch.empty(shape, dtype=torch.float32, device=q.device) for shape in workspace_shapes]
    forward_masked[grid](
        *(q, k, v, out, out if lse is None else lse),
        *side,
        *workspaces,
        max(scale, 1e-30),
        *integers,
        num_warps=4,
        num_stages=1,
    )
    return out, lse
