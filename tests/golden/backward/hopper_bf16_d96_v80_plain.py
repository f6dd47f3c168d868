"""Attention backward on Hopper, in Gluon: a producer warp and two consumer warpgroups.

Problem      bf16, head dim 96, value head dim 80, causal none, dropout False, deterministic False,
             gradient of lse False
Config       block_m 64, block_n 128, num_stages 3, do_stages 2, ds_stages 2, early_dv True,
             defer_dp_wait False, early_dk False, init_accumulators False, defer_dq False, alternate_dq False,
             stagger_start True, interleaved_heads 1
Assumes      addresses and strides that are multiples of 16 bytes
Template     backward_hopper 4523bd87ee3f

Algorithm
  prepare:   delta = rowsum(dout * out); sums of dq = 0
  main:      for each 128 keys of a KV head, in parallel:
               load k and v; dk = dv = 0
               for each query head of the KV head, and each block of queries from the diagonal on:
                 s^T = k q^T         p^T = exp(scale * s^T - lse)        dv += p^T dout
                 dp^T = v dout^T     ds^T = p^T * (dp^T - delta)         dk += ds^T q
                 sums of dq += ds k
               store scale * dk and dv
  finish:    dq = scale * sums of dq

The loop order is that of FlashAttention-2 (Dao, 2023) and the warp roles are those of FlashAttention-3 (Shah et al.,
2024). Scores are transposed, so that p^T and ds^T are left operands in registers. With dropout, p and dp are divided by
1 - dropout: rows of workspace_0 hold lse + log(1 - dropout) and delta * (1 - dropout) instead.

Notation
  workspace_0        of each head a row -lse / scale (init_accumulators) or -lse in units of log2, a row -delta, and
                     with dropout two rows of random words: float32 [batch * heads * 2, queries in whole blocks]
  workspace_1        sums of dq: float32 [batch * heads, blocks, BLOCK_M * WIDTH], see `finish` for their order
  workspace_2        if deterministic, blocks of keys that have added to each part of dq:
                     int32 [batch * heads, blocks, 2]
  *_desc             TMA descriptor
  *_tiles            ring of tiles in shared memory
  *_full, *_empty    its barriers: a tile has arrived, a tile may be overwritten
  *_stage, *_phase   next slot of a ring, and the parity of its barriers
  d*                 gradient of *: do of the output, ds of the scores
Tunables
  BLOCK_M            queries of a block
  Q_STAGES           tiles of q in shared memory
  DO_STAGES          tiles of dout
  DS_STAGES          tiles of ds^T of each warpgroup; in tiles of 256 columns, of p^T and of ds^T
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Triton 3.9 renamed the copies.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

BLOCK_M = gl.constexpr(64)
# Keys of a warpgroup.
ROWS = gl.constexpr(64)
# Columns of a tile. Columns beyond the head dims are zeros.
WIDTH = gl.constexpr(128)
Q_STAGES = gl.constexpr(3)
DO_STAGES = gl.constexpr(2)
DS_STAGES = gl.constexpr(2)
# Bytes of a tile of queries with its row of workspace_0, of one of dout with three rows, and of a warpgroup's keys.
QUERY_BYTES = gl.constexpr(16640)
KEY_BYTES = gl.constexpr(16384)
# Bytes of a block of sums, and of half of it.
SUM_BYTES = gl.constexpr(32768)
HALF_BYTES = gl.constexpr(16384)
LOG2_E = gl.constexpr(1.4426950408889634)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
KEY_GRADS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
QUERY_GRADS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, KEY_GRADS, 2))
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


def write_addition(count):
    """Returns PTX by which a thread adds `count` registers to global memory, 4 at a time, 512 bytes for each warp.

    Operands: an unused result for every four registers, set to zero; the registers; `count` times the address of the
    tile.
    """
    quads = count // 4
    lines = ["{ .reg .b32 thread; .reg .b64 place; mov.u32 thread, %tid.x; and.b32 thread, thread, 127;"]
    lines.append(f"mul.wide.u32 place, thread, 16; add.s64 place, place, ${quads + count};")
    for quad in range(quads):
        values = ", ".join(f"${quads + 4 * quad + index}" for index in range(4))
        lines.append(f"red.relaxed.gpu.global.add.v4.f32 [place + {2048 * quad}], {{{values}}};")
    lines += [f"mov.b32 ${quad}, 0;" for quad in range(quads)]
    return " ".join([*lines, "}"])


# Registers of a thread in the part of a block of dq that a warpgroup adds.
SUMS = gl.constexpr(32)
ADDITION = gl.constexpr(write_addition(32))
ADDITION_OPERANDS = gl.constexpr(",".join(["=r"] * 8 + ["f"] * 32 + ["l"] * 32))


@gluon.jit
def next_slot(stage, phase, STAGES: gl.constexpr):
    """Returns the next slot of a ring and its parity, which changes each time around."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def hidden(value):
    """Returns a number that the compiler takes for a new one each time, so that it does not keep derived values."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], gl.int32, False, 1)


@gluon.jit
def fresh_zeros():
    """Returns zeros that the compiler does not know as constants: they are written here, not next to a product in flight."""
    zeros = gl.zeros([ROWS, WIDTH], gl.float32, KEY_GRADS)
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=f,f", [zeros], gl.float32, False, 1)


@gluon.jit
def add_sums(address, values):
    """Adds a part of a block of dq to the sums, in the order of the registers."""
    gl.inline_asm_elementwise(ADDITION, ADDITION_OPERANDS, [values, address], gl.int8, False, SUMS)


@gluon.jit
def locate(blocks, kv_heads):
    """Returns this program's block of keys, batch and KV head."""
    # Neighbours share a head. Under a causal mask the longest programs of a head are first.
    block = gl.program_id(0) % blocks
    head = gl.program_id(0) // blocks
    return block, head // kv_heads, head % kv_heads


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, do_desc, stats_desc, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles,
    delta_tiles, q_full, q_empty, do_full, do_empty, kv_full, blocks, kv_heads, group_size, seqlen_q,
    diagonal,
):
    """Loads k and v once, then q and dout block by block, with their rows of workspace_0."""
    block, batch, kv_head = locate(blocks, kv_heads)
    end = (seqlen_q + BLOCK_M - 1) // BLOCK_M
    start = block * 0
    m_block = block % end
    # LLVM must see that there is a step. Otherwise it copies accumulators for the case without steps.
    steps = gl.maximum((end - start) * group_size, 1)
    head = kv_head * group_size
    q_stage, q_phase = 0, 1
    do_stage, do_phase = 0, 1
    for step in range(steps):
        row = m_block * BLOCK_M
        stat = (batch * kv_heads * group_size + head) * 2
        if step == 0:
            for group in gl.static_range(2):
                mbarrier.expect(kv_full.index(2 * group), KEY_BYTES)
                place = [batch, kv_head, (block * 2 + group) * ROWS, 0]
                copy_in(k_desc, place, kv_full.index(2 * group), k_tiles.index(group))
        mbarrier.wait(q_empty.index(q_stage), q_phase)
        mbarrier.expect(q_full.index(q_stage), QUERY_BYTES)
        copy_in(q_desc, [batch, head, row, 0], q_full.index(q_stage), q_tiles.index(q_stage))
        copy_in(stats_desc, [stat, row], q_full.index(q_stage), lse_tiles.index(q_stage))
        q_stage, q_phase = next_slot(q_stage, q_phase, Q_STAGES)
        if step == 0:
            for group in gl.static_range(2):
                mbarrier.expect(kv_full.index(2 * group + 1), KEY_BYTES)
                place = [batch, kv_head, (block * 2 + group) * ROWS, 0]
                copy_in(v_desc, place, kv_full.index(2 * group + 1), v_tiles.index(group))
        mbarrier.wait(do_empty.index(do_stage), do_phase)
        mbarrier.expect(do_full.index(do_stage), QUERY_BYTES)
        copy_in(do_desc, [batch, head, row, 0], do_full.index(do_stage), do_tiles.index(do_stage))
        copy_in(stats_desc, [stat + 1, row], do_full.index(do_stage), delta_tiles.index(do_stage))
        do_stage, do_phase = next_slot(do_stage, do_phase, DO_STAGES)
        m_block += 1
        m_block = gl.where(m_block == end, 0, m_block)
        head = kv_head * group_size + (step + 1) // end


@gluon.jit
def issue_query_grads(GROUP: gl.constexpr, k_tiles, ds_tiles, ds_full, ds_stage, ds_phase):
    """Issues dq of a step, from the keys of both groups: this group's half, or all of it (alternate_dq).

    In tiles of 64 columns it is transposed, and halves are queries. In wider tiles halves are columns.
    """
    sums = gl.zeros([64, 64], gl.float32, QUERY_GRADS)
    for turn in gl.static_range(2):
        # ds of this group is complete first.
        source = GROUP if turn == 0 else 1 - GROUP
        slot = source * DS_STAGES + ds_stage
        mbarrier.wait(ds_full.index(slot), ds_phase)
        k_tile = k_tiles.index(hidden(source)).reshape([ROWS, WIDTH])
        ds_tile = ds_tiles.index(slot)
        k_half = k_tile.slice(GROUP * 64, 64, 1)
        sums = warpgroup_mma(ds_tile.permute((1, 0)), k_half, sums, use_acc=turn > 0, is_async=True)
    return sums


@gluon.jit
def consume(
    GROUP: gl.constexpr,
    q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles, ds_tiles, q_full, q_empty, do_full,
    do_empty, kv_full, ds_full, ds_empty, dk_desc, dv_desc, sums, scale, blocks, kv_heads, group_size,
    seqlen_q, seqlen_kv, diagonal,
):
    """Computes dk and dv of this group's keys, and adds half of each block of dq, or every second block (alternate_dq)."""
    block, batch, kv_head = locate(blocks, kv_heads)
    first_key = (block * 2 + GROUP) * ROWS
    end = (seqlen_q + BLOCK_M - 1) // BLOCK_M
    start = block * 0
    m_block = block % end
    # LLVM must see that there is a step. Otherwise it copies accumulators for the case without steps.
    steps = gl.maximum((end - start) * group_size, 1)
    scale_log2 = scale * LOG2_E
    nothing = gl.zeros([ROWS, BLOCK_M], gl.float32, SCORES)
    dk = fresh_zeros()
    dv = fresh_zeros()
    keys = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    # Blocks before this one need a mask: sequences end within them, or they cross the diagonal.
    open_from = gl.where(first_key + ROWS > seqlen_kv, end, 0)

    q_stage, q_phase = 0, 0
    do_stage, do_phase = 0, 0
    ds_stage, ds_phase = 0, 0
    first_block = ((batch * kv_heads + kv_head) * group_size).to(gl.int64) * end + m_block
    address = sums.to(gl.int64, bitcast=True) + first_block * SUM_BYTES + GROUP * HALF_BYTES
    mbarrier.wait(kv_full.index(2 * GROUP), 0)
    # The other group's keys, for dq.
    mbarrier.wait(kv_full.index(2 * (1 - GROUP)), 0)
    mbarrier.wait(q_full.index(0), 0)
    k_tile = k_tiles.index(hidden(GROUP)).reshape([ROWS, WIDTH])
    scores = warpgroup_mma(
        k_tile, q_tiles.index(q_stage).reshape([BLOCK_M, WIDTH]).permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    mbarrier.wait(kv_full.index(2 * GROUP + 1), 0)
    for step in range(steps):
        q_tile = q_tiles.index(q_stage).reshape([BLOCK_M, WIDTH])
        do_tile = do_tiles.index(do_stage).reshape([BLOCK_M, WIDTH])
        mbarrier.wait(do_full.index(do_stage), do_phase)
        # Products stay asynchronous only if the first wait in the loop leaves none in flight.
        scores = warpgroup_mma_wait(0, deps=[scores])
        v_tile = v_tiles.index(hidden(GROUP)).reshape([ROWS, WIDTH])
        dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        weights = gl.exp2(scores * scale_log2 + lse_tiles.index(q_stage).load(SCORES))
        if m_block < open_from:
            weights = gl.where((keys < seqlen_kv - first_key)[:, None], weights, 0.0)
        low_weights = weights.to(gl.bfloat16)
        dv = warpgroup_mma(gl.convert_layout(low_weights, WEIGHTS), do_tile, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        dp += delta_tiles.index(do_stage).load(SCORES)
        ds = (weights * dp).to(gl.bfloat16)
        mbarrier.wait(ds_empty.index(ds_stage), ds_phase ^ 1)
        ds_tiles.index(GROUP * DS_STAGES + ds_stage).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(GROUP * DS_STAGES + ds_stage))
        dk = warpgroup_mma(gl.convert_layout(ds, WEIGHTS), q_tile, dk, is_async=True)
        dq = issue_query_grads(GROUP, k_tiles, ds_tiles, ds_full, ds_stage, ds_phase)
        # Both products of dq may still be in flight.
        dv, dk = warpgroup_mma_wait(2, deps=[dv, dk])
        mbarrier.arrive(do_empty.index(do_stage))
        mbarrier.arrive(q_empty.index(q_stage))
        q_stage, q_phase = next_slot(q_stage, q_phase, Q_STAGES)
        do_stage, do_phase = next_slot(do_stage, do_phase, DO_STAGES)
        # The scores of the next block. After the last one they are computed from any data and not used.
        mbarrier.wait(q_full.index(q_stage), q_phase, pred=step + 1 < steps)
        k_tile = k_tiles.index(hidden(GROUP)).reshape([ROWS, WIDTH])
        scores = warpgroup_mma(
            k_tile, q_tiles.index(q_stage).reshape([BLOCK_M, WIDTH]).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        dq = warpgroup_mma_wait(1, deps=[dq])
        mbarrier.arrive(ds_empty.index(ds_stage))
        add_sums(address, dq)
        ds_stage, ds_phase = next_slot(ds_stage, ds_phase, DS_STAGES)
        m_block += 1
        address += SUM_BYTES
        wraps = m_block == end
        m_block = gl.where(wraps, 0, m_block)
        address = gl.where(wraps, address - end.to(gl.int64) * SUM_BYTES, address)
        # The next head, after all blocks of this one.
        address = gl.where(m_block == block % end, address + end.to(gl.int64) * SUM_BYTES, address)
    scores = warpgroup_mma_wait(0, deps=[scores])

    # This group's v is not needed any more: gradients leave through its memory.
    v_tiles.index(GROUP).reshape([ROWS, WIDTH]).store(dv.to(gl.bfloat16))
    fence_async_shared()
    copy_out(dv_desc, [batch, kv_head, first_key, 0], v_tiles.index(GROUP))
    low_dk = (dk * scale).to(gl.bfloat16)
    tma.store_wait(0)
    v_tiles.index(GROUP).reshape([ROWS, WIDTH]).store(low_dk)
    fence_async_shared()
    copy_out(dk_desc, [batch, kv_head, first_key, 0], v_tiles.index(GROUP))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["blocks", "kv_heads", "group_size", "seqlen_q", "seqlen_kv", "diagonal"])
def backward_hopper(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    stats_desc,
    dk_desc,
    dv_desc,
    workspace_1,
    scale,
    blocks,
    kv_heads,
    group_size,
    seqlen_q,
    seqlen_kv,
    diagonal,
):
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    STATS: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    DS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [Q_STAGES, 1, 1, BLOCK_M, WIDTH], TILE)
    do_tiles = gl.allocate_shared_memory(gl.bfloat16, [DO_STAGES, 1, 1, BLOCK_M, WIDTH], TILE)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 1, 1, ROWS, WIDTH], TILE)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 1, 1, ROWS, WIDTH], TILE)
    ds_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * DS_STAGES, ROWS, BLOCK_M], DS)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [Q_STAGES, 1, BLOCK_M], STATS)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [DO_STAGES, 1, BLOCK_M], STATS)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [DO_STAGES, 1], BARRIER)
    do_empty = gl.allocate_shared_memory(gl.int64, [DO_STAGES, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [2 * DS_STAGES, 1], BARRIER)
    ds_empty = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], BARRIER)
    for slot in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(slot), count=1)
    for slot in gl.static_range(Q_STAGES):
        mbarrier.init(q_empty.index(slot), count=2)
    for slot in gl.static_range(DO_STAGES):
        mbarrier.init(do_full.index(slot), count=1)
    for slot in gl.static_range(DO_STAGES):
        mbarrier.init(do_empty.index(slot), count=2)
    for slot in gl.static_range(4):
        mbarrier.init(kv_full.index(slot), count=1)
    for slot in gl.static_range(2 * DS_STAGES):
        mbarrier.init(ds_full.index(slot), count=1)
    for slot in gl.static_range(DS_STAGES):
        mbarrier.init(ds_empty.index(slot), count=2)
    fence_async_shared()
    sums = workspace_1
    gl.warp_specialize(
        [
            (
                consume,
                (
                    0,
                    q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles, ds_tiles, q_full, q_empty,
                    do_full, do_empty, kv_full, ds_full, ds_empty, dk_desc, dv_desc, sums, scale, blocks,
                    kv_heads, group_size, seqlen_q, seqlen_kv, diagonal,
                ),
            ),
            (
                consume,
                (
                    1,
                    q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles, ds_tiles, q_full, q_empty,
                    do_full, do_empty, kv_full, ds_full, ds_empty, dk_desc, dv_desc, sums, scale, blocks,
                    kv_heads, group_size, seqlen_q, seqlen_kv, diagonal,
                ),
            ),
            (
                produce,
                (
                    q_desc, k_desc, v_desc, do_desc, stats_desc, q_tiles, k_tiles, v_tiles, do_tiles,
                    lse_tiles, delta_tiles, q_full, q_empty, do_full, do_empty, kv_full, blocks, kv_heads,
                    group_size, seqlen_q, diagonal,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


@triton.jit
def prepare(
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
    # One block of queries: its rows of workspace_0, and zeros for its sums.
    tiles = tl.cdiv(seqlen_q, 64)
    tile = tl.program_id(0) % tiles
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    batch = batch_head // heads
    head = batch_head % heads
    queries = tile * 64 + tl.arange(0, 64)
    columns = tl.arange(0, 128)
    query_exists = queries < seqlen_q
    exists = query_exists[:, None] & (columns < 80)[None, :]
    out_at = out + batch * stride_ob + head * stride_oh + queries.to(tl.int64)[:, None] * stride_os + columns[None, :]
    dout_at = dout + batch * stride_dob + head * stride_doh + queries.to(tl.int64)[:, None] * stride_dos + columns[None, :]
    out_tile = tl.load(out_at, mask=exists, other=0.0)
    dout_tile = tl.load(dout_at, mask=exists, other=0.0)
    row_delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    row_lse = tl.load(lse + batch_head * seqlen_q + queries, mask=query_exists, other=float("inf"))
    # A row without visible keys, and one beyond the end, have probabilities of zero.
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
    stats = workspace_0 + batch_head * 2 * tiles * 64 + queries
    tl.store(stats, row_lse * -1.4426950408889634)
    tl.store(stats + tiles * 64, -row_delta)
    numbers = tl.program_id(0).to(tl.int64) * 8192 + tl.arange(0, 8192)
    tl.store(workspace_1 + numbers, tl.zeros([8192], tl.float32))
    # The counters of additions start at zero, in any type.


@triton.jit
def finish(workspace_1, dq, scale, stride_dqb, stride_dqh, stride_dqs, heads, seqlen_q):
    # One block of sums becomes rows of dq.
    tiles = tl.cdiv(seqlen_q, 64)
    tile = tl.program_id(0) % tiles
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    numbers = tl.program_id(0).to(tl.int64) * 8192 + tl.arange(0, 8192)
    sums = (tl.load(workspace_1 + numbers) * scale).to(dq.dtype.element_ty)
    # Halves, eights of columns, warps, rows of a warp, pairs of columns, the same 8 rows below, columns of a pair.
    sums = sums.reshape([2, 8, 4, 8, 4, 2, 2])
    # Halves of the columns.
    dq_tile = sums.permute((2, 5, 3, 0, 1, 4, 6)).reshape([64, 128])
    queries = tile * 64 + tl.arange(0, 64)
    columns = tl.arange(0, 128)
    exists = (queries < seqlen_q)[:, None] & (columns < 96)[None, :]
    dq_base = dq + batch_head // heads * stride_dqb + batch_head % heads * stride_dqh
    tl.store(dq_base + queries.to(tl.int64)[:, None] * stride_dqs + columns[None, :], dq_tile, mask=exists)


def descriptors(q, k, v, out, dout, dq, dk, dv, workspace_0, workspace_1):
    """Returns the TMA descriptors of each tensor. TMA reads zeros beyond its ends, and writes nothing there."""

    def rows(tensor, count):
        shape, strides = [*tensor.shape], [*tensor.stride()[:3], 1]
        return (TensorDescriptor(tensor, shape, strides, [1, 1, count, 128], gl.NVMMASharedLayout(128, 16, 4)),)

    stats = TensorDescriptor(
        workspace_0, [*workspace_0.shape], [*workspace_0.stride()], [1, 64], gl.NVMMASharedLayout(0, 32, 2)
    )
    return {
        "q": rows(q, 64),
        "k": rows(k, 64),
        "v": rows(v, 64),
        "dout": rows(dout, 64),
        "workspace_0": (stats,),
        "dk": rows(dk, 64),
        "dv": rows(dv, 64),
    }


def prologue_plan(q, k, v, out, dout, dq, dk, dv):
    """Returns the grid of `prepare` and its integers."""
    batch, heads, seqlen_q, _ = q.shape
    strides = [tensor.stride(axis) for tensor in (out, dout) for axis in (0, 1, 2)]
    return (triton.cdiv(seqlen_q, 64) * batch * heads,), (*strides, heads, seqlen_q)


def launch_plan(q, k, v, out, dout, dq, dk, dv):
    """Returns the grid of the main kernel, the shapes of float32 workspaces, and its integers."""
    batch, heads, seqlen_q, _ = q.shape
    kv_heads, seqlen_kv = k.shape[1], k.shape[2]
    blocks = triton.cdiv(seqlen_kv, 128)
    tiles = triton.cdiv(seqlen_q, 64)
    workspaces = ((batch * heads * 2, tiles * 64), (batch * heads, tiles, 8192))
    # Keys that query 0 sees besides key 0.
    diagonal = 0
    return (blocks * batch * kv_heads,), workspaces, (blocks, kv_heads, heads // kv_heads, seqlen_q, seqlen_kv, diagonal)


def epilogue_plan(q, k, v, out, dout, dq, dk, dv):
    """Returns the grid of `finish` and its integers."""
    batch, heads, seqlen_q, _ = q.shape
    strides = [dq.stride(axis) for axis in (0, 1, 2)]
    return (triton.cdiv(seqlen_q, 64) * batch * heads,), (*strides, heads, seqlen_q)


def attention_backward(q, k, v, out, lse, dout, scale=None):
    """Returns the gradients dq, dk and dv of attention, with the shapes of q, k and v.

    q, out, dout   [batch, heads, seqlen_q, head dim] with a contiguous last dimension
    k, v           [batch, kv_heads, seqlen_kv, head dim]
    lse, dlse      log-sum-exp of each row and its gradient, float32 [batch, heads, seqlen_q], contiguous
    seed           int64 [1], the forward pass's
    dropout        share of dropped weights
    """
    # The kernel itself checks nothing: other sizes, types or strides would read and write other memory.
    dtype = torch.bfloat16
    large = [("q", q), ("k", k), ("v", v), ("out", out), ("dout", dout)]
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
        ("q", q, dtype, (*rows, 96)),
        ("k", k, dtype, (*keys, 96)),
        ("v", v, dtype, (*keys, 80)),
        ("out", out, dtype, (*rows, 80)),
        ("dout", dout, dtype, (*rows, 80)),
        ("lse", lse, torch.float32, rows),
    ):
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
        if any(stride % 8 for stride in tensor.stride()[:3]):
            raise ValueError(f"{name} has strides {tensor.stride()}, expected multiples of 8 before the last")
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name} has the address {tensor.data_ptr()}, expected a multiple of 16")
        # Offsets have 32 bits. A tile may lie past the end of a sequence by 1,024 masked rows.
        span = 1024 * tensor.stride(2) + sum((tensor.shape[i] - 1) * tensor.stride(i) for i in range(4))
        if span >= 2**31:
            raise ValueError(f"{name} spans {span} elements, expected fewer than 2**31")
    if not q.is_cuda:
        raise ValueError(f"q is on {q.device}, expected a GPU")
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
    prepare[first_grid](
        out,
        dout,
        lse,
        *workspaces,
        *first_integers,
        num_warps=4,
        num_stages=1,
    )
    backward_hopper[grid](
        *(one for parts in descriptors(*planned, *workspaces).values() for one in parts),
        *workspaces[1:],
        scale,
        *integers,
        num_warps=4,
        num_stages=3,
    )
    finish[last_grid](workspaces[1], dq, scale, *last_integers, num_warps=4, num_stages=1)
    return -dq if negative else dq, dk, dv
