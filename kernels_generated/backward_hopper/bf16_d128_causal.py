# A stand-alone kernel by flashtune; it needs torch and triton alone.
# `attention_backward` runs it. Selected on nvidia-h100 and nvidia-h200.

"""Attention backward on Hopper, in Gluon: a producer warp and two consumer warpgroups.

Problem      bf16, head dim 128, value head dim 128, causal bottom_right
With         no features
Config       block_m 64, block_n 128, num_stages 2, do_stages 2, ds_stages 2, early_dv True,
             defer_dp_wait True, early_dk True, init_accumulators True, defer_dq True, alternate_dq True,
             stagger_start False, interleaved_heads 1
Assumes      addresses and strides that are multiples of 16 bytes
Template     backward_hopper 278da5fb757c

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
2024). Scores are transposed, so that p^T and ds^T are left operands in registers.

Notation
  workspace_0        of each head a row -lse / scale and a row -delta:
                     float32 [batch * heads * 2, queries in whole blocks]
  workspace_1        sums of dq: float32 [batch * heads, blocks, BLOCK_M * WIDTH], see `finish` for their order
  *_desc             TMA descriptor
  *_tiles            ring of tiles in shared memory
  *_full, *_empty    its barriers: a tile has arrived, a tile may be overwritten
  stage, phase       next slot of a ring, and the parity of its barriers
  d*                 gradient of *: do of the output, ds of the scores
Tunables
  BLOCK_M            queries of a block
  Q_STAGES           tiles of q in shared memory
  DO_STAGES          tiles of dout
  DS_STAGES          tiles of ds^T of each warpgroup
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

try:
    from triton.experimental.gluon import aggregate
except ImportError:  # before Triton 3.9
    from triton.language.core import _aggregate as aggregate

# Triton 3.9 renamed the copies.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

DTYPE = gl.constexpr(gl.bfloat16)
BLOCK_M = gl.constexpr(64)
# Keys of a warpgroup.
ROWS = gl.constexpr(64)
# Tiles of keys of a program.
KEY_TILES = gl.constexpr(2)
# Columns of a tile. Columns beyond the head dims are zeros.
WIDTH = gl.constexpr(128)
Q_STAGES = gl.constexpr(2)
DO_STAGES = gl.constexpr(2)
DS_STAGES = gl.constexpr(2)
# Bytes of a tile of queries with its row of workspace_0, of one of dout with three rows, and of a warpgroup's keys.
QUERY_BYTES = gl.constexpr(16640)
KEY_BYTES = gl.constexpr(16384)
# Bytes of a block of sums, and of half of it.
SUM_BYTES = gl.constexpr(32768)
LOG2_E = gl.constexpr(1.4426950408889634)
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
DK_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
DQ_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
P_OPERAND = gl.constexpr(gl.DotOperandLayout(0, DK_LAYOUT, 2))
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


@aggregate
class SharedMemory:
    """Tiles and barriers in shared memory."""

    q_tiles: gl.shared_memory_descriptor
    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    do_tiles: gl.shared_memory_descriptor
    lse_rows: gl.shared_memory_descriptor
    delta_rows: gl.shared_memory_descriptor
    ds_tiles: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    do_empty: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    ds_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, *fields):
        names = (
            "q_tiles", "k_tiles", "v_tiles", "do_tiles", "lse_rows", "delta_rows", "ds_tiles", "q_full",
            "q_empty", "do_full", "do_empty", "kv_full", "ds_full", "ds_empty",
        )
        for name, field in zip(names, fields):
            setattr(self, name, field)


@gluon.jit
def make_barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """Returns the barriers of a ring, each of which completes after some arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(slot), count=ARRIVALS)
    return barriers


@aggregate
class PipelineState:
    """The next slot of a ring of tiles, and the parity of its barriers."""

    stage: gl.tensor
    phase: gl.tensor

    @gluon.constexpr_function
    def __init__(self, *fields):
        names = (
            "stage", "phase",
        )
        for name, field in zip(names, fields):
            setattr(self, name, field)

    @gluon.jit
    def next(self, STAGES: gl.constexpr):
        """Returns the state after this one. The parity changes each time around."""
        wraps = self.stage == STAGES - 1
        return PipelineState(gl.where(wraps, 0, self.stage + 1), gl.where(wraps, self.phase ^ 1, self.phase))


@aggregate
class TileScheduler:
    """Assigns blocks of keys to programs, and blocks of queries to blocks of keys."""

    blocks: gl.tensor
    kv_heads: gl.tensor
    group_size: gl.tensor
    seqlen_q: gl.tensor
    seqlen_kv: gl.tensor
    diagonal: gl.tensor

    @gluon.constexpr_function
    def __init__(self, *fields):
        names = (
            "blocks", "kv_heads", "group_size", "seqlen_q", "seqlen_kv", "diagonal",
        )
        for name, field in zip(names, fields):
            setattr(self, name, field)

    @gluon.jit
    def get_tile(self):
        """Returns this program's block of keys, batch and KV head."""
        # Neighbours share a head. Under a causal mask the longest programs of a head are first.
        n_block = gl.program_id(0) % self.blocks
        head = gl.program_id(0) // self.blocks
        return n_block, head // self.kv_heads, head % self.kv_heads

    @gluon.jit
    def query_blocks(self, n_block):
        """Returns the range of a head's query blocks, the first one to process, and the number for all heads."""
        m_max = (self.seqlen_q + BLOCK_M - 1) // BLOCK_M
        # Blocks before the diagonal are skipped, except for one: there is always a step.
        n_start = n_block * (2 * ROWS)
        m_min = gl.minimum(gl.maximum(n_start - self.diagonal, 0) // BLOCK_M, m_max - 1)
        m_block = m_min
        # LLVM must see that there is a step. Otherwise it copies accumulators for the case without steps.
        return m_min, m_max, m_block, gl.maximum((m_max - m_min) * self.group_size, 1)

    @gluon.jit
    def first_full_block(self, n_start, m_max):
        """Returns the first query block that needs no mask for ROWS keys."""
        # Until the last block if the keys end within ROWS, and until the diagonal.
        full_min = gl.where(n_start + ROWS > self.seqlen_kv, m_max, 0)
        full_min = gl.maximum(full_min, (gl.maximum(n_start + ROWS - 1 - self.diagonal, 0) + BLOCK_M - 1) // BLOCK_M)
        return full_min

    @gluon.jit
    def mask(self, p, n_start, m_block, keys, queries):
        """Returns probabilities, [ROWS, BLOCK_M], with zeros for hidden pairs and beyond the last key."""
        # A query sees the keys up to its own position.
        limits = gl.minimum(m_block * BLOCK_M + self.diagonal - n_start + queries + 1, self.seqlen_kv - n_start)
        p = gl.where(keys[:, None] < limits[None, :], p, 0.0)
        return p


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
SUMS = gl.constexpr(64)
ADDITION = gl.constexpr(write_addition(64))
ADDITION_OPERANDS = gl.constexpr(",".join(["=r"] * 16 + ["f"] * 64 + ["l"] * 64))


@gluon.jit
def atomic_add(address, values):
    """Adds a part of a block of dq to the sums, in the order of the registers."""
    gl.inline_asm_elementwise(ADDITION, ADDITION_OPERANDS, [values, address], gl.int8, False, SUMS)


@gluon.jit
def add_dq(GROUP: gl.constexpr, shared, address, dq, number, pred):
    """Adds a part of a block of dq to the sums."""
    atomic_add(address, dq)


@gluon.jit
def opaque(value):
    """Returns a number that the compiler takes for a new one each time, so that it does not keep derived values."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], gl.int32, False, 1)


@gluon.jit
def opaque_zeros():
    """Returns zeros that the compiler does not know as constants: they are written here, not next to a product in flight."""
    zeros = gl.zeros([ROWS, WIDTH], gl.float32, DK_LAYOUT)
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=f,f", [zeros], gl.float32, False, 1)


@gluon.jit
def broadcast_row(row):
    """Returns a row, [1, BLOCK_M], for every key: the start of a product."""
    values, _ = gl.broadcast(row.load(S_LAYOUT), gl.zeros([ROWS, BLOCK_M], gl.float32, S_LAYOUT))
    # Each register is written here: copies made later would be between products, which ptxas would then serialise.
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [values], gl.float32, False, 1)


@gluon.jit
def issue_product(keys, index, queries, rows, stage):
    """Issues a product of keys and a block of queries, [ROWS, BLOCK_M], which starts at a row."""
    key_tile = keys.index(opaque(index)).reshape([ROWS, WIDTH])
    query_tile = queries.index(stage).reshape([BLOCK_M, WIDTH])
    start = broadcast_row(rows.index(stage))
    product = warpgroup_mma(key_tile, query_tile.permute((1, 0)), start, is_async=True)
    return product


@gluon.jit
def produce(q_desc, k_desc, v_desc, do_desc, stats_desc, shared, scheduler):
    """Loads k and v once, then q and dout block by block, with their rows of workspace_0."""
    n_block, batch, kv_head = scheduler.get_tile()
    m_min, m_max, m_block, steps = scheduler.query_blocks(n_block)
    head = kv_head * scheduler.group_size
    q_state = PipelineState(gl.to_tensor(0), gl.to_tensor(1))
    do_state = PipelineState(gl.to_tensor(0), gl.to_tensor(1))
    for step in range(steps):
        row = m_block * BLOCK_M
        stat = (batch * scheduler.kv_heads * scheduler.group_size + head) * 2
        if step == 0:
            for group in gl.static_range(2):
                mbarrier.expect(shared.kv_full.index(2 * group), KEY_BYTES)
                place = [batch, kv_head, (n_block * 2 + group) * ROWS, 0]
                copy_in(k_desc, place, shared.kv_full.index(2 * group), shared.k_tiles.index(group))
        mbarrier.wait(shared.q_empty.index(q_state.stage), q_state.phase)
        mbarrier.expect(shared.q_full.index(q_state.stage), QUERY_BYTES)
        copy_in(q_desc, [batch, head, row, 0], shared.q_full.index(q_state.stage), shared.q_tiles.index(q_state.stage))
        copy_in(stats_desc, [stat, row], shared.q_full.index(q_state.stage), shared.lse_rows.index(q_state.stage))
        q_state = q_state.next(Q_STAGES)
        if step == 0:
            for group in gl.static_range(2):
                mbarrier.expect(shared.kv_full.index(2 * group + 1), KEY_BYTES)
                place = [batch, kv_head, (n_block * 2 + group) * ROWS, 0]
                copy_in(v_desc, place, shared.kv_full.index(2 * group + 1), shared.v_tiles.index(group))
        mbarrier.wait(shared.do_empty.index(do_state.stage), do_state.phase)
        mbarrier.expect(shared.do_full.index(do_state.stage), QUERY_BYTES)
        copy_in(do_desc, [batch, head, row, 0], shared.do_full.index(do_state.stage), shared.do_tiles.index(do_state.stage))
        copy_in(stats_desc, [stat + 1, row], shared.do_full.index(do_state.stage), shared.delta_rows.index(do_state.stage))
        do_state = do_state.next(DO_STAGES)
        m_block += 1
        wraps = m_block == m_max
        m_block = gl.where(wraps, m_min, m_block)
        head = gl.where(wraps, head + 1, head)


@gluon.jit
def issue_dq(GROUP: gl.constexpr, shared, ds_state):
    """Issues dq of a step, from the keys of both groups: all of it.

    In tiles of 64 columns it is transposed, and halves are queries. In wider tiles halves are columns.
    """
    sums = gl.zeros([64, 128], gl.float32, DQ_LAYOUT)
    for turn in gl.static_range(2):
        # ds of this group is complete first.
        source = GROUP if turn == 0 else 1 - GROUP
        slot = source * DS_STAGES + ds_state.stage
        mbarrier.wait(shared.ds_full.index(slot), ds_state.phase)
        k_tile = shared.k_tiles.index(opaque(source)).reshape([ROWS, WIDTH])
        ds_tile = shared.ds_tiles.index(slot)
        sums = warpgroup_mma(ds_tile.permute((1, 0)), k_tile, sums, use_acc=turn > 0, is_async=True)
    return sums


@gluon.jit
def consume(GROUP: gl.constexpr, shared, dk_desc, dv_desc, sums, scale, scheduler):
    """Computes dk and dv of this group's keys, and adds every second block of dq."""
    n_block, batch, kv_head = scheduler.get_tile()
    n_start = (n_block * 2 + GROUP) * ROWS
    m_min, m_max, m_block, steps = scheduler.query_blocks(n_block)
    scale_log2 = scale * LOG2_E
    dk = opaque_zeros()
    dv = opaque_zeros()
    keys = gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    queries = gl.arange(0, BLOCK_M, gl.SliceLayout(0, S_LAYOUT))
    full_min = scheduler.first_full_block(n_start, m_max)

    q_state = PipelineState(gl.to_tensor(0), gl.to_tensor(0))
    do_state = PipelineState(gl.to_tensor(0), gl.to_tensor(0))
    ds_state = PipelineState(gl.to_tensor(0), gl.to_tensor(0))
    first_block = ((batch * scheduler.kv_heads + kv_head) * scheduler.group_size).to(gl.int64) * m_max + m_block
    address = sums.to(gl.int64, bitcast=True) + first_block * SUM_BYTES
    # Of the step before. They are new values: Triton treats a name as constant in a loop if it is assigned its
    # value from before the loop.
    last_state, last_address = PipelineState(gl.to_tensor(DS_STAGES - 1), gl.to_tensor(1)), address + 0
    mbarrier.wait(shared.kv_full.index(2 * GROUP), 0)
    # The other group's keys, for dq.
    mbarrier.wait(shared.kv_full.index(2 * (1 - GROUP)), 0)
    mbarrier.wait(shared.q_full.index(0), 0)
    s = issue_product(shared.k_tiles, GROUP, shared.q_tiles, shared.lse_rows, q_state.stage)
    mbarrier.wait(shared.kv_full.index(2 * GROUP + 1), 0)
    for step in range(steps):
        q_tile = shared.q_tiles.index(q_state.stage).reshape([BLOCK_M, WIDTH])
        do_tile = shared.do_tiles.index(do_state.stage).reshape([BLOCK_M, WIDTH])
        mbarrier.wait(shared.do_full.index(do_state.stage), do_state.phase)
        # Loaded during the product of the scores.
        delta_rows = broadcast_row(shared.delta_rows.index(do_state.stage))
        # Products stay asynchronous only if the first wait in the loop leaves none in flight.
        s = warpgroup_mma_wait(0, deps=[s])
        v_tile = shared.v_tiles.index(opaque(GROUP)).reshape([ROWS, WIDTH])
        dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), delta_rows, is_async=True)
        p = gl.exp2(s * scale_log2)
        if m_block < full_min:
            p = scheduler.mask(p, n_start, m_block, keys, queries)
        p_low = p.to(DTYPE)
        # Already complete, but a wait ends a basic block: the wait for dp is not hoisted above the exponentials.
        mbarrier.wait(shared.do_full.index(do_state.stage), do_state.phase)
        dv = warpgroup_mma(gl.convert_layout(p_low, P_OPERAND), do_tile, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = (p * dp).to(DTYPE)
        dk = warpgroup_mma(gl.convert_layout(ds, P_OPERAND), q_tile, dk, is_async=True)
        mbarrier.wait(shared.ds_empty.index(ds_state.stage), ds_state.phase ^ 1)
        shared.ds_tiles.index(GROUP * DS_STAGES + ds_state.stage).store(ds)
        fence_async_shared()
        mbarrier.arrive(shared.ds_full.index(GROUP * DS_STAGES + ds_state.stage))
        dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
        mbarrier.arrive(shared.do_empty.index(do_state.stage))
        mbarrier.arrive(shared.q_empty.index(q_state.stage))
        q_state = q_state.next(Q_STAGES)
        do_state = do_state.next(DO_STAGES)
        # Group 0 adds dq of even steps, in odd ones.
        if (step > 0) & ((step & 1) != GROUP):
            dq = issue_dq(GROUP, shared, last_state)
            dq = warpgroup_mma_wait(0, deps=[dq])
            mbarrier.arrive(shared.ds_empty.index(last_state.stage))
            add_dq(GROUP, shared, last_address, dq, (step - 1) // 2, True)
        # The scores of the next block. After the last one they are computed from any data and not used.
        mbarrier.wait(shared.q_full.index(q_state.stage), q_state.phase, pred=step + 1 < steps)
        s = issue_product(shared.k_tiles, GROUP, shared.q_tiles, shared.lse_rows, q_state.stage)
        last_state, last_address = ds_state, address
        ds_state = ds_state.next(DS_STAGES)
        m_block += 1
        address += SUM_BYTES
        wraps = m_block == m_max
        m_block = gl.where(wraps, m_min, m_block)
        address = gl.where(wraps, address + m_min.to(gl.int64) * SUM_BYTES, address)
    s = warpgroup_mma_wait(0, deps=[s])
    if (steps & 1) != GROUP:
        dq = issue_dq(GROUP, shared, last_state)
        dq = warpgroup_mma_wait(0, deps=[dq])
        add_dq(GROUP, shared, last_address, dq, (steps - 1) // 2, True)

    # This group's v is not needed any more: gradients leave through its memory.
    shared.v_tiles.index(GROUP).reshape([ROWS, WIDTH]).store(dv.to(DTYPE))
    fence_async_shared()
    copy_out(dv_desc, [batch, kv_head, n_start, 0], shared.v_tiles.index(GROUP))
    low_dk = (dk * scale).to(DTYPE)
    tma.store_wait(0)
    shared.v_tiles.index(GROUP).reshape([ROWS, WIDTH]).store(low_dk)
    fence_async_shared()
    copy_out(dk_desc, [batch, kv_head, n_start, 0], shared.v_tiles.index(GROUP))
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
    q_tiles = gl.allocate_shared_memory(DTYPE, [Q_STAGES, 1, 1, BLOCK_M, WIDTH], TILE)
    do_tiles = gl.allocate_shared_memory(DTYPE, [DO_STAGES, 1, 1, BLOCK_M, WIDTH], TILE)
    k_tiles = gl.allocate_shared_memory(DTYPE, [KEY_TILES, 1, 1, ROWS, WIDTH], TILE)
    v_tiles = gl.allocate_shared_memory(DTYPE, [KEY_TILES, 1, 1, ROWS, WIDTH], TILE)
    ds_tiles = gl.allocate_shared_memory(DTYPE, [KEY_TILES * DS_STAGES, ROWS, BLOCK_M], DS)
    lse_rows = gl.allocate_shared_memory(gl.float32, [Q_STAGES, 1, BLOCK_M], STATS)
    delta_rows = gl.allocate_shared_memory(gl.float32, [DO_STAGES, 1, BLOCK_M], STATS)
    q_full = make_barriers(Q_STAGES, 1)
    q_empty = make_barriers(Q_STAGES, 2)
    do_full = make_barriers(DO_STAGES, 1)
    do_empty = make_barriers(DO_STAGES, 2)
    kv_full = make_barriers(2 * KEY_TILES, 1)
    ds_full = make_barriers(KEY_TILES * DS_STAGES, 1)
    ds_empty = make_barriers(DS_STAGES, 1)
    fence_async_shared()
    shared = SharedMemory(
        q_tiles, k_tiles, v_tiles, do_tiles, lse_rows, delta_rows, ds_tiles, q_full, q_empty, do_full,
        do_empty, kv_full, ds_full, ds_empty
    )
    scheduler = TileScheduler(blocks, kv_heads, group_size, seqlen_q, seqlen_kv, diagonal)
    gl.warp_specialize(
        [
            (consume, (0, shared, dk_desc, dv_desc, workspace_1, scale, scheduler)),
            (consume, (1, shared, dk_desc, dv_desc, workspace_1, scale, scheduler)),
            (produce, (q_desc, k_desc, v_desc, do_desc, stats_desc, shared, scheduler)),
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
    scale,
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
    exists = query_exists[:, None]
    out_at = out + batch * stride_ob + head * stride_oh + queries.to(tl.int64)[:, None] * stride_os + columns[None, :]
    dout_at = dout + batch * stride_dob + head * stride_doh + queries.to(tl.int64)[:, None] * stride_dos + columns[None, :]
    out_tile = tl.load(out_at, mask=exists, other=0.0)
    dout_tile = tl.load(dout_at, mask=exists, other=0.0)
    row_delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    row_lse = tl.load(lse + batch_head * seqlen_q + queries, mask=query_exists, other=float("inf"))
    # A row without visible keys, and one beyond the end, have probabilities of zero.
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
    stats = workspace_0 + batch_head * 2 * tiles * 64 + queries
    tl.store(stats, -row_lse / scale)
    tl.store(stats + tiles * 64, -row_delta)
    numbers = tl.program_id(0).to(tl.int64) * 8192 + tl.arange(0, 8192)
    tl.store(workspace_1 + numbers, tl.zeros([8192], tl.float32))


@triton.jit
def finish(
    workspace_1,
    dq,
    scale,
    stride_dqb,
    stride_dqh,
    stride_dqs,
    heads,
    seqlen_q,
):
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
    exists = (queries < seqlen_q)[:, None]
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
    # The last key that query 0 sees, by causality or the right window; else its position.
    diagonal = seqlen_kv - seqlen_q
    integers = (blocks, kv_heads, heads // kv_heads, seqlen_q, seqlen_kv, diagonal)
    return (blocks * batch * kv_heads,), workspaces, integers


def epilogue_plan(q, k, v, out, dout, dq, dk, dv):
    """Returns the grid of `finish` and its integers."""
    batch, heads, seqlen_q, _ = q.shape
    strides = [dq.stride(axis) for axis in (0, 1, 2)]
    return (triton.cdiv(seqlen_q, 64) * batch * heads,), (*strides, heads, seqlen_q)


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
        scale,
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
        num_stages=2,
    )
    finish[last_grid](workspaces[1], dq, scale, *last_integers, num_warps=4, num_stages=1)
    return -dq if negative else dq, dk, dv
