"""Attention forward on Hopper, in Gluon: a producer warp copies tiles, consumer groups of four warps compute.

Computes     fp16, head dim 64, value head dim 64, causal: none, varlen: False, dropout: False
Window       -1 keys to the left, -1 to the right; -1 is no bound
Features     softcap: False, ALiBi: False, sinks: False, lengths: False, prefix: False, chunk: 0, first tokens: 0
Keys         in pages of 64, with lengths in seqlens_kv; in e4m3, converted by a group of four warps
Config       num_consumer_groups 2, rows_per_group 64, block_n 128, num_stages 2, q_stages 2,
             split_epilogue False, ping_pong True, defer_pv_wait False, conditional_rescale True,
             p_stages 0, split_head_dim False, pack_gqa 1, head_swizzle 0,
             lpt False, serpentine False, balanced_grid False
Assumes      addresses and strides that are multiples of 16 bytes
Template     forward_hopper b5849cbc5e67

Algorithm of a consumer group, for each tile of queries of a persistent program:
  s = q k^T                                         last block of keys; issued before the previous tile is stored
  row_max = max(s); p = exp2(s - row_max)
  for each earlier block:
    issue s' = q k'^T, issue accumulator += p v     both run during the softmax
    row_max', rescale = max(row_max, max(s')), exp2(row_max - row_max')
    p' = exp2(s' - row_max'); row_sum = row_sum * rescale + sum(p')
    accumulator *= rescale                          if conditional_rescale, only after large growth
  accumulator += p v
  issue the first s of the next tile
  out = accumulator / row_sum; lse = row_max + log(row_sum)
The schedule is FlashAttention-3's (Shah et al., 2024); the conditional rescaling is FlashAttention-4's (2026).

Names
  *_desc                            TMA descriptor of a tensor: shape, strides, tile
  q, k, v                           rings of tiles in shared memory, and barriers: a tile has arrived, may be overwritten
  *_log2                            a quantity in units of log2, so that exp2 replaces exp
  pack                              PACK query heads of one KV head, whose rows share a tile
  head                              first query head of a pack, counted within its KV head's group
Tunables
  GROUPS, GROUP_M, BLOCK_N          consumer groups, rows of a group's tile, keys of a block
  STAGES, Q_STAGES, P_STAGES        tiles in flight: of K and of V; of queries and of 8-bit probabilities for each group
  PING_PONG                         groups issue their products in turn
  DEFER_PV_WAIT                     the wait for the product with V is after the exponentials
  CONDITIONAL_RESCALE               the accumulator is rescaled only if a maximum grew by RESCALE_THRESHOLD
  LPT, SERPENTINE                   tiles with the most keys first; every second round of tiles reversed
"""

import torch
import triton
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

GROUPS = gl.constexpr(2)
GROUP_M = gl.constexpr(64)
BLOCK_N = gl.constexpr(128)
STAGES = gl.constexpr(2)
Q_STAGES = gl.constexpr(2)
PACK = gl.constexpr(1)
# Query positions of a group's rows, and of a tile.
GROUP_POSITIONS = gl.constexpr(64)
TILE_POSITIONS = gl.constexpr(128)
HEAD_DIM = gl.constexpr(64)
VALUE_HEAD_DIM = gl.constexpr(64)
PAGE = gl.constexpr(64)
# Keys of a copy, and copies of a block.
COPIED = gl.constexpr(64)
COPIES = gl.constexpr(2)
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
# Tiles in 8 bits in flight, of keys and values in turn.
RAW_STAGES = gl.constexpr(2)
# Keys that the converter has in registers at a time, and their layout: threads store neighbouring 16 bytes.
CONVERTED = gl.constexpr(32)
RAW_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# Coordinate that marks the end of a sequence: see `descriptors`.
FAR = gl.constexpr(2**30)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# Growth of a row's maximum, in log2, from which on the accumulator is rescaled.
RESCALE_THRESHOLD = gl.constexpr(8.0)
# Rows of a thread.
THREAD_ROWS = gl.constexpr(2)
ELEMENT = gl.constexpr(gl.float16)
OUT_ELEMENT = gl.constexpr(gl.float16)
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, S_LAYOUT))
O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
P_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, O_LAYOUT, 2))
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
    seqlens_kv: gl.tensor
    block_table: gl.tensor
    seqlen_kv: gl.tensor
    stride_table: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, total, m_blocks, heads_per_swizzle, all_packs, packs, packs_per_kv, kv_heads, group_size, seqlen_q,
        seqlens_kv, block_table, seqlen_kv, stride_table
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
        self.seqlens_kv = seqlens_kv
        self.block_table = block_table
        self.seqlen_kv = seqlen_kv
        self.stride_table = stride_table

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
    def get_seqlen_kv(self, batch):
        """Returns the number of keys of a sequence, from none to all that its row of the block table has."""
        return gl.maximum(gl.minimum(gl.load(self.seqlens_kv + batch), self.seqlen_kv), 0)

    @gluon.jit
    def get_tile(self, index, num_programs):
        m_block, batch, kv_head, head = self.locate(index, num_programs)
        seqlen_kv = self.get_seqlen_kv(batch)
        return Tile(m_block, batch, kv_head, head, self.seqlen_q, seqlen_kv)


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
    q_tile = q.tiles[0].index(q.slot(q_state, GROUP)).reshape([GROUP_M, 64])
    k_tile = k.tiles[0].index(k_state.stage).reshape([BLOCK_N, 64])
    s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    return s


@gluon.jit
def issue_pv(p, v, v_state, accumulator):
    """Starts the product of probabilities and values, and returns the accumulators in flight."""
    v_tile = v.tiles[0].index(v_state.stage).reshape([BLOCK_N, 64])
    accumulator = warpgroup_mma(p, v_tile, accumulator, is_async=True)
    return accumulator


@gluon.jit
def finite(row_max):
    """Returns 0 for a row that has seen no key yet: -inf - -inf would be NaN."""
    return gl.where(row_max == float("-inf"), 0.0, row_max)


@gluon.jit
def exponentiate(s, row_max, scale_log2):
    """Returns the sums of a block's probabilities over the columns of each thread, and the probabilities."""
    shift = finite(row_max)
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
    o_tiles[0].index(GROUP).reshape([GROUP_M, 64]).store(o)
    fence_async_shared()
    copy_out(
        o_descs[0], [tile.batch, tile.kv_head, tile.head, m_start, 0], o_tiles[0].index(GROUP)
    )


@gluon.jit
def load_pages(scheduler, tile, n_block):
    """Returns the page numbers of the copies of a block, each in a lane, and 0 beyond the last key."""
    keys = n_block * BLOCK_N + gl.arange(0, 32, LANES) * COPIED
    row = scheduler.block_table + tile.batch.to(gl.int64) * scheduler.stride_table
    return gl.load(row + keys // PAGE, mask=keys < tile.seqlen_kv, other=0)


@gluon.jit
def copy_k(ring, state, descs, pages, tile, key, steps):
    """Copies the block of keys from `key` on. Rows beyond the last key become zeros: see `by_pages`."""
    page_step, head_step = steps
    for copy in gl.static_range(COPIES):
        page = gl.max(gl.where(gl.arange(0, 32, LANES) == copy, pages, 0), 0)
        place = page * page_step + tile.kv_head * head_step
        first = key + copy * COPIED
        used = tile.seqlen_kv - first // PAGE * PAGE
        copy_in(
            descs[0], [FAR, used, place, FAR - tile.seqlen_kv + first, 0],
            ring.full.index(state.stage), ring.tiles[0].index(state.stage).slice(copy * COPIED, COPIED, 3)
        )

@gluon.jit
def copy_v(ring, state, descs, pages, tile, key, steps):
    """Copies the block of values from `key` on. Rows beyond the last key become zeros: see `by_pages`."""
    page_step, head_step = steps
    for copy in gl.static_range(COPIES):
        page = gl.max(gl.where(gl.arange(0, 32, LANES) == copy, pages, 0), 0)
        place = page * page_step + tile.kv_head * head_step
        first = key + copy * COPIED
        used = tile.seqlen_kv - first // PAGE * PAGE
        copy_in(
            descs[0], [FAR, used, place, FAR - tile.seqlen_kv + first, 0],
            ring.full.index(state.stage), ring.tiles[0].index(state.stage).slice(copy * COPIED, COPIED, 3)
        )

@gluon.jit
def convert_block(raw, raw_state, ring, state):
    """Converts the next block of keys or values, and returns the next states."""
    raw.wait_full(raw_state)
    ring.wait_empty(state)
    source = raw.tiles[0].index(raw_state.stage).reshape([BLOCK_N, HEAD_DIM])
    target = ring.tiles[0].index(state.stage).reshape([BLOCK_N, HEAD_DIM])
    for part in gl.static_range(BLOCK_N // CONVERTED):
        keys = source.slice(part * CONVERTED, CONVERTED, 0).load(RAW_LAYOUT)
        # Through float32: a direct conversion of float16 to bfloat16 takes the unit of exponentials.
        target.slice(part * CONVERTED, CONVERTED, 0).store(keys.to(gl.float16))
    fence_async_shared()
    mbarrier.arrive(ring.full.index(state.stage))
    return raw.release(raw_state), ring.advance(state)


@gluon.jit
def convert(raw, k, v, scheduler):
    """Converts the blocks of a program, in the order in which the producer copies them."""
    num_programs = gl.num_programs(0)
    raw_state = start_pipeline(0)
    k_state = start_pipeline(1)
    v_state = start_pipeline(1)
    for index in range(gl.program_id(0), scheduler.total, num_programs):
        tile = scheduler.get_tile(index, num_programs)
        n_last = get_n_block_max(tile, tile.m_block * TILE_POSITIONS, TILE_POSITIONS) - 1
        n_further = n_last
        for step in range(n_further + 2):
            if step <= n_further:
                raw_state, k_state = convert_block(raw, raw_state, k, k_state)
            if step > 0:
                raw_state, v_state = convert_block(raw, raw_state, v, v_state)

@gluon.jit
def produce(q_descs, k_descs, v_descs, q, k, v, scheduler, k_steps, v_steps):
    """Copies the tiles of a program, in the order in which consumers read them."""
    num_programs = gl.num_programs(0)
    q_state = start_pipeline(1)
    k_state = start_pipeline(1)
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
        # Page numbers of this block of keys, and of that of values.
        k_pages = load_pages(scheduler, this, n_last)
        # Not `k_pages`: Triton takes a name for constant in a loop that assigns its first value to it.
        v_pages = gl.zeros([32], gl.int32, LANES)
        # Consumers read the values of a block after the keys of the next one.
        for step in range(n_further + 2):
            # Numbers are loaded a block ahead of their use.
            further = gl.maximum(n_last - step - 1, 0)
            next_pages = load_pages(scheduler, this, further)
            if step <= n_further:
                key = (n_last - step) * BLOCK_N
                k.wait_empty(k_state)
                mbarrier.expect(k.full.index(k_state.stage), 8192)
                copy_k(k, k_state, k_descs, k_pages, this, key, k_steps)
                k_state = k.advance(k_state)
            if step > 0:
                key = (n_last - step + 1) * BLOCK_N
                v.wait_empty(k_state)
                mbarrier.expect(v.full.index(k_state.stage), 8192)
                copy_v(v, k_state, v_descs, v_pages, this, key, v_steps)
                k_state = v.advance(k_state)
            v_pages = k_pages
            k_pages = next_pages

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
def consume(GROUP: gl.constexpr, q, k, v, outputs, scale_log2, scheduler, scales):
    """Computes one group's rows of every tile, from the last block of keys to the first."""
    num_programs = gl.num_programs(0)
    o_tiles, o_descs, lse = outputs
    q_state = start_pipeline(0)
    k_state = start_pipeline(0)
    v_state = start_pipeline(0)
    n_offsets = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
    no_scores = gl.zeros([GROUP_M, BLOCK_N], gl.float32, S_LAYOUT)
    declare_vote(GROUP)
    if GROUP == GROUPS - 1:
        signal_named_barrier(GROUP)

    tile = scheduler.get_tile(gl.program_id(0), num_programs)
    states = q_state, k_state, v_state
    m_start, n_last, s, k_state, v_state = start_tile(GROUP, tile, (q, k, v), states, no_scores, 0, True)
    for index in range(gl.program_id(0), scheduler.total, num_programs):
        this, this_m_start = tile, m_start
        k_scale, v_scale, k_strides, v_strides = scales
        s_scale_log2 = scale_log2 * gl.load(k_scale + this.batch * k_strides[0] + this.kv_head * k_strides[1])
        # With a scale of 0, masked scores would be NaN: -inf * 0.
        s_scale_log2 = gl.where(s_scale_log2 == 0.0, 1e-30, s_scale_log2)
        o_scale = gl.load(v_scale + this.batch * v_strides[0] + this.kv_head * v_strides[1])
        n_block_min = 0
        passed = 0

        # The first block has its own code: its scores were issued before the previous tile was stored.
        s = warpgroup_mma_wait(0, deps=[s])
        k_state = k.release(k_state)
        if (n_last + 1) * BLOCK_N > this.seqlen_kv:
            s = mask_from(s, this.seqlen_kv, n_last, n_offsets)
        row_max = gl.max(s, 1) * s_scale_log2
        running_sum, p = exponentiate(s, row_max, s_scale_log2)
        p = gl.convert_layout(p.to(ELEMENT), P_LAYOUT)
        accumulator = gl.zeros([GROUP_M, 64], gl.float32, O_LAYOUT)

        for _ in range(n_last - 1, n_block_min - 1, -1):
            k.wait_full(k_state)
            wait_named_barrier(GROUP)
            s = issue_qk(GROUP, q, k, q_state, k_state, no_scores)
            v.wait_full(v_state)
            accumulator = issue_pv(p, v, v_state, accumulator)
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
            accumulator = warpgroup_mma_wait(0, deps=[accumulator])
            v_state = v.release(v_state)
            if needs_rescale(GROUP):
                accumulator = rescale_output(rescale, accumulator)
            p = gl.convert_layout(p.to(ELEMENT), P_LAYOUT)

        q_state = q.release(q_state, GROUP)
        v.wait_full(v_state)
        accumulator = issue_pv(p, v, v_state, accumulator)
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
    k_scale,
    v_scale,
    seqlens_kv,
    block_table,
    scale,
    heads,
    group_size,
    all_heads,
    seqlen_q,
    seqlen_kv,
    heads_per_swizzle,
    stride_k_scale_p,
    stride_k_scale_h,
    stride_v_scale_p,
    stride_v_scale_h,
    stride_table,
    k_page_step,
    k_head_step,
    v_page_step,
    v_head_step,
):
    q_tiles = gl.allocate_shared_memory(
        ELEMENT, [Q_STAGES * GROUPS, 1, 1, PACK, GROUP_POSITIONS, 64], gl.NVMMASharedLayout(128, 16, 5)
    )
    k_tiles = gl.allocate_shared_memory(
        ELEMENT, [STAGES, 1, 1, 1, BLOCK_N, 64], gl.NVMMASharedLayout(128, 16, 5)
    )
    v_tiles = gl.allocate_shared_memory(
        ELEMENT, [STAGES, 1, 1, 1, BLOCK_N, 64], gl.NVMMASharedLayout(128, 16, 5)
    )
    o_tiles = gl.allocate_shared_memory(
        OUT_ELEMENT, [GROUPS, 1, 1, PACK, GROUP_POSITIONS, 64], gl.NVMMASharedLayout(128, 16, 5)
    )
    raw_tiles = gl.allocate_shared_memory(
        gl.float8e4nv, [RAW_STAGES, 1, 1, 1, BLOCK_N, 64], gl.NVMMASharedLayout(64, 8, 5)
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
    raw_full = gl.allocate_shared_memory(gl.int64, [RAW_STAGES, 1], BARRIER)
    raw_empty = gl.allocate_shared_memory(gl.int64, [RAW_STAGES, 1], BARRIER)
    for slot in gl.static_range(RAW_STAGES):
        mbarrier.init(raw_full.index(slot), count=1)
        mbarrier.init(raw_empty.index(slot), count=1)
    raw = Pipeline((raw_tiles,), raw_full, raw_empty, RAW_STAGES, 1)
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
        seqlens_kv, block_table, seqlen_kv, stride_table
    )
    k_steps, v_steps = (k_page_step, k_head_step), (v_page_step, v_head_step)
    scales = k_scale, v_scale, (stride_k_scale_p, stride_k_scale_h), (stride_v_scale_p, stride_v_scale_h)
    q_descs, k_descs = (q_desc,), (k_desc,)
    v_descs, o_descs = (v_desc,), (o_desc,)
    outputs = (o_tiles,), o_descs, lse
    gl.warp_specialize(
        [
            (consume, (0, q, k, v, outputs, scale_log2, scheduler, scales)),
            (consume, (1, q, k, v, outputs, scale_log2, scheduler, scales)),
            (convert, (raw, k, v, scheduler)),
            (produce, (q_descs, k_descs, v_descs, q, raw, raw, scheduler, k_steps, v_steps)),
        ],
        [4, 4, 1],
        [208, 56, 40],
    )


def page_steps(tensor):
    """Returns a step in elements of which pages and heads are a multiple apart, and these multiples."""
    of_page, of_head, of_row, _ = tensor.stride()
    step, rest = of_page, of_head
    while rest:
        step, rest = rest, step % rest
    step = step or of_row
    return step, of_page // step, of_head // step


def descriptors(q, k, v, out):
    """Returns the TMA descriptors of each tensor. Reads past its ends give zeros; writes there do nothing."""

    def by_pages(tensor):
        """Shape and strides under which the rows of any page end where the sequence does.

        The sequence has n keys from the first row of the page on. Row r of the page has the coordinates (FAR, n,
        place, FAR - n + r). It is outside the tensor if r >= n. FAR steps of the first stride and FAR steps of a
        row add up to a multiple of 2^64. Addresses wrap around, so that the offset is r steps of a row. No
        dimension is left for heads: `place` counts the steps of `page_steps`.
        """
        pages, heads, _, width = tensor.shape
        of_row, beyond = tensor.stride(2), 2**31 - 2**16
        step, of_page, of_head = page_steps(tensor)
        places = (pages - 1) * of_page + (heads - 1) * of_head + 1
        if places >= 2**31:
            raise ValueError(f"pages have strides {tensor.stride()}, expected multiples of a power of two above {step}")
        return [beyond, beyond, places, 2**30, width], [2**34 - of_row, of_row, step, of_row, 1]

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
                q, *by_groups(q), [1, 1, 1, 64, 64], gl.NVMMASharedLayout(128, 16, 5)
            ),
        ),
        (
            TensorDescriptor(
                k, *by_pages(k), [1, 1, 1, 64, 64], gl.NVMMASharedLayout(64, 8, 5)
            ),
        ),
        (
            TensorDescriptor(
                v, *by_pages(v), [1, 1, 1, 64, 64], gl.NVMMASharedLayout(64, 8, 5)
            ),
        ),
        (
            TensorDescriptor(
                out, *by_groups(out), [1, 1, 1, 64, 64], gl.NVMMASharedLayout(128, 16, 5)
            ),
        ),
    )


def launch_plan(q, k, v, out, k_scale, v_scale, seqlens_kv, block_table):
    """Grid, shapes of float32 workspaces, and the kernel's arguments from `heads` on."""
    batch, heads, seqlen_q, _ = q.shape
    kv_heads, seqlen_kv = k.shape[1], block_table.shape[1] * 64
    packs = batch * kv_heads * triton.cdiv(heads // kv_heads, 1)
    tiles = triton.cdiv(seqlen_q, 128) * packs
    multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
    grid = (min(tiles, multiprocessors),)
    heads_per_swizzle = packs
    workspaces = ()
    of_pages = (k_scale.stride(0), k_scale.stride(1), v_scale.stride(0), v_scale.stride(1), block_table.stride(0),
        *page_steps(k)[1:], *page_steps(v)[1:])
    return grid, workspaces, (heads, heads // kv_heads, heads * batch, seqlen_q, seqlen_kv, heads_per_swizzle, *of_pages)


def attention(q, k, v, scale=None, *, k_scale, v_scale, seqlens_kv, block_table):
    """Attention of q, k, v, each [batch, heads, seqlen, head_dim] with a contiguous last dimension.

    k and v are [pages, kv_heads, 64, head_dim]. Sequence b has seqlens_kv[b] keys, in the pages
    block_table[b], both int32.
    They are float8_e4m3fn. Keys and values are these numbers times k_scale and v_scale, [batch, kv_heads].

    Returns the output [batch, heads, seqlen_q, value_head_dim] and the log-sum-exp of each row,
    [batch, heads, seqlen_q] in float32 (None: this kernel does not write it).
    """
    # The kernel itself checks nothing: other sizes, types or strides would read and write other memory.
    large = [("q", q), ("k", k), ("v", v)]
    for name, tensor in [
        *large,
        ("block_table", block_table),
    ]:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, expected a tensor")
    dtype = torch.float16
    for name, tensor in large:
        if tensor.ndim != 4:
            raise ValueError(f"{name} has {tensor.ndim} dimensions, expected 4")
    heads, seqlen_q = q.shape[1:3]
    kv_heads = k.shape[1]
    batch = q.shape[0]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"k has {kv_heads} heads, expected a divisor of the {heads} heads of q")
    rows = (batch, heads, seqlen_q)
    keys = (k.shape[0], kv_heads, 64)
    stored = torch.float8_e4m3fn
    factors = (batch, kv_heads)
    for name, tensor, expected, shape in (
        ("q", q, dtype, (*rows, 64)),
        ("k", k, stored, (*keys, 64)),
        ("v", v, stored, (*keys, 64)),
        ("k_scale", k_scale, torch.float32, factors),
        ("v_scale", v_scale, torch.float32, factors),
        ("seqlens_kv", seqlens_kv, torch.int32, (batch,)),
        ("block_table", block_table, torch.int32, (batch, *block_table.shape[-1:])),
    ):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, expected a tensor")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, expected {q.device}, the device of q")
        if tensor.dtype != expected:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected {expected}")
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
        if (name not in ("k_scale", "v_scale")) and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}, expected 1 for the last dimension")
    for name, tensor in large:
        if any(stride % 16 for stride in tensor.stride()[:3]):
            raise ValueError(f"{name} has strides {tensor.stride()}, expected multiples of 16 before the last")
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name} has the address {tensor.data_ptr()}, expected a multiple of 16")
    if block_table.numel() and k.shape[0] == 0:
        raise ValueError("k has no pages, and block_table lists some")
    if not q.is_cuda:
        raise ValueError(f"q is on {q.device}, expected a GPU")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if scale < 0:
        q, scale = -q, -scale
    batch, heads, seqlen_q, _ = q.shape
    out = torch.empty(batch, heads, seqlen_q, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = None
    if out.numel() == 0 or k.shape[2] == 0:
        return out.zero_(), lse if lse is None else lse.fill_(float("-inf"))
    grid, _, integers = launch_plan(q, k, v, out, k_scale, v_scale, seqlens_kv, block_table)
    tensors = (q, k, v, out)
    for parameter in forward_hopper.params[-len(integers) :]:
        # By default Triton makes an integer of 1 a constant, but fields of aggregates are tensors. A decorator would
        # change the digest of the kernel.
        parameter.do_not_specialize = True
    forward_hopper[grid](
        *(descriptor for parts in descriptors(*tensors) for descriptor in parts),
        out if lse is None else lse,
        k_scale,
        v_scale,
        seqlens_kv,
        block_table,
        max(scale, 1e-30),
        *integers,
        num_warps=4,
        num_stages=2,
    )
    return out, lse
