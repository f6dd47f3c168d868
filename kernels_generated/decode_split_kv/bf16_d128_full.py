# A stand-alone kernel by flashtune; it needs torch and triton alone.
# `attention` runs it. Selected on nvidia-h100 and nvidia-h200.

"""Attention of few queries over many keys: keys are split among programs, and a second kernel combines the parts.

Computes     bf16, head dim 128, value head dim 128, causal: none
With         no features
Config       block_m 16, block_n 128, 2 warps, 2 stages, 33 splits,
             split_head_dim False, early_combine True, early_start False
Assumes      strides that are multiples of 16, 32-bit offsets
Template     decode_split_kv 3c1f3e0c9856

The rows of a tile are queries and the heads that share a KV head: row r is query r // group_size of head
r % group_size. The softmax is online (Milakov and Gimelshein, 2018), in base 2. Parts of the keys are
combined by their log-sum-exps, as in flash-decoding (Dao et al., 2023), always in the same order.

Algorithm of one program
  q_tile = rows of q
  for each block of BLOCK_N keys in this program's part of the visible keys:
      s = q_tile @ k_tile.T, and -inf where hidden
      new_max = max(running_max, rows of s)
      p, rescale = exp2(s - new_max), exp2(running_max - new_max)
      running_max, running_sum = new_max, running_sum * rescale + sum(p)
      accumulator = accumulator * rescale + p @ v_tile
  out = accumulator / running_sum;  lse = running_max + log2(running_sum)
`combine` adds the parts' outputs, each times exp2(its lse - log-sum-exp of all parts).

Notation
  stride_qb, stride_qh, stride_qs   elements between batches, heads and positions of q; k, v, o alike
  *_tile*                           a block in registers or shared memory, its shape in a comment
  *_log2                            a quantity in units of log2, so that exp2 replaces exp
  slots                             positions of a block's keys in memory; beyond the last key, its position
Tunables
  BLOCK_M, BLOCK_N                  rows and keys of a tile
  splits                            parts of the keys of a sequence
  early_combine                     combine kernel launched before the splits end
"""

import torch
import triton
import triton.language as tl

BLOCK_M = tl.constexpr(16)
BLOCK_N = tl.constexpr(128)
HEAD_DIM = tl.constexpr(128)
VALUE_HEAD_DIM = tl.constexpr(128)
LOG2_E = tl.constexpr(1.4426950408889634)
# Splits that are combined together, and columns of a combine program.
SPLIT_TILE = tl.constexpr(64)
COMBINED = tl.constexpr(128)


@triton.jit
def softmax_step(s, running_max, running_sum, scale_log2):
    """Returns p of a block of scores, the factor of earlier sums and outputs, the new row maxima and row sums."""
    new_max = tl.maximum(running_max, tl.max(s, 1) * scale_log2)
    shift = new_max
    p = tl.exp2(s * scale_log2 - shift[:, None])
    rescale = tl.exp2(running_max - shift)
    return p, rescale, new_max, running_sum * rescale + tl.sum(p, 1)


@triton.jit
def decode_split_kv(
    q,
    k,
    v,
    out,
    lse,
    partial_out,
    partial_lse,
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
    splits,
):
    # The tile of rows, the KV head and sequence, and the part of the keys. Tiles are innermost: programs that
    # read the same keys run together.
    all_rows = all_heads * seqlen_q
    tiles = tl.cdiv(seqlen_q * group_size, BLOCK_M)
    kv_heads = heads // group_size
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles % splits
    sequence_head = tl.program_id(0) // tiles // splits
    kv_head = sequence_head % kv_heads
    sequence = sequence_head // kv_heads
    row_offsets = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_exists = row_offsets < seqlen_q * group_size
    # Rows after the last one repeat it, so that queries are loaded without a mask too.
    row_offsets = tl.minimum(row_offsets, seqlen_q * group_size - 1)
    queries = row_offsets // group_size
    head = kv_head * group_size + row_offsets % group_size
    key_offsets = tl.arange(0, BLOCK_N)
    columns_128 = tl.arange(0, 128)

    k_base = k + sequence * stride_kb + kv_head * stride_kh
    v_base = v + sequence * stride_vb + kv_head * stride_vh
    k_block = k_base
    v_block = v_base
    q_rows = q + sequence * stride_qb + head * stride_qh + queries * stride_qs
    # [BLOCK_M, 128]
    q_tile = tl.load(
        q_rows[:, None] + columns_128[None, :],
    )

    n_max = seqlen_kv
    blocks = tl.cdiv(tl.maximum(n_max, 0), BLOCK_N)

    scale_log2 = scale * LOG2_E
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, 128], tl.float32)

    first = split * blocks // splits * BLOCK_N
    last = (split + 1) * blocks // splits * BLOCK_N
    for start in tl.range(first, last, BLOCK_N):
        keys = start + key_offsets
        # Loads need no mask: it costs each of them more than a key that is read twice.
        slots = tl.minimum(keys, seqlen_kv - 1)
        # [BLOCK_N, 128]
        k_tile = tl.load(
            k_block + slots[:, None] * stride_ks + columns_128[None, :],
        )
        s = tl.dot(q_tile, k_tile.T)
        visible = (keys < seqlen_kv)[None, :]
        s = tl.where(visible, s, float("-inf"))
        p, rescale, running_max, running_sum = softmax_step(s, running_max, running_sum, scale_log2)
        p_low = p.to(q.dtype.element_ty)
        # [BLOCK_N, 128]
        v_tile = tl.load(
            v_block + slots[:, None] * stride_vs + columns_128[None, :],
        )
        accumulator = tl.dot(p_low, v_tile, accumulator * rescale[:, None])

    # The next kernel may start while the last programs of this one run.
    tl.extra.cuda.gdc_launch_dependents()
    # Rows without a visible key have a sum of zero: their output is zero and their log-sum-exp -inf.
    divisor = tl.where(running_sum == 0.0, 1.0, running_sum)
    row_lse = running_max + tl.log2(running_sum)
    out_rows = split * all_rows + (sequence * seqlen_q + queries) * heads + head
    tl.store(partial_lse + out_rows, row_lse, mask=row_exists)
    o_rows = partial_out + out_rows.to(tl.int64) * VALUE_HEAD_DIM
    o_tile = accumulator / divisor[:, None]
    tl.store(
        o_rows[:, None] + columns_128[None, :],
        o_tile,
        mask=row_exists[:, None],
    )


@triton.jit
def combine(
    out,
    lse,
    partial_out,
    partial_lse,
    stride_ob,
    stride_oh,
    stride_os,
    heads,
    seqlen_q,
    rows,
    splits,
):
    # One row of the output, of some columns: row r is head r % heads of token r // heads.
    row = tl.program_id(0)
    columns = tl.program_id(1) * COMBINED + tl.arange(0, COMBINED)
    head = row % heads
    sequence = row // heads // seqlen_q
    query = row // heads % seqlen_q
    parts = tl.arange(0, SPLIT_TILE)
    part_rows = parts * rows + row
    tl.extra.cuda.gdc_wait()
    # [SPLIT_TILE]
    part_lse = tl.load(partial_lse + part_rows, mask=parts < splits, other=float("-inf"))
    # [SPLIT_TILE, COMBINED]
    part_out = tl.load(
        partial_out + part_rows.to(tl.int64)[:, None] * VALUE_HEAD_DIM + columns[None, :],
        mask=(parts < splits)[:, None] & (columns < VALUE_HEAD_DIM)[None, :],
        other=0.0,
    )
    largest = tl.max(part_lse, 0)
    # If no part has a visible key, the largest is -inf, and -inf - -inf would be NaN.
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(part_lse - shift)
    total = tl.sum(weights, 0)
    combined = tl.sum(part_out * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    o_base = out + sequence * stride_ob + head * stride_oh + query * stride_os
    tl.store(o_base + columns, combined.to(out.dtype.element_ty), mask=columns < VALUE_HEAD_DIM)


def launch_plan(q, k, v, out):
    """Grid, shapes of float32 workspaces, and the kernel's arguments from `stride_qb` on."""
    batch, heads, seqlen_q, _ = q.shape
    kv_heads, seqlen_kv = k.shape[1], k.shape[2]
    group_size = heads // kv_heads
    tiles = triton.cdiv(seqlen_q * group_size, 16) * batch
    grid = (tiles * kv_heads * 33,)
    rows = batch * heads * seqlen_q
    workspaces = ((33, rows, 128), (33, rows))
    strides = [tensor.stride(axis) for tensor in (q, k, v, out) for axis in (0, 1, 2)]
    counts = (heads, group_size, heads * batch, seqlen_q, seqlen_kv, 33)
    return grid, workspaces, (*strides, *counts)


def epilogue_plan(q, k, v, out):
    """Grid of `combine`, and its arguments from `stride_ob` on."""
    batch, heads, seqlen_q, _ = q.shape
    rows = batch * heads * seqlen_q
    grid = (rows, 1)
    return grid, (*(out.stride(axis) for axis in (0, 1, 2)), heads, seqlen_q, rows, 33)


def attention(q, k, v, scale=None):
    """Returns the output [batch, heads, seqlen_q, value_head_dim] and the log-sum-exp of each row.

    q, k, v           [batch, heads, seqlen, head_dim] with a contiguous last dimension
    The checks state the dtype and the shape of each input. The log-sum-exp is None: this kernel does not write it.
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
    out = torch.empty(*q.shape[:3], 128, dtype=q.dtype, device=q.device)
    lse = None
    if out.numel() == 0 or k.shape[2] == 0:
        if lse is not None:
            lse.fill_(float("-inf"))
        return out.zero_(), lse
    tensors = (q, k, v, out)
    row_lse = out if lse is None else lse
    grid, workspace_shapes, integers = launch_plan(*tensors)
    workspaces = [torch.empty(shape, dtype=torch.float32, device=q.device) for shape in workspace_shapes]
    decode_split_kv[grid](
        *tensors[:4],
        row_lse,
        *tensors[4:],
        *workspaces,
        max(scale, 1e-30),
        *integers,
        num_warps=2,
        num_stages=2,
    )
    grid, integers = epilogue_plan(*tensors)
    combine[grid](out, row_lse, *workspaces, *integers, num_warps=4, num_stages=1, launch_pdl=True)
    return out, lse
