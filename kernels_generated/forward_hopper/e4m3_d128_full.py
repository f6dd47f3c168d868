# A stand-alone kernel by flashtune; it needs torch and triton alone.
# `attention` runs it. Selected on nvidia-h200.

"""Attention forward on Hopper, in Gluon: a producer warp copies tiles, consumer groups of four warps compute.

Computes     e4m3, head dim 128, value head dim 128, causal: none
With         no features
Config       num_consumer_groups 3, rows_per_group 64, block_n 128, num_stages 2, q_stages 2,
             split_epilogue False, ping_pong True, defer_pv_wait False, conditional_rescale True,
             p_stages 2, split_head_dim False, pack_gqa 1, head_swizzle 4,
             lpt False, serpentine False, balanced_grid True
Assumes      addresses and strides that are multiples of 16 bytes
Template     forward_hopper 69c58d127a89

Algorithm of a consumer group, for each tile of queries of a persistent program:
  s = q k^T                                         last block of keys; issued before the previous tile is stored
  row_max = max(s); p = exp2(s - row_max)
  for each earlier block:
    issue s' = q k'^T, issue accumulator += p v     both run during the softmax
    row_max', rescale = max(row_max, max(s')), exp2(row_max - row_max')
    p' = exp2(s' - row_max'); row_sum = row_sum * rescale + sum(p')
    accumulator *= rescale                          only after large growth
  accumulator += p v
  issue the first s of the next tile
  out = accumulator / row_sum; lse = row_max + log(row_sum)
The schedule is FlashAttention-3's (Shah et al., 2024); the conditional rescaling is FlashAttention-4's (2026).

Names
  *_desc*                           TMA descriptor of a tensor: shape, strides, tile
  q, k, v                           rings of tiles in shared memory, and barriers: a tile has arrived, may be overwritten
  *_log2                            a quantity in units of log2, so that exp2 replaces exp
  pack                              PACK query heads of one KV head; their rows share a tile
  head                              first query head of a pack, counted within its KV head's group
Tunables
  GROUPS, GROUP_M, BLOCK_N          consumer groups, rows of a group's tile, keys of a block
  STAGES, Q_STAGES                  tiles in flight: of K and of V; of queries for each group
  P_STAGES                          tiles of 8-bit probabilities for each group
  ping_pong                         groups issue their products in turn
  conditional_rescale               the accumulator is rescaled only if a maximum grew by RESCALE_THRESHOLD
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

GROUPS = gl.constexpr(3)
GROUP_M = gl.constexpr(64)
BLOCK_N = gl.constexpr(128)
STAGES = gl.constexpr(2)
Q_STAGES = gl.constexpr(2)
PACK = gl.constexpr(1)
# Query positions of a group's rows, and of a tile.
GROUP_POSITIONS = gl.constexpr(64)
TILE_POSITIONS = gl.constexpr(192)
HEAD_DIM = gl.constexpr(128)
VALUE_HEAD_DIM = gl.constexpr(128)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# Probabilities are scaled to [0, 256], where 8 bits resolve small ones best.
P_SHIFT = gl.constexpr(6.0)
P_STAGES = gl.constexpr(2)
# Growth of a row's maximum, in log2, from which on the accumulator is rescaled.
RESCALE_THRESHOLD = gl.constexpr(2.0)
# Rows of a thread.
THREAD_ROWS = gl.constexpr(2)
ELEMENT = gl.constexpr(gl.float8e4nv)
OUT_ELEMENT = gl.constexpr(gl.bfloat16)
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, S_LAYOUT))
O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
P_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, O_LAYOUT, 4))
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())

@aggregate
class PipelineState:
    """The stage of a pipeline that comes next, and the parity of its barriers."""

    stage: gl.tensor
    phase: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, stage, phase
    ):
        self.stage = stage
        self.phase = phase


@aggregate
class Pipeline:
    """A ring of tiles in shared memory. A tile is a tuple of chunks of the head dim.

    `full` and `empty` are the barriers of its slots: a tile has arrived, a tile may be overwritten. A stage has a
    slot for each of `groups`.
    """

    tiles: gl.tuple
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr
    groups: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, tiles, full, empty, stages, groups
    ):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)
        self.groups = gl.constexpr(groups)

    @gluon.jit
    def slot(self, state, group=0):
        return state.stage * self.groups + group

    @gluon.jit
    def wait_full(self, state, group=0, pred=True):
        mbarrier.wait(self.full.index(self.slot(state, group)), state.phase, pred=pred)

    @gluon.jit
    def wait_empty(self, state, group=0):
        mbarrier.wait(self.empty.index(self.slot(state, group)), state.phase)

    @gluon.jit
    def release(self, state, group=0):
        """Marks a slot as empty and returns the next state."""
        mbarrier.arrive(self.empty.index(self.slot(state, group)))
        return self.advance(state)

    @gluon.jit
    def advance(self, state):
        """Returns the next state. The parity flips after the last stage."""
        wraps = state.stage == self.stages - 1
        stage = gl.where(wraps, 0, state.stage + 1)
        return PipelineState(stage, gl.where(wraps, state.phase ^ 1, state.phase))


@gluon.jit
def start_pipeline(phase: gl.constexpr):
    """Returns the first state: of consumers in phase 0, of the producer in phase 1, because all slots are empty."""
    return PipelineState(gl.to_tensor(0), gl.to_tensor(phase))


@gluon.jit
def skip_block(GROUP: gl.constexpr, k, v, k_state, v_state):
    """Releases a block of keys and values that the group does not see, and returns the next states."""
    k.wait_full(k_state)
    k_state = k.release(k_state)
    v.wait_full(v_state)
    v_state = v.release(v_state)
    wait_named_barrier(GROUP)
    signal_named_barrier(GROUP)
    return k_state, v_state


@gluon.jit
def wait_named_barrier(GROUP: gl.constexpr):
    """Waits until the previous group has issued its products: one group multiplies during the other's softmax."""
    asm: gl.constexpr = f"bar.sync {GROUP + 8}, 256; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r,r", [0], gl.int32, False, 1)


@gluon.jit
def signal_named_barrier(GROUP: gl.constexpr):
    """Lets the next group issue its products."""
    asm: gl.constexpr = f"bar.arrive {(GROUP + 1) % GROUPS + 8}, 256; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r,r", [0], gl.int32, False, 1)


@aggregate
class Tile:
    """A tile of queries: its number within the sequence, KV head, first query head, and the sequence."""

    m_block: gl.tensor
    batch: gl.tensor
    kv_head: gl.tensor
    head: gl.tensor
    seqlen_q: gl.tensor
    seqlen_kv: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, m_block, batch, kv_head, head, seqlen_q, seqlen_kv
    ):
        self.m_block = m_block
        self.batch = batch
        self.kv_head = kv_head
        self.head = head
        self.seqlen_q = seqlen_q
        self.seqlen_kv = seqlen_kv


@aggregate
class TileScheduler:
    """The order of all tiles.

    Heads are processed in groups of `heads_per_swizzle`, so that their keys stay in the L2 cache. Within such a
    group, neighbours in order are different heads. A pack is PACK query heads of a KV head, which share a tile.
    """

    total: gl.tensor
    m_blocks: gl.tensor
    heads_per_swizzle: gl.tensor
    all_packs: gl.tensor
    packs: gl.tensor
    packs_per_kv: gl.tensor
    kv_heads: gl.tensor
    group_size: gl.tensor
    seqlen_q: gl.tensor
    seqlen_kv: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, total, m_blocks, heads_per_swizzle, all_packs, packs, packs_per_kv, kv_heads, group_size, seqlen_q,
        seqlen_kv
    ):
        self.total = total
        self.m_blocks = m_blocks
        self.heads_per_swizzle = heads_per_swizzle
        self.all_packs = all_packs
        self.packs = packs
        self.packs_per_kv = packs_per_kv
        self.kv_heads = kv_heads
        self.group_size = group_size
        self.seqlen_q = seqlen_q
        self.seqlen_kv = seqlen_kv

    @gluon.jit
    def locate(self, index, num_programs):
        """Returns the number of the index-th tile within its sequence, the sequence, KV head and first head."""
        first_pack = index // (self.heads_per_swizzle * self.m_blocks) * self.heads_per_swizzle
        within = index % (self.heads_per_swizzle * self.m_blocks)
        width = gl.minimum(self.heads_per_swizzle, self.all_packs - first_pack)
        m_block = within // width
        pack = first_pack + within % width
        batch = pack // self.packs
        kv_head = pack % self.packs // self.packs_per_kv
        return m_block, batch, kv_head, pack % self.packs % self.packs_per_kv * PACK

    @gluon.jit
    def get_tile(self, index, num_programs):
        m_block, batch, kv_head, head = self.locate(index, num_programs)
        return Tile(m_block, batch, kv_head, head, self.seqlen_q, self.seqlen_kv)


@gluon.jit
def get_n_block_max(tile, m_start, POSITIONS: gl.constexpr):
    """Returns the end of the key blocks that some query from `m_start` on may see; at least 1."""
    n_end = tile.seqlen_kv
    return gl.maximum((n_end + BLOCK_N - 1) // BLOCK_N, 1)


@gluon.jit
def mask_from(s, n_end, n_block, n_offsets):
    """Masks keys from `n_end` on. Columns of a thread differ by constants, so that one subtraction is enough."""
    limits = n_end - n_block * BLOCK_N - (n_offsets & 6)[None, :]
    return gl.where((n_offsets & -7)[None, :] < limits, s, float("-inf"))


@gluon.jit
def issue_qk(GROUP: gl.constexpr, q, k, q_state, k_state, no_scores):
    """Starts the product of queries and keys, and returns the scores in flight."""
    q_tile = q.tiles[0].index(q.slot(q_state, GROUP)).reshape([GROUP_M, 128])
    k_tile = k.tiles[0].index(k_state.stage).reshape([BLOCK_N, 128])
    s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    return s


@gluon.jit
def issue_pv(p, v, v_state, accumulator):
    """Starts the product of probabilities and values, and returns the accumulators in flight."""
    v_tile = v.tiles[0].index(v_state.stage).reshape([128, BLOCK_N]).permute((1, 0))
    accumulator = warpgroup_mma(p, v_tile, accumulator, is_async=True)
    return accumulator


@gluon.jit
def finite(row_max):
    """Returns 0 for a row that has seen no key yet: -inf - -inf would be NaN."""
    return row_max


@gluon.jit
def exponentiate(s, row_max, scale_log2):
    """Returns the sums of a block's probabilities over the columns of each thread, and the probabilities."""
    shift = finite(row_max) - P_SHIFT
    p = gl.exp2(s * scale_log2 - shift[:, None])
    return gl.sum(gl.sum(p.reshape([GROUP_M, BLOCK_N // 8, 4, 2]), 3), 1), p


@gluon.jit
def rescale_output(rescale, accumulator):
    """Returns the accumulators, relative to a new maximum."""
    accumulator = accumulator * gl.convert_layout(rescale, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return accumulator


@gluon.constexpr_function
def constraints(returned, kind, count):
    """Returns the constraints of PTX that returns some registers and takes `count` of a kind."""
    return ",".join(["=r"] * returned + [kind] * count)


@gluon.jit
def store_p(p, p_tile):
    """Rounds probabilities to 8 bits, four of a thread at a time, and stores them in shared memory."""
    asm: gl.constexpr = """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
    }"""
    p_tile.store(gl.inline_asm_elementwise(asm, "=r,f,f,f,f", [in_fours(p)], gl.float8e4nv, True, 4))
    fence_async_shared()


@gluon.jit
def in_fours(p):
    """Returns probabilities with four neighbouring columns in a thread, as products of 8-bit tiles need them.

    Columns are exchanged within groups of 16; the keys of the transposed values are in the same order.
    """
    exchanged = p.reshape([GROUP_M, BLOCK_N // 16, 2, 4, 2]).permute(0, 1, 3, 2, 4)
    return gl.convert_layout(exchanged.reshape([GROUP_M, BLOCK_N]), P_LAYOUT)


@gluon.jit
def declare_vote(GROUP: gl.constexpr):
    """Declares a register that holds whether some row of the warp needs a new maximum."""
    gl.inline_asm_elementwise(f".reg .b32 growth_{GROUP}; mov.b32 $0, 0;", "=r,r", [0], gl.int32, False, 1)

@gluon.constexpr_function
def voting(group, rows):
    """Returns PTX that stores whether one of a thread's rows needs a new maximum in any lane of its warp."""
    lines = ["{ .reg .pred any, one; setp.ne.s32 any, 0, 0;"]
    for row in range(rows):
        lines.append(f"setp.ne.s32 one, ${rows + row}, 0; or.pred any, any, one; mov.b32 ${row}, 0;")
    return " ".join([*lines, f"vote.sync.any.pred any, any, 0xffffffff; selp.b32 growth_{group}, 1, 0, any; }}"])

@gluon.jit
def vote_rescale(grows, GROUP: gl.constexpr):
    """Combines the votes of all lanes of the warp. Rows of other warps do not matter."""
    asm: gl.constexpr = voting(GROUP, THREAD_ROWS)
    kinds: gl.constexpr = constraints(THREAD_ROWS, "r", THREAD_ROWS)
    gl.inline_asm_elementwise(asm, kinds, [grows], gl.int32, False, THREAD_ROWS)

@gluon.jit
def needs_rescale(GROUP: gl.constexpr):
    """Returns whether some row of the warp voted for a rescale."""
    return gl.inline_asm_elementwise(f"mov.b32 $0, growth_{GROUP};", "=r,r", [0], gl.int32, False, 1) != 0


@gluon.jit
def store_output(GROUP: gl.constexpr, o_tiles, o_descs, tile, m_start, factor, accumulator):
    """Stores the accumulators times a factor for each row, through shared memory."""
    o = (accumulator * gl.convert_layout(factor, gl.SliceLayout(1, O_LAYOUT))[:, None]).to(OUT_ELEMENT)
    tma.store_wait(0)
    o_tiles[0].index(GROUP).reshape([GROUP_M, 128]).store(o)
    fence_async_shared()
    copy_out(
        o_descs[0], [tile.batch, tile.kv_head, tile.head, m_start, 0], o_tiles[0].index(GROUP)
    )


@gluon.jit
def produce(q_descs, k_descs, v_descs, q, k, v, scheduler):
    """Copies the tiles of a program, in the order in which consumers read them."""
    num_programs = gl.num_programs(0)
    q_state = start_pipeline(1)
    k_state = start_pipeline(1)
    v_state = start_pipeline(1)
    tile = scheduler.get_tile(gl.program_id(0), num_programs)
    for index in range(gl.program_id(0), scheduler.total, num_programs):
        n_last = get_n_block_max(tile, tile.m_block * TILE_POSITIONS, TILE_POSITIONS) - 1
        # Blocks before the last one.
        n_further = n_last
        for group in gl.static_range(GROUPS):
            q.wait_empty(q_state, group)
            mbarrier.expect(q.full.index(q.slot(q_state, group)), 8192)
            position = tile.m_block * TILE_POSITIONS + group * GROUP_POSITIONS
            copy_in(
                q_descs[0], [tile.batch, tile.kv_head, tile.head, position, 0],
                q.full.index(q.slot(q_state, group)), q.tiles[0].index(q.slot(q_state, group))
            )
        q_state = q.advance(q_state)
        this = tile
        tile = scheduler.get_tile(gl.minimum(index + num_programs, scheduler.total - 1), num_programs)
        # Consumers read the values of a block after the keys of the next one.
        for step in range(n_further + 2):
            if step <= n_further:
                key = (n_last - step) * BLOCK_N
                k.wait_empty(k_state)
                mbarrier.expect(k.full.index(k_state.stage), 16384)
                copy_in(
                    k_descs[0], [this.batch, this.kv_head, key, 0],
                    k.full.index(k_state.stage), k.tiles[0].index(k_state.stage)
                )
                k_state = k.advance(k_state)
            if step > 0:
                key = (n_last - step + 1) * BLOCK_N
                v.wait_empty(v_state)
                mbarrier.expect(v.full.index(v_state.stage), 16384)
                copy_in(
                    v_descs[0], [this.batch, this.kv_head, 0, key],
                    v.full.index(v_state.stage), v.tiles[0].index(v_state.stage)
                )
                v_state = v.advance(v_state)

@gluon.jit
def start_tile(GROUP: gl.constexpr, tile, pipelines, states, no_scores, passed, more):
    """Starts the first scores of a tile; without `more`, no tile follows.

    The group skips blocks that other groups see: `passed` ones of the previous tile, then those of this tile that only
    later groups see. Returns the first position, the last block, the scores in flight, and the states.
    """
    q, k, v = pipelines
    q_state, k_state, v_state = states
    m_start = tile.m_block * TILE_POSITIONS + GROUP * GROUP_POSITIONS
    n_last = get_n_block_max(tile, m_start, GROUP_POSITIONS) - 1
    q.wait_full(q_state, GROUP, pred=more)
    k.wait_full(k_state, pred=more)
    return m_start, n_last, issue_qk(GROUP, q, k, q_state, k_state, no_scores), k_state, v_state


@gluon.jit
def consume(GROUP: gl.constexpr, q, k, v, outputs, scale_log2, scheduler, p_tiles, scales):
    """Computes one group's rows of every tile, from the last block of keys to the first."""
    num_programs = gl.num_programs(0)
    o_tiles, o_descs, lse = outputs
    q_state = start_pipeline(0)
    k_state = start_pipeline(0)
    v_state = start_pipeline(0)
    n_offsets = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
    no_scores = gl.zeros([GROUP_M, BLOCK_N], gl.float32, S_LAYOUT)
    p_stage = 0
    declare_vote(GROUP)
    if GROUP == GROUPS - 1:
        signal_named_barrier(GROUP)

    tile = scheduler.get_tile(gl.program_id(0), num_programs)
    states = q_state, k_state, v_state
    m_start, n_last, s, k_state, v_state = start_tile(GROUP, tile, (q, k, v), states, no_scores, 0, True)
    for index in range(gl.program_id(0), scheduler.total, num_programs):
        this, this_m_start = tile, m_start
        q_scale, k_scale, v_scale = scales
        kv_number = this.batch * scheduler.kv_heads + this.kv_head
        qk_scale = gl.load(q_scale + kv_number * scheduler.group_size + this.head)
        s_scale_log2 = scale_log2 * qk_scale * gl.load(k_scale + kv_number)
        # With a scale of 0, masked scores would be NaN: -inf * 0.
        s_scale_log2 = gl.where(s_scale_log2 == 0.0, 1e-30, s_scale_log2)
        o_scale = gl.load(v_scale + kv_number)
        n_block_min = 0
        passed = 0

        # The first block has its own code: its scores were issued before the previous tile was stored.
        s = warpgroup_mma_wait(0, deps=[s])
        k_state = k.release(k_state)
        if this.seqlen_kv % BLOCK_N != 0:
            s = mask_from(s, this.seqlen_kv, n_last, n_offsets)
        row_max = gl.max(s, 1) * s_scale_log2
        running_sum, p = exponentiate(s, row_max, s_scale_log2)
        store_p(p, p_tiles.index(P_STAGES * GROUP + p_stage))
        accumulator = gl.zeros([GROUP_M, 128], gl.float32, O_LAYOUT)

        for _ in range(n_last - 1, n_block_min - 1, -1):
            k.wait_full(k_state)
            wait_named_barrier(GROUP)
            s = issue_qk(GROUP, q, k, q_state, k_state, no_scores)
            v.wait_full(v_state)
            accumulator = issue_pv(p_tiles.index(P_STAGES * GROUP + p_stage), v, v_state, accumulator)
            signal_named_barrier(GROUP)
            s = warpgroup_mma_wait(1, deps=[s])
            k_state = k.release(k_state)
            block_max = gl.max(s, 1) * s_scale_log2
            grows = block_max > row_max + RESCALE_THRESHOLD
            vote_rescale(grows.to(gl.int32), GROUP)
            new_max = gl.where(grows, block_max, row_max)
            rescale = gl.exp2(row_max - finite(new_max))
            row_max = new_max
            block_sum, p = exponentiate(s, row_max, s_scale_log2)
            sum_rescale = gl.convert_layout(rescale, gl.SliceLayout(1, running_sum.type.layout))
            running_sum = running_sum * sum_rescale[:, None] + block_sum
            # The product in flight reads the other tile.
            p_stage ^= 1
            store_p(p, p_tiles.index(P_STAGES * GROUP + p_stage))
            accumulator = warpgroup_mma_wait(0, deps=[accumulator])
            v_state = v.release(v_state)
            if needs_rescale(GROUP):
                accumulator = rescale_output(rescale, accumulator)

        q_state = q.release(q_state, GROUP)
        v.wait_full(v_state)
        accumulator = issue_pv(p_tiles.index(P_STAGES * GROUP + p_stage), v, v_state, accumulator)
        # The next tile is located during the last product: divisions take long.
        more = index + num_programs < scheduler.total
        tile = scheduler.get_tile(gl.where(more, index + num_programs, index), num_programs)
        accumulator = warpgroup_mma_wait(0, deps=[accumulator])
        v_state = v.release(v_state)
        states = q_state, k_state, v_state
        m_start, n_last, s, k_state, v_state = start_tile(GROUP, tile, (q, k, v), states, no_scores, passed, more)

        # Rows that see no key have a sum of zero: their output is zero and their log-sum-exp -inf.
        row_sum = gl.convert_layout(gl.sum(running_sum, 1), ROW_LAYOUT)
        divisor = gl.where(row_sum == 0.0, 1.0, row_sum)
        factor = o_scale / divisor
        store_output(GROUP, o_tiles, o_descs, this, this_m_start, factor, accumulator)
    warpgroup_mma_wait(0, deps=[s])
    tma.store_wait(0)


@gluon.jit
def forward_hopper(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse,
    q_scale,
    k_scale,
    v_scale,
    scale,
    heads,
    group_size,
    all_heads,
    seqlen_q,
    seqlen_kv,
    heads_per_swizzle,
):
    q_tiles = gl.allocate_shared_memory(
        ELEMENT, [Q_STAGES * GROUPS, 1, 1, PACK, GROUP_POSITIONS, 128], gl.NVMMASharedLayout(128, 8, 5)
    )
    k_tiles = gl.allocate_shared_memory(
        ELEMENT, [STAGES, 1, 1, BLOCK_N, 128], gl.NVMMASharedLayout(128, 8, 4)
    )
    v_tiles = gl.allocate_shared_memory(
        ELEMENT, [STAGES, 1, 1, 128, BLOCK_N], gl.NVMMASharedLayout(128, 8, 4)
    )
    o_tiles = gl.allocate_shared_memory(
        OUT_ELEMENT, [GROUPS, 1, 1, PACK, GROUP_POSITIONS, 128], gl.NVMMASharedLayout(128, 16, 5)
    )
    p_tiles = gl.allocate_shared_memory(
        ELEMENT, [P_STAGES * GROUPS, GROUP_M, BLOCK_N], gl.NVMMASharedLayout(128, 8, 2)
    )
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES * GROUPS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES * GROUPS, 1], BARRIER)
    for slot in gl.static_range(Q_STAGES * GROUPS):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(q_empty.index(slot), count=1)
    q = Pipeline((q_tiles,), q_full, q_empty, Q_STAGES, GROUPS)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=GROUPS)
    k = Pipeline((k_tiles,), k_full, k_empty, STAGES, 1)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for slot in gl.static_range(STAGES):
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(v_empty.index(slot), count=GROUPS)
    v = Pipeline((v_tiles,), v_full, v_empty, STAGES, 1)
    fence_async_shared()

    kv_heads = heads // group_size
    # Heads of a pack beyond their group are read as zeros and not written.
    packs_per_kv = (group_size + PACK - 1) // PACK
    packs = kv_heads * packs_per_kv
    all_packs = all_heads // heads * packs
    m_blocks = (seqlen_q + TILE_POSITIONS - 1) // TILE_POSITIONS
    total = m_blocks * all_packs
    scale_log2 = scale * LOG2_E
    scheduler = TileScheduler(
        total, m_blocks, heads_per_swizzle, all_packs, packs, packs_per_kv, kv_heads, group_size, seqlen_q,
        seqlen_kv
    )
    scales = q_scale, k_scale, v_scale
    q_descs, k_descs = (q_desc,), (k_desc,)
    v_descs, o_descs = (v_desc,), (o_desc,)
    outputs = (o_tiles,), o_descs, lse
    gl.warp_specialize(
        [
            (consume, (0, q, k, v, outputs, scale_log2, scheduler, p_tiles, scales)),
            (consume, (1, q, k, v, outputs, scale_log2, scheduler, p_tiles, scales)),
            (consume, (2, q, k, v, outputs, scale_log2, scheduler, p_tiles, scales)),
            (produce, (q_descs, k_descs, v_descs, q, k, v, scheduler)),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )


KEYS = tl.constexpr(64)


@triton.jit
def transpose_values(v, transposed, stride_vb, stride_vh, stride_vs, kv_heads, seqlen_kv):
    """Writes V as [batch, kv_heads, value_head_dim, keys], keys in the order in which weights come."""
    head = tl.program_id(1)
    places = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    columns = tl.arange(0, 128)
    # Place 16a + 4t + 2b + c of a row holds key 16a + 8b + 2t + c.
    low = places % 16
    sources = places - low + low // 2 % 2 * 8 + low // 4 * 2 + low % 2
    v_base = v + (head // kv_heads).to(tl.int64) * stride_vb + (head % kv_heads).to(tl.int64) * stride_vh
    exists = (columns < 128)[None, :]
    # [KEYS, columns]; what lies past the sequence is zero, so that no weight of zero meets a NaN
    tile = tl.load(
        v_base + sources.to(tl.int64)[:, None] * stride_vs + columns[None, :],
        mask=exists & (sources < seqlen_kv)[:, None],
        other=0.0,
    )
    keys = (seqlen_kv + 15) // 16 * 16
    rows = (head.to(tl.int64) * 128 + columns)[:, None] * keys
    tl.store(transposed + rows + places[None, :], tile.T, mask=exists.T & (places < keys)[None, :])


def prologue_plan(q, k, v, out):
    """Grid of `transpose_values`, and its arguments from `stride_vb` on."""
    batch, kv_heads, seqlen_kv, _ = v.shape
    grid = (triton.cdiv(seqlen_kv, 64), batch * kv_heads)
    return grid, (*(v.stride(axis) for axis in (0, 1, 2)), kv_heads, seqlen_kv)


def descriptors(q, k, v, out):
    """Returns the TMA descriptors of each tensor. Reads past its ends give zeros; writes there do nothing.

    `v` is the output of `transpose_values`, [batch, kv_heads, value_head_dim, keys].
    """
    kv_heads = k.shape[1]

    def by_groups(tensor):
        """Shape and strides with query heads as [kv_heads, group_size]."""
        batch, heads, seqlen, width = tensor.shape
        of_batch, of_head, of_position, _ = tensor.stride()
        group_size = heads // kv_heads
        shape = [batch, kv_heads, group_size, seqlen, width]
        return shape, [of_batch, of_head * group_size, of_head, of_position, 1]

    return (
        (
            TensorDescriptor(
                q, *by_groups(q), [1, 1, 1, 64, 128], gl.NVMMASharedLayout(128, 8, 5)
            ),
        ),
        (
            TensorDescriptor(
                k, [*k.shape], [*k.stride()[:3], 1], [1, 1, 128, 128], gl.NVMMASharedLayout(128, 8, 4)
            ),
        ),
        (
            TensorDescriptor(
                v, [*v.shape], [*v.stride()[:3], 1], [1, 1, 128, 128], gl.NVMMASharedLayout(128, 8, 4)
            ),
        ),
        (
            TensorDescriptor(
                out, *by_groups(out), [1, 1, 1, 64, 128], gl.NVMMASharedLayout(128, 16, 5)
            ),
        ),
    )


def launch_plan(q, k, v, out):
    """Grid, shapes of float32 workspaces, and the kernel's arguments from `heads` on."""
    batch, heads, seqlen_q, _ = q.shape
    kv_heads, seqlen_kv = k.shape[1], k.shape[2]
    packs = batch * kv_heads * triton.cdiv(heads // kv_heads, 1)
    tiles = triton.cdiv(seqlen_q, 192) * packs
    multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
    # As few as finish in as many rounds.
    grid = (triton.cdiv(tiles, triton.cdiv(tiles, multiprocessors)),)
    heads_per_swizzle = min(packs, 4)
    # Whole groups of sixteen keys of one byte, counted in float32.
    workspaces = ((batch, kv_heads, 128, triton.cdiv(seqlen_kv, 16) * 4),)
    return grid, workspaces, (heads, heads // kv_heads, heads * batch, seqlen_q, seqlen_kv, heads_per_swizzle)


def attention(q, k, v, scale=None, q_scale=None, k_scale=None, v_scale=None):
    """Returns the output [batch, heads, seqlen_q, value_head_dim] and the log-sum-exp of each row.

    q, k, v           [batch, heads, seqlen, head_dim] with a contiguous last dimension
    q_scale           factor of each head of q
    k_scale, v_scale  factors of keys and values
    The checks state the dtype and the shape of each input. The log-sum-exp is None: this kernel does not write it.
    """
    # The kernel itself checks nothing: other sizes, types or strides would read and write other memory.
    large = [("q", q), ("k", k), ("v", v)]
    for name, tensor in [
        *large,
    ]:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, expected a tensor")
    dtype = torch.float8_e4m3fn
    for name, tensor in large:
        if tensor.ndim != 4:
            raise ValueError(f"{name} has {tensor.ndim} dimensions, expected 4")
    heads, seqlen_q = q.shape[1:3]
    kv_heads = k.shape[1]
    batch = q.shape[0]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"k has {kv_heads} heads, expected a divisor of the {heads} heads of q")
    scales = [
        (name, factor, torch.float32, shape)
        for name, factor, shape in (
            ("q_scale", q_scale, (batch, heads)),
            ("k_scale", k_scale, (batch, kv_heads)),
            ("v_scale", v_scale, (batch, kv_heads)),
        )
        if factor is not None
    ]
    rows = (batch, heads, seqlen_q)
    keys = (batch, kv_heads, k.shape[2])
    for name, tensor, expected, shape in (
        ("q", q, dtype, (*rows, 128)),
        ("k", k, dtype, (*keys, 128)),
        ("v", v, dtype, (*keys, 128)),
        *scales,
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
    for name, factor, *_ in scales:
        if not factor.is_contiguous():
            raise ValueError(f"{name} has strides {factor.stride()}, expected a contiguous tensor")
    for name, tensor in large:
        if any(stride % 16 for stride in tensor.stride()[:3]):
            raise ValueError(f"{name} has strides {tensor.stride()}, expected multiples of 16 before the last")
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name} has the address {tensor.data_ptr()}, expected a multiple of 16")
    if not q.is_cuda:
        raise ValueError(f"q is on {q.device}, expected a GPU")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if scale < 0:
        q, scale = (-q.float()).to(q.dtype), -scale
    batch, heads, seqlen_q, _ = q.shape
    out = torch.empty(batch, heads, seqlen_q, v.shape[-1], dtype=torch.bfloat16, device=q.device)
    lse = None
    if out.numel() == 0 or k.shape[2] == 0:
        return out.zero_(), lse if lse is None else lse.fill_(float("-inf"))
    grid, workspaces, integers = launch_plan(q, k, v, out)
    transposed = torch.empty(workspaces[0], dtype=torch.float32, device=v.device).view(v.dtype)
    first_grid, first_integers = prologue_plan(q, k, v, out)
    transpose_values[first_grid](v, transposed, *first_integers)
    ones = torch.ones(batch * heads, dtype=torch.float32, device=q.device)
    scales = [ones if factor is None else factor for factor in (q_scale, k_scale, v_scale)]
    tensors = (q, k, transposed, out)
    for parameter in forward_hopper.params[-len(integers) :]:
        # By default Triton makes an integer of 1 a constant, but fields of aggregates are tensors. A decorator would
        # change the digest of the kernel.
        parameter.do_not_specialize = True
    forward_hopper[grid](
        *(descriptor for parts in descriptors(*tensors) for descriptor in parts),
        out if lse is None else lse,
        *scales,
        max(scale, 1e-30),
        *integers,
        num_warps=4,
        num_stages=2,
    )
    return out, lse
