# A stand-alone kernel by flashtune 0.1.0; it needs torch and triton alone.
# `attention(q, k, v, scale)` runs it. Selected for:
#   nvidia-h200  forward_bf16_d192v128_h128x128_b1_q4096_k4096_bottom_right  1.0626 ms measured

"""Attention forward on Hopper, in Gluon: one warp copies tiles in, groups of four warps compute.

Computes     bf16, head dim 192, value head dim 128, causal: bottom_right, varlen: False, dropout: False
Window       -1 keys to the left, -1 to the right; -1 is no bound
Config       num_consumer_groups 2, rows_per_group 64, block_n 64, num_stages 2, q_stages 1,
             split_epilogue True, ping_pong False, defer_pv_wait True, conditional_rescale True,
             p_stages 0, split_head_dim True, pack_gqa 1, head_swizzle 4,
             lpt True, serpentine True, balanced_grid True
Assumes      addresses and strides that are multiples of 16 bytes
Template     forward_hopper f167a4c0295a

The shape is FlashAttention-3's (Shah et al., 2024): a producer warp feeds rings of K and V through the
tensor memory accelerator, consumer groups issue asynchronous matrix products, and the next block's
scores are made while this block is weighted. Rescaling the accumulator only when a maximum grows by
much is FlashAttention-4's (Shah et al., 2026). Programs are persistent, and the first scores of a
tile are made before the tile before it is stored.

Sub-notation
  *_desc                            what the copy engine knows of a tensor: shape, strides, tile
  *_tiles                           a ring of tiles in shared memory
  *_full, *_empty                   barriers of a ring: a tile has arrived, a tile may be overwritten
  *_stage, *_phase                  the slot of a ring that comes next, and the parity of its barrier
  *_log2                            a quantity in units of log2, so that exp2 serves for exp
  pack                              PACK query heads of one KV head, whose rows share a tile
  head                              the first query head of a pack, counted within its KV head's group
Tunables
  GROUPS, ROWS, BLOCK_N             consumer groups, rows of a group's tile, keys of a block
  STAGES, Q_STAGES                  tiles of K and of V, and of queries for each group, in flight
  P_STAGES                          tiles of weights of each group in shared memory, of 8-bit kernels
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

# Triton 3.9 renamed the copies.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

GROUPS = gl.constexpr(2)
ROWS = gl.constexpr(64)
BLOCK_N = gl.constexpr(64)
STAGES = gl.constexpr(2)
Q_STAGES = gl.constexpr(1)
PACK = gl.constexpr(1)
# Positions of a group's rows, and of all groups' together.
POSITIONS = gl.constexpr(64)
TILE = gl.constexpr(128)
HEAD_DIM = gl.constexpr(192)
VALUE_HEAD_DIM = gl.constexpr(128)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# A maximum may be outgrown by this much, in log2, before the accumulator is rescaled to a new one.
SLACK = gl.constexpr(8.0)
# Rows of a thread.
FLAGS = gl.constexpr(2)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, SCORES))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, OUTPUT, 2))
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


@gluon.jit
def next_slot(stage, phase, STAGES: gl.constexpr):
    """The slot of a ring after this one; each time around, the parity of its barriers flips."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def locate(index, workers, total, tiles, section, all_packs, packs, packs_per_kv):
    """Which tile of queries is the index-th, and of which sequence, KV head and query heads.

    Heads come in sections, so that those that are worked on at a time share the L2 cache; within a
    section neighbours in order are different heads.
    """
    # Every other round runs backwards: who had a long tile gets a short one.
    turn = index // workers
    backwards = (turn % 2 == 1) & ((turn + 1) * workers <= total)
    index = gl.where(backwards, (2 * turn + 1) * workers - 1 - index, index)
    first_pack = index // (section * tiles) * section
    within = index % (section * tiles)
    width = gl.minimum(section, all_packs - first_pack)
    tile = within // width
    # The last tiles see the most keys: started first, they do not end last.
    tile = tiles - 1 - tile
    pack = first_pack + within % width
    batch = pack // packs
    kv_head = pack % packs // packs_per_kv
    return tile, batch, kv_head, pack % packs % packs_per_kv * PACK


@gluon.jit
def count_blocks(first, positions, seqlen_q, seqlen_kv):
    """Blocks of keys that some query of a tile may see, and at least one."""
    last_key = gl.minimum(first + positions + seqlen_kv - seqlen_q, seqlen_kv)
    return gl.maximum((last_key + BLOCK_N - 1) // BLOCK_N, 1)


@gluon.constexpr_function
def operands(returned, kind, count):
    """Constraints of PTX that returns so many registers and takes `count` of a kind."""
    return ",".join(["=r"] * returned + [kind] * count)


@gluon.jit
def declare_growth(GROUP: gl.constexpr):
    """A register for each thread, which holds whether some row of its warp needs a new maximum."""
    gl.inline_asm_elementwise(f".reg .b32 growth_{GROUP}; mov.b32 $0, 0;", "=r,r", [0], gl.int32, False, 1)


@gluon.constexpr_function
def voting(group, flags):
    """PTX that notes whether one of a thread's flags is set in any lane of its warp."""
    lines = ["{ .reg .pred any, one; setp.ne.s32 any, 0, 0;"]
    for flag in range(flags):
        lines.append(f"setp.ne.s32 one, ${flags + flag}, 0; or.pred any, any, one; mov.b32 ${flag}, 0;")
    return " ".join([*lines, f"vote.sync.any.pred any, any, 0xffffffff; selp.b32 growth_{group}, 1, 0, any; }}"])


@gluon.jit
def note_growth(growth, GROUP: gl.constexpr):
    """Asks all lanes of the warp; a warp has no need to know of the others' rows."""
    asm: gl.constexpr = voting(GROUP, FLAGS)
    kinds: gl.constexpr = operands(FLAGS, "r", FLAGS)
    gl.inline_asm_elementwise(asm, kinds, [growth], gl.int32, False, FLAGS)


@gluon.jit
def has_grown(GROUP: gl.constexpr):
    return gl.inline_asm_elementwise(f"mov.b32 $0, growth_{GROUP};", "=r,r", [0], gl.int32, False, 1) != 0


@gluon.jit
def produce(
    q_desc_0, q_desc_1, k_desc_0, k_desc_1, v_desc, q_tiles_0, q_tiles_1, k_tiles_0, k_tiles_1, v_tiles,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, total, tiles, section, all_packs, packs,
    packs_per_kv, seqlen_q, seqlen_kv,
):
    """Copies the tiles of all of this program's work in, in the order in which consumers want them."""
    workers = gl.num_programs(0)
    q_stage, q_phase = 0, 1
    k_stage, k_phase = 0, 1
    v_stage, v_phase = 0, 1
    tile, batch, kv_head, head = locate(gl.program_id(0), workers, total, tiles, section, all_packs, packs, packs_per_kv)
    for index in range(gl.program_id(0), total, workers):
        last = count_blocks(tile * TILE, TILE, seqlen_q, seqlen_kv) - 1
        for group in gl.static_range(GROUPS):
            slot = q_stage * GROUPS + group
            mbarrier.wait(q_empty.index(slot), q_phase)
            mbarrier.expect(q_full.index(slot), 24576)
            position = tile * TILE + group * POSITIONS
            q_tile = q_tiles_0.index(slot)
            copy_in(q_desc_0, [batch, kv_head, head, position, 0], q_full.index(slot), q_tile)
            q_tile = q_tiles_1.index(slot)
            copy_in(q_desc_1, [batch, kv_head, head, position, 128], q_full.index(slot), q_tile)
        q_stage, q_phase = next_slot(q_stage, q_phase, Q_STAGES)
        this_batch, this_kv_head = batch, kv_head
        upcoming = gl.minimum(index + workers, total - 1)
        tile, batch, kv_head, head = locate(upcoming, workers, total, tiles, section, all_packs, packs, packs_per_kv)
        # Values are wanted one block after keys.
        for step in range(last + 2):
            if step <= last:
                key = (last - step) * BLOCK_N
                mbarrier.wait(k_empty.index(k_stage), k_phase)
                mbarrier.expect(k_full.index(k_stage), 24576)
                k_tile = k_tiles_0.index(k_stage)
                copy_in(k_desc_0, [this_batch, this_kv_head, key, 0], k_full.index(k_stage), k_tile)
                k_tile = k_tiles_1.index(k_stage)
                copy_in(k_desc_1, [this_batch, this_kv_head, key, 128], k_full.index(k_stage), k_tile)
                k_stage, k_phase = next_slot(k_stage, k_phase, STAGES)
            if step > 0:
                key = (last - step + 1) * BLOCK_N
                mbarrier.wait(v_empty.index(v_stage), v_phase)
                mbarrier.expect(v_full.index(v_stage), 16384)
                v_tile = v_tiles.index(v_stage)
                copy_in(v_desc, [this_batch, this_kv_head, key, 0], v_full.index(v_stage), v_tile)
                v_stage, v_phase = next_slot(v_stage, v_phase, STAGES)


@gluon.jit
def consume(
    GROUP: gl.constexpr,
    q_tiles_0, q_tiles_1, k_tiles_0, k_tiles_1, v_tiles, o_tiles, q_full, q_empty, k_full, k_empty, v_full,
    v_empty, o_desc, lse, scale_log2, total, tiles, section, all_packs, packs, packs_per_kv, kv_heads,
    group_size, seqlen_q, seqlen_kv,
):
    """Attention of one group's rows of every tile, blocks of keys from the last to the first."""
    workers = gl.num_programs(0)
    q_stage, q_phase = 0, 0
    k_stage, k_phase = 0, 0
    v_stage, v_phase = 0, 0
    row_offsets = gl.arange(0, ROWS, SCORE_ROWS)
    key_offsets = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    declare_growth(GROUP)

    tile, batch, kv_head, head = locate(gl.program_id(0), workers, total, tiles, section, all_packs, packs, packs_per_kv)
    first = tile * TILE + GROUP * POSITIONS
    block = count_blocks(first, POSITIONS, seqlen_q, seqlen_kv) - 1
    # Blocks that only later groups see pass by, after those that only earlier groups saw of the tile before.
    hidden = count_blocks(tile * TILE, TILE, seqlen_q, seqlen_kv) - 1 - block
    for _ in range(hidden):
        mbarrier.wait(k_full.index(k_stage), k_phase)
        mbarrier.arrive(k_empty.index(k_stage))
        k_stage, k_phase = next_slot(k_stage, k_phase, STAGES)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        mbarrier.arrive(v_empty.index(v_stage))
        v_stage, v_phase = next_slot(v_stage, v_phase, STAGES)
    mbarrier.wait(q_full.index(q_stage * GROUPS + GROUP), q_phase)
    mbarrier.wait(k_full.index(k_stage), k_phase)
    q_tile = q_tiles_0.index(q_stage * GROUPS + GROUP).reshape([ROWS, 128])
    k_tile = k_tiles_0.index(k_stage).reshape([BLOCK_N, 128])
    scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    q_tile = q_tiles_1.index(q_stage * GROUPS + GROUP).reshape([ROWS, 64])
    k_tile = k_tiles_1.index(k_stage).reshape([BLOCK_N, 64])
    scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), scores, is_async=True)
    for index in range(gl.program_id(0), total, workers):
        this_first, this_batch, this_kv_head, this_head = first, batch, kv_head, head
        positions = first + row_offsets % POSITIONS
        diagonal = seqlen_kv - seqlen_q
        # Query i sees the keys before visible_end[i]; blocks before open_blocks are seen whole by all rows.
        visible_end = gl.minimum(positions + diagonal + 1, seqlen_kv)
        open_blocks = gl.maximum(gl.minimum(first + diagonal + 1, seqlen_kv), 0) // BLOCK_N

        # The first block stands alone: its scores were issued while the tile before was finished.
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(k_stage))
        k_stage, k_phase = next_slot(k_stage, k_phase, STAGES)
        if block >= open_blocks:
            # Columns of a thread differ by constants: one subtraction serves them all.
            limits = visible_end[:, None] - block * BLOCK_N - (key_offsets & 6)[None, :]
            scores = gl.where((key_offsets & -7)[None, :] < limits, scores, float("-inf"))
        row_max = gl.max(scores, 1) * scale_log2
        # A row that has seen no key yet: its maximum is -inf, and -inf - -inf would be NaN.
        shift = gl.where(row_max == float("-inf"), 0.0, row_max)
        exponentials = gl.exp2(scores * scale_log2 - shift[:, None])
        # Each thread sums its own columns; rows are summed over threads once, at the end.
        block_sum = gl.sum(gl.sum(exponentials.reshape([ROWS, BLOCK_N // 8, 4, 2]), 3), 1)
        running_sum = block_sum
        weights = gl.convert_layout(exponentials.to(gl.bfloat16), WEIGHTS)
        accumulator = gl.zeros([ROWS, 128], gl.float32, OUTPUT)

        for earlier in range(block - 1, -1, -1):
            mbarrier.wait(k_full.index(k_stage), k_phase)
            q_tile = q_tiles_0.index(q_stage * GROUPS + GROUP).reshape([ROWS, 128])
            k_tile = k_tiles_0.index(k_stage).reshape([BLOCK_N, 128])
            scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            q_tile = q_tiles_1.index(q_stage * GROUPS + GROUP).reshape([ROWS, 64])
            k_tile = k_tiles_1.index(k_stage).reshape([BLOCK_N, 64])
            scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), scores, is_async=True)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            v_tile = v_tiles.index(v_stage).reshape([BLOCK_N, 128])
            accumulator = warpgroup_mma(weights, v_tile, accumulator, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(k_empty.index(k_stage))
            k_stage, k_phase = next_slot(k_stage, k_phase, STAGES)
            if earlier >= open_blocks:
                # Columns of a thread differ by constants: one subtraction serves them all.
                limits = visible_end[:, None] - earlier * BLOCK_N - (key_offsets & 6)[None, :]
                scores = gl.where((key_offsets & -7)[None, :] < limits, scores, float("-inf"))
            block_max = gl.max(scores, 1) * scale_log2
            grows = block_max > row_max + SLACK
            note_growth(grows.to(gl.int32), GROUP)
            new_max = gl.where(grows, block_max, row_max)
            rescale = gl.exp2(row_max - gl.where(new_max == float("-inf"), 0.0, new_max))
            row_max = new_max
            # A row that has seen no key yet: its maximum is -inf, and -inf - -inf would be NaN.
            shift = gl.where(row_max == float("-inf"), 0.0, row_max)
            exponentials = gl.exp2(scores * scale_log2 - shift[:, None])
            # Each thread sums its own columns; rows are summed over threads once, at the end.
            block_sum = gl.sum(gl.sum(exponentials.reshape([ROWS, BLOCK_N // 8, 4, 2]), 3), 1)
            sum_rescale = gl.convert_layout(rescale, gl.SliceLayout(1, running_sum.type.layout))
            running_sum = running_sum * sum_rescale[:, None] + block_sum
            # It is full since long, but a wait ends a basic block: without it ptxas hoists the wait for
            # the product above the exponentials, which it could run beside.
            mbarrier.wait(v_full.index(v_stage), v_phase)
            accumulator = warpgroup_mma_wait(0, deps=[accumulator])
            mbarrier.arrive(v_empty.index(v_stage))
            v_stage, v_phase = next_slot(v_stage, v_phase, STAGES)
            if has_grown(GROUP):
                accumulator = accumulator * gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT))[:, None]
            weights = gl.convert_layout(exponentials.to(gl.bfloat16), WEIGHTS)

        mbarrier.arrive(q_empty.index(q_stage * GROUPS + GROUP))
        q_stage, q_phase = next_slot(q_stage, q_phase, Q_STAGES)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        v_tile = v_tiles.index(v_stage).reshape([BLOCK_N, 128])
        accumulator = warpgroup_mma(weights, v_tile, accumulator, is_async=True)
        # What comes next is worked out beside the last product: divisions take long.
        more = index + workers < total
        upcoming = gl.where(more, index + workers, index)
        tile, batch, kv_head, head = locate(upcoming, workers, total, tiles, section, all_packs, packs, packs_per_kv)
        accumulator = warpgroup_mma_wait(0, deps=[accumulator])
        mbarrier.arrive(v_empty.index(v_stage))
        v_stage, v_phase = next_slot(v_stage, v_phase, STAGES)
        first = tile * TILE + GROUP * POSITIONS
        block = count_blocks(first, POSITIONS, seqlen_q, seqlen_kv) - 1
        # Blocks that only later groups see pass by, after those that only earlier groups saw of the tile before.
        hidden = count_blocks(tile * TILE, TILE, seqlen_q, seqlen_kv) - 1 - block
        for _ in range(gl.where(more, hidden, 0)):
            mbarrier.wait(k_full.index(k_stage), k_phase)
            mbarrier.arrive(k_empty.index(k_stage))
            k_stage, k_phase = next_slot(k_stage, k_phase, STAGES)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            mbarrier.arrive(v_empty.index(v_stage))
            v_stage, v_phase = next_slot(v_stage, v_phase, STAGES)
        mbarrier.wait(q_full.index(q_stage * GROUPS + GROUP), q_phase, pred=more)
        mbarrier.wait(k_full.index(k_stage), k_phase, pred=more)
        q_tile = q_tiles_0.index(q_stage * GROUPS + GROUP).reshape([ROWS, 128])
        k_tile = k_tiles_0.index(k_stage).reshape([BLOCK_N, 128])
        scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        q_tile = q_tiles_1.index(q_stage * GROUPS + GROUP).reshape([ROWS, 64])
        k_tile = k_tiles_1.index(k_stage).reshape([BLOCK_N, 64])
        scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), scores, is_async=True)

        # Rows that saw no key have a sum of zero: their output is zero and their log-sum-exp -inf.
        row_sum = gl.convert_layout(gl.sum(running_sum, 1), SCORE_ROWS)
        factor = 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum)
        o_tile = (accumulator * gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT))[:, None]).to(gl.bfloat16)
        # In two halves through one half's room.
        left, right = o_tile.reshape([ROWS, 2, 64]).permute(0, 2, 1).split()
        HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
        tma.store_wait(0)
        o_tiles.index(GROUP).reshape([ROWS, 64]).store(gl.convert_layout(left, HALF))
        fence_async_shared()
        copy_out(o_desc, [this_batch, this_kv_head, this_head, this_first, 0], o_tiles.index(GROUP))
        tma.store_wait(0)
        o_tiles.index(GROUP).reshape([ROWS, 64]).store(gl.convert_layout(right, HALF))
        fence_async_shared()
        copy_out(o_desc, [this_batch, this_kv_head, this_head, this_first, 64], o_tiles.index(GROUP))
    warpgroup_mma_wait(0, deps=[scores])
    tma.store_wait(0)


@gluon.jit
def forward_hopper(
    q_desc_0,
    q_desc_1,
    k_desc_0,
    k_desc_1,
    v_desc,
    o_desc,
    lse,
    scale,
    heads,
    group_size,
    all_heads,
    seqlen_q,
    seqlen_kv,
    section,
):
    q_tiles_0 = gl.allocate_shared_memory(
        gl.bfloat16, [Q_STAGES * GROUPS, 1, 1, PACK, POSITIONS, 128], gl.NVMMASharedLayout(128, 16, 5)
    )
    k_tiles_0 = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, 1, 1, BLOCK_N, 128], gl.NVMMASharedLayout(128, 16, 4)
    )
    q_tiles_1 = gl.allocate_shared_memory(
        gl.bfloat16, [Q_STAGES * GROUPS, 1, 1, PACK, POSITIONS, 64], gl.NVMMASharedLayout(128, 16, 5)
    )
    k_tiles_1 = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, 1, 1, BLOCK_N, 64], gl.NVMMASharedLayout(128, 16, 4)
    )
    v_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, 1, 1, BLOCK_N, 128], gl.NVMMASharedLayout(128, 16, 4)
    )
    o_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [GROUPS, 1, 1, PACK, POSITIONS, 64], gl.NVMMASharedLayout(128, 16, 5)
    )
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES * GROUPS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES * GROUPS, 1], BARRIER)
    for slot in gl.static_range(Q_STAGES * GROUPS):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(q_empty.index(slot), count=1)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=GROUPS)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for slot in gl.static_range(STAGES):
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(v_empty.index(slot), count=GROUPS)
    fence_async_shared()

    kv_heads = heads // group_size
    # Heads of a pack that lie beyond their group are read as zeros and not written.
    packs_per_kv = (group_size + PACK - 1) // PACK
    packs = kv_heads * packs_per_kv
    all_packs = all_heads // heads * packs
    tiles = (seqlen_q + TILE - 1) // TILE
    total = tiles * all_packs
    scale_log2 = scale * LOG2_E
    gl.warp_specialize(
        [
            (
                consume,
                (
                    0,
                    q_tiles_0, q_tiles_1, k_tiles_0, k_tiles_1, v_tiles, o_tiles, q_full, q_empty, k_full,
                    k_empty, v_full, v_empty, o_desc, lse, scale_log2, total, tiles, section, all_packs,
                    packs, packs_per_kv, kv_heads, group_size, seqlen_q, seqlen_kv,
                ),
            ),
            (
                consume,
                (
                    1,
                    q_tiles_0, q_tiles_1, k_tiles_0, k_tiles_1, v_tiles, o_tiles, q_full, q_empty, k_full,
                    k_empty, v_full, v_empty, o_desc, lse, scale_log2, total, tiles, section, all_packs,
                    packs, packs_per_kv, kv_heads, group_size, seqlen_q, seqlen_kv,
                ),
            ),
            (
                produce,
                (
                    q_desc_0, q_desc_1, k_desc_0, k_desc_1, v_desc, q_tiles_0, q_tiles_1, k_tiles_0,
                    k_tiles_1, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, total, tiles,
                    section, all_packs, packs, packs_per_kv, seqlen_q, seqlen_kv,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


def descriptors(q, k, v, out):
    """Returns the TMA descriptors of each tensor. Reads past its ends give zeros; writes there do nothing."""
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
                q, *by_groups(q), [1, 1, 1, 64, 128], gl.NVMMASharedLayout(128, 16, 5)
            ),
            TensorDescriptor(
                q, *by_groups(q), [1, 1, 1, 64, 64], gl.NVMMASharedLayout(128, 16, 5)
            ),
        ),
        (
            TensorDescriptor(
                k, [*k.shape], [*k.stride()[:3], 1], [1, 1, 64, 128], gl.NVMMASharedLayout(128, 16, 4)
            ),
            TensorDescriptor(
                k, [*k.shape], [*k.stride()[:3], 1], [1, 1, 64, 64], gl.NVMMASharedLayout(128, 16, 4)
            ),
        ),
        (
            TensorDescriptor(
                v, [*v.shape], [*v.stride()[:3], 1], [1, 1, 64, 128], gl.NVMMASharedLayout(128, 16, 4)
            ),
        ),
        (
            TensorDescriptor(
                out, *by_groups(out), [1, 1, 1, 64, 64], gl.NVMMASharedLayout(128, 16, 5)
            ),
        ),
    )


def launch_plan(q, k, v, out):
    """Grid, shapes of float32 workspaces, and the kernel's arguments from `heads` on."""
    batch, heads, seqlen_q, _ = q.shape
    kv_heads, seqlen_kv = k.shape[1], k.shape[2]
    packs = batch * kv_heads * triton.cdiv(heads // kv_heads, 1)
    tiles = triton.cdiv(seqlen_q, 128) * packs
    multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
    # As few as finish in as many rounds.
    grid = (triton.cdiv(tiles, triton.cdiv(tiles, multiprocessors)),)
    section = min(packs, 4)
    workspaces = ()
    return grid, workspaces, (heads, heads // kv_heads, heads * batch, seqlen_q, seqlen_kv, section)


def attention(q, k, v, scale=None):
    """Attention of q, k, v, each [batch, heads, seqlen, head_dim] with a contiguous last dimension.

    Returns the output [batch, heads, seqlen_q, value_head_dim] and the log-sum-exp of each row,
    [batch, heads, seqlen_q] in float32 (None: this kernel does not write it).
    """
    # The kernel itself checks nothing: other sizes, types or strides would read and write other memory.
    dtype = torch.bfloat16
    large = [("q", q), ("k", k), ("v", v)]
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
        ("q", q, dtype, (*rows, 192)),
        ("k", k, dtype, (*keys, 192)),
        ("v", v, dtype, (*keys, 128)),
    ):
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, expected {q.device}, the device of q")
        if tensor.dtype != expected:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected {expected}")
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}, expected 1 for the last dimension")
    for name, tensor in large:
        if any(stride % 8 for stride in tensor.stride()[:3]):
            raise ValueError(f"{name} has strides {tensor.stride()}, expected multiples of 8 before the last")
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name} has the address {tensor.data_ptr()}, expected a multiple of 16")
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
    grid, _, integers = launch_plan(q, k, v, out)
    tensors = (q, k, v, out)
    forward_hopper[grid](
        *(descriptor for parts in descriptors(*tensors) for descriptor in parts),
        out if lse is None else lse,
        max(scale, 1e-30),
        *integers,
        num_warps=4,
        num_stages=2,
    )
    return out, lse
