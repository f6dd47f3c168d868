"""Attention forward on Hopper, in Gluon: one warp copies tiles in, groups of four warps compute.

Computes     fp16, head dim 96, value head dim 80, causal: bottom_right, varlen: False, dropout: True
Window       1024 keys to the left, -1 to the right; -1 is no bound
Config       num_consumer_groups 2, rows_per_group 64, block_n 128, num_stages 2, q_stages 1,
             split_epilogue False, ping_pong False, defer_pv_wait False, conditional_rescale False,
             p_stages 0, split_head_dim True, pack_gqa 1, head_swizzle 0,
             lpt False, serpentine False, balanced_grid False
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
BLOCK_N = gl.constexpr(128)
STAGES = gl.constexpr(2)
Q_STAGES = gl.constexpr(1)
PACK = gl.constexpr(1)
# Positions of a group's rows, and of all groups' together.
POSITIONS = gl.constexpr(64)
TILE = gl.constexpr(128)
HEAD_DIM = gl.constexpr(96)
VALUE_HEAD_DIM = gl.constexpr(80)
# How far back a query sees keys.
LEFT = gl.constexpr(1024)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, SCORES))
OUTPUT_0 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT_1 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, OUTPUT_0, 2))
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


@gluon.jit
def scrambled(word):
    """A permutation of 32 bits of which each bit hangs on all: lowbias32 (Wellons, 2018)."""
    word ^= word >> 16
    word *= 0x7FEB352D
    word ^= word >> 15
    word *= 0x846CA68B
    return word ^ (word >> 16)


@gluon.jit
def random_rows(seed, head_number, queries):
    """Two words of random state for each row; rows and heads are counted over all batches."""
    low = seed.to(gl.uint32)
    high = (seed >> 32).to(gl.uint32)
    head_number = head_number.to(gl.uint32)
    queries = queries.to(gl.uint32)
    first = scrambled(scrambled(scrambled(low) ^ high) ^ head_number)
    second = scrambled(scrambled(scrambled(low ^ 0x9E3779B9) ^ high) ^ head_number)
    return scrambled(first ^ queries), scrambled(second ^ queries)


@gluon.jit
def drop(weights, word, steps, row_second, fallen_words):
    """Weights, zero where they fall.

    Words of random state are `word + steps`. It is written as PTX, so that a weight's steps stand beside one another:
    done one by one for the whole tile, they take more registers than there are.
    """
    asm: gl.constexpr = (
        "{ .reg .b32 word, low, high; .reg .b64 product; .reg .pred stays; add.u32 word, $2, $3;"
        "mul.wide.u32 product, word, 0xED5AD4BB; mov.b64 {low, high}, product;"
        "xor.b32 low, low, high; xor.b32 low, low, $4; mul.lo.u32 low, low, 0xAC4C1B51;"
        "setp.ge.u32 stays, low, $5; selp.f32 $0, $1, 0f00000000, stays; }"
    )
    operands: gl.constexpr = "=f,f,r,r,r,r"
    return gl.inline_asm_elementwise(asm, operands, [weights, word, steps, row_second, fallen_words], gl.float32, True, 1)


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
    first_pack = index // (section * tiles) * section
    within = index % (section * tiles)
    width = gl.minimum(section, all_packs - first_pack)
    tile = within // width
    pack = first_pack + within % width
    batch = pack // packs
    kv_head = pack % packs // packs_per_kv
    return tile, batch, kv_head, pack % packs % packs_per_kv * PACK


@gluon.jit
def count_blocks(first, positions, seqlen_q, seqlen_kv):
    """Blocks of keys that some query of a tile may see, and at least one."""
    last_key = gl.minimum(first + positions + seqlen_kv - seqlen_q, seqlen_kv)
    return gl.maximum((last_key + BLOCK_N - 1) // BLOCK_N, 1)


@gluon.jit
def skip_blocks(first, count, seqlen_q, seqlen_kv):
    """Blocks before all that some query of a tile sees, which leave at least one of the first `count`."""
    first_key = first + seqlen_kv - seqlen_q - LEFT
    return gl.minimum(gl.maximum(first_key, 0) // BLOCK_N, count - 1)


@gluon.jit
def produce(
    q_desc_0, q_desc_1, k_desc_0, k_desc_1, v_desc_0, v_desc_1, q_tiles_0, q_tiles_1, k_tiles_0, k_tiles_1,
    v_tiles_0, v_tiles_1, q_full, q_empty, k_full, k_empty, v_full, v_empty, total, tiles, section,
    all_packs, packs, packs_per_kv, seqlen_q, seqlen_kv,
):
    """Copies the tiles of all of this program's work in, in the order in which consumers want them."""
    workers = gl.num_programs(0)
    q_stage, q_phase = 0, 1
    k_stage, k_phase = 0, 1
    v_stage, v_phase = 0, 1
    tile, batch, kv_head, head = locate(gl.program_id(0), workers, total, tiles, section, all_packs, packs, packs_per_kv)
    for index in range(gl.program_id(0), total, workers):
        last = count_blocks(tile * TILE, TILE, seqlen_q, seqlen_kv) - 1
        further = last - skip_blocks(tile * TILE, last + 1, seqlen_q, seqlen_kv)
        for group in gl.static_range(GROUPS):
            slot = q_stage * GROUPS + group
            mbarrier.wait(q_empty.index(slot), q_phase)
            mbarrier.expect(q_full.index(slot), 12288)
            position = tile * TILE + group * POSITIONS
            q_tile = q_tiles_0.index(slot)
            copy_in(q_desc_0, [batch, kv_head, head, position, 0], q_full.index(slot), q_tile)
            q_tile = q_tiles_1.index(slot)
            copy_in(q_desc_1, [batch, kv_head, head, position, 64], q_full.index(slot), q_tile)
        q_stage, q_phase = next_slot(q_stage, q_phase, Q_STAGES)
        this_batch, this_kv_head = batch, kv_head
        upcoming = gl.minimum(index + workers, total - 1)
        tile, batch, kv_head, head = locate(upcoming, workers, total, tiles, section, all_packs, packs, packs_per_kv)
        # Values are wanted one block after keys.
        for step in range(further + 2):
            if step <= further:
                key = (last - step) * BLOCK_N
                mbarrier.wait(k_empty.index(k_stage), k_phase)
                mbarrier.expect(k_full.index(k_stage), 24576)
                k_tile = k_tiles_0.index(k_stage)
                copy_in(k_desc_0, [this_batch, this_kv_head, key, 0], k_full.index(k_stage), k_tile)
                k_tile = k_tiles_1.index(k_stage)
                copy_in(k_desc_1, [this_batch, this_kv_head, key, 64], k_full.index(k_stage), k_tile)
                k_stage, k_phase = next_slot(k_stage, k_phase, STAGES)
            if step > 0:
                key = (last - step + 1) * BLOCK_N
                mbarrier.wait(v_empty.index(v_stage), v_phase)
                mbarrier.expect(v_full.index(v_stage), 20480)
                v_tile = v_tiles_0.index(v_stage)
                copy_in(v_desc_0, [this_batch, this_kv_head, key, 0], v_full.index(v_stage), v_tile)
                v_tile = v_tiles_1.index(v_stage)
                copy_in(v_desc_1, [this_batch, this_kv_head, key, 64], v_full.index(v_stage), v_tile)
                v_stage, v_phase = next_slot(v_stage, v_phase, STAGES)


@gluon.jit
def consume(
    GROUP: gl.constexpr,
    q_tiles_0, q_tiles_1, k_tiles_0, k_tiles_1, v_tiles_0, v_tiles_1, o_tiles_0, o_tiles_1, q_full, q_empty,
    k_full, k_empty, v_full, v_empty, o_desc_0, o_desc_1, lse, seed, dropout, scale_log2, total, tiles,
    section, all_packs, packs, packs_per_kv, kv_heads, group_size, seqlen_q, seqlen_kv,
):
    """Attention of one group's rows of every tile, blocks of keys from the last to the first."""
    workers = gl.num_programs(0)
    q_stage, q_phase = 0, 0
    k_stage, k_phase = 0, 0
    v_stage, v_phase = 0, 0
    row_offsets = gl.arange(0, ROWS, SCORE_ROWS)
    key_offsets = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    fallen_words = (dropout * 4294967296.0).to(gl.uint32)
    key_steps = ((key_offsets & -7).to(gl.uint32) * 0x9E3779B9)[None, :]

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
    q_tile = q_tiles_0.index(q_stage * GROUPS + GROUP).reshape([ROWS, 64])
    k_tile = k_tiles_0.index(k_stage).reshape([BLOCK_N, 64])
    scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    q_tile = q_tiles_1.index(q_stage * GROUPS + GROUP).reshape([ROWS, 32])
    k_tile = k_tiles_1.index(k_stage).reshape([BLOCK_N, 32])
    scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), scores, is_async=True)
    for index in range(gl.program_id(0), total, workers):
        this_first, this_batch, this_kv_head, this_head = first, batch, kv_head, head
        positions = first + row_offsets % POSITIONS
        head_numbers = (this_batch * kv_heads + this_kv_head) * group_size + this_head
        row_first, row_second = random_rows(gl.load(seed), head_numbers, positions)
        row_word = row_first[:, None] + ((key_offsets & 6).to(gl.uint32) * 0x9E3779B9)[None, :]
        diagonal = seqlen_kv - seqlen_q
        # Query i sees the keys before visible_end[i]; blocks before open_blocks are seen whole by all rows.
        visible_end = gl.minimum(positions + diagonal + 1, seqlen_kv)
        open_blocks = gl.maximum(gl.minimum(first + diagonal + 1, seqlen_kv), 0) // BLOCK_N
        # It sees those from visible_start[i] on; blocks from open_from on all rows see from their start.
        visible_start = positions + diagonal - LEFT
        open_from = (gl.maximum(first + POSITIONS - 1 + diagonal - LEFT, 0) + BLOCK_N - 1) // BLOCK_N
        # This group sees no block before `oldest`; earlier groups see `unseen` more.
        oldest = skip_blocks(first, block + 1, seqlen_q, seqlen_kv)
        whole = count_blocks(tile * TILE, TILE, seqlen_q, seqlen_kv)
        unseen = oldest - skip_blocks(tile * TILE, whole, seqlen_q, seqlen_kv)

        # The first block stands alone: its scores were issued while the tile before was finished.
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(k_stage))
        k_stage, k_phase = next_slot(k_stage, k_phase, STAGES)
        if block >= open_blocks:
            # Columns of a thread differ by constants: one subtraction serves them all.
            limits = visible_end[:, None] - block * BLOCK_N - (key_offsets & 6)[None, :]
            scores = gl.where((key_offsets & -7)[None, :] < limits, scores, float("-inf"))
        if block < open_from:
            starts = visible_start[:, None] - block * BLOCK_N - (key_offsets & 6)[None, :]
            scores = gl.where((key_offsets & -7)[None, :] >= starts, scores, float("-inf"))
        row_max = gl.max(scores, 1) * scale_log2
        # A row that has seen no key yet: its maximum is -inf, and -inf - -inf would be NaN.
        shift = gl.where(row_max == float("-inf"), 0.0, row_max)
        exponentials = gl.exp2(scores * scale_log2 - shift[:, None])
        # Each thread sums its own columns; rows are summed over threads once, at the end.
        block_sum = gl.sum(gl.sum(exponentials.reshape([ROWS, BLOCK_N // 8, 4, 2]), 3), 1)
        # What falls was summed all the same. Columns of a thread differ by constants: an addition makes a word.
        block_step = (block * BLOCK_N).to(gl.uint32) * 0x9E3779B9
        exponentials = drop(exponentials, row_word + block_step, key_steps, row_second[:, None], fallen_words)
        running_sum = block_sum
        weights = gl.convert_layout(exponentials.to(gl.float16), WEIGHTS)
        accumulator_0 = gl.zeros([ROWS, 64], gl.float32, OUTPUT_0)
        accumulator_1 = gl.zeros([ROWS, 16], gl.float32, OUTPUT_1)

        for earlier in range(block - 1, oldest - 1, -1):
            mbarrier.wait(k_full.index(k_stage), k_phase)
            q_tile = q_tiles_0.index(q_stage * GROUPS + GROUP).reshape([ROWS, 64])
            k_tile = k_tiles_0.index(k_stage).reshape([BLOCK_N, 64])
            scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            q_tile = q_tiles_1.index(q_stage * GROUPS + GROUP).reshape([ROWS, 32])
            k_tile = k_tiles_1.index(k_stage).reshape([BLOCK_N, 32])
            scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), scores, is_async=True)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            v_tile = v_tiles_0.index(v_stage).reshape([BLOCK_N, 64])
            accumulator_0 = warpgroup_mma(weights, v_tile, accumulator_0, is_async=True)
            v_tile = v_tiles_1.index(v_stage).reshape([BLOCK_N, 16])
            accumulator_1 = warpgroup_mma(weights, v_tile, accumulator_1, is_async=True)
            scores = warpgroup_mma_wait(2, deps=[scores])
            mbarrier.arrive(k_empty.index(k_stage))
            k_stage, k_phase = next_slot(k_stage, k_phase, STAGES)
            if earlier >= open_blocks:
                # Columns of a thread differ by constants: one subtraction serves them all.
                limits = visible_end[:, None] - earlier * BLOCK_N - (key_offsets & 6)[None, :]
                scores = gl.where((key_offsets & -7)[None, :] < limits, scores, float("-inf"))
            if earlier < open_from:
                starts = visible_start[:, None] - earlier * BLOCK_N - (key_offsets & 6)[None, :]
                scores = gl.where((key_offsets & -7)[None, :] >= starts, scores, float("-inf"))
            block_max = gl.max(scores, 1) * scale_log2
            new_max = gl.maximum(row_max, block_max)
            rescale = gl.exp2(row_max - gl.where(new_max == float("-inf"), 0.0, new_max))
            row_max = new_max
            # A row that has seen no key yet: its maximum is -inf, and -inf - -inf would be NaN.
            shift = gl.where(row_max == float("-inf"), 0.0, row_max)
            exponentials = gl.exp2(scores * scale_log2 - shift[:, None])
            # Each thread sums its own columns; rows are summed over threads once, at the end.
            block_sum = gl.sum(gl.sum(exponentials.reshape([ROWS, BLOCK_N // 8, 4, 2]), 3), 1)
            # What falls was summed all the same. Columns of a thread differ by constants: an addition makes a word.
            block_step = (earlier * BLOCK_N).to(gl.uint32) * 0x9E3779B9
            exponentials = drop(exponentials, row_word + block_step, key_steps, row_second[:, None], fallen_words)
            sum_rescale = gl.convert_layout(rescale, gl.SliceLayout(1, running_sum.type.layout))
            running_sum = running_sum * sum_rescale[:, None] + block_sum
            accumulator_0, accumulator_1 = warpgroup_mma_wait(0, deps=[accumulator_0, accumulator_1])
            mbarrier.arrive(v_empty.index(v_stage))
            v_stage, v_phase = next_slot(v_stage, v_phase, STAGES)
            accumulator_0 = accumulator_0 * gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT_0))[:, None]
            accumulator_1 = accumulator_1 * gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT_1))[:, None]
            weights = gl.convert_layout(exponentials.to(gl.float16), WEIGHTS)

        mbarrier.arrive(q_empty.index(q_stage * GROUPS + GROUP))
        q_stage, q_phase = next_slot(q_stage, q_phase, Q_STAGES)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        v_tile = v_tiles_0.index(v_stage).reshape([BLOCK_N, 64])
        accumulator_0 = warpgroup_mma(weights, v_tile, accumulator_0, is_async=True)
        v_tile = v_tiles_1.index(v_stage).reshape([BLOCK_N, 16])
        accumulator_1 = warpgroup_mma(weights, v_tile, accumulator_1, is_async=True)
        # What comes next is worked out beside the last product: divisions take long.
        more = index + workers < total
        upcoming = gl.where(more, index + workers, index)
        tile, batch, kv_head, head = locate(upcoming, workers, total, tiles, section, all_packs, packs, packs_per_kv)
        accumulator_0, accumulator_1 = warpgroup_mma_wait(0, deps=[accumulator_0, accumulator_1])
        mbarrier.arrive(v_empty.index(v_stage))
        v_stage, v_phase = next_slot(v_stage, v_phase, STAGES)
        first = tile * TILE + GROUP * POSITIONS
        block = count_blocks(first, POSITIONS, seqlen_q, seqlen_kv) - 1
        # Blocks that only later groups see pass by, after those that only earlier groups saw of the tile before.
        hidden = count_blocks(tile * TILE, TILE, seqlen_q, seqlen_kv) - 1 - block
        for _ in range(unseen + gl.where(more, hidden, 0)):
            mbarrier.wait(k_full.index(k_stage), k_phase)
            mbarrier.arrive(k_empty.index(k_stage))
            k_stage, k_phase = next_slot(k_stage, k_phase, STAGES)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            mbarrier.arrive(v_empty.index(v_stage))
            v_stage, v_phase = next_slot(v_stage, v_phase, STAGES)
        mbarrier.wait(q_full.index(q_stage * GROUPS + GROUP), q_phase, pred=more)
        mbarrier.wait(k_full.index(k_stage), k_phase, pred=more)
        q_tile = q_tiles_0.index(q_stage * GROUPS + GROUP).reshape([ROWS, 64])
        k_tile = k_tiles_0.index(k_stage).reshape([BLOCK_N, 64])
        scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        q_tile = q_tiles_1.index(q_stage * GROUPS + GROUP).reshape([ROWS, 32])
        k_tile = k_tiles_1.index(k_stage).reshape([BLOCK_N, 32])
        scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), scores, is_async=True)

        # Rows that saw no key have a sum of zero: their output is zero and their log-sum-exp -inf.
        row_sum = gl.convert_layout(gl.sum(running_sum, 1), SCORE_ROWS)
        factor = 1.0 / (gl.where(row_sum == 0.0, 1.0, row_sum) * (1.0 - dropout))
        o_tile = (accumulator_0 * gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT_0))[:, None]).to(gl.float16)
        tma.store_wait(0)
        o_tiles_0.index(GROUP).reshape([ROWS, 64]).store(o_tile)
        fence_async_shared()
        copy_out(o_desc_0, [this_batch, this_kv_head, this_head, this_first, 0], o_tiles_0.index(GROUP))
        o_tile = (accumulator_1 * gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT_1))[:, None]).to(gl.float16)
        o_tiles_1.index(GROUP).reshape([ROWS, 16]).store(o_tile)
        fence_async_shared()
        copy_out(o_desc_1, [this_batch, this_kv_head, this_head, this_first, 64], o_tiles_1.index(GROUP))
        row_lse = (row_max + gl.log2(row_sum)) * LN_2
        row_heads = this_head + row_offsets // POSITIONS
        all_before = (this_batch * kv_heads + this_kv_head) * group_size
        row_exists = (positions < seqlen_q) & (row_heads < group_size)
        gl.store(lse + (all_before + row_heads).to(gl.int64) * seqlen_q + positions, row_lse, mask=row_exists)
    warpgroup_mma_wait(0, deps=[scores])
    tma.store_wait(0)


@gluon.jit
def forward_hopper(
    q_desc_0,
    q_desc_1,
    k_desc_0,
    k_desc_1,
    v_desc_0,
    v_desc_1,
    o_desc_0,
    o_desc_1,
    lse,
    seed,
    scale,
    dropout,
    heads,
    group_size,
    all_heads,
    seqlen_q,
    seqlen_kv,
    section,
):
    q_tiles_0 = gl.allocate_shared_memory(
        gl.float16, [Q_STAGES * GROUPS, 1, 1, PACK, POSITIONS, 64], gl.NVMMASharedLayout(128, 16, 5)
    )
    k_tiles_0 = gl.allocate_shared_memory(
        gl.float16, [STAGES, 1, 1, BLOCK_N, 64], gl.NVMMASharedLayout(128, 16, 4)
    )
    q_tiles_1 = gl.allocate_shared_memory(
        gl.float16, [Q_STAGES * GROUPS, 1, 1, PACK, POSITIONS, 32], gl.NVMMASharedLayout(64, 16, 5)
    )
    k_tiles_1 = gl.allocate_shared_memory(
        gl.float16, [STAGES, 1, 1, BLOCK_N, 32], gl.NVMMASharedLayout(64, 16, 4)
    )
    v_tiles_0 = gl.allocate_shared_memory(
        gl.float16, [STAGES, 1, 1, BLOCK_N, 64], gl.NVMMASharedLayout(128, 16, 4)
    )
    o_tiles_0 = gl.allocate_shared_memory(
        gl.float16, [GROUPS, 1, 1, PACK, POSITIONS, 64], gl.NVMMASharedLayout(128, 16, 5)
    )
    v_tiles_1 = gl.allocate_shared_memory(
        gl.float16, [STAGES, 1, 1, BLOCK_N, 16], gl.NVMMASharedLayout(32, 16, 4)
    )
    o_tiles_1 = gl.allocate_shared_memory(
        gl.float16, [GROUPS, 1, 1, PACK, POSITIONS, 16], gl.NVMMASharedLayout(32, 16, 5)
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
                    q_tiles_0, q_tiles_1, k_tiles_0, k_tiles_1, v_tiles_0, v_tiles_1, o_tiles_0, o_tiles_1,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, o_desc_0, o_desc_1, lse, seed,
                    dropout, scale_log2, total, tiles, section, all_packs, packs, packs_per_kv, kv_heads,
                    group_size, seqlen_q, seqlen_kv,
                ),
            ),
            (
                consume,
                (
                    1,
                    q_tiles_0, q_tiles_1, k_tiles_0, k_tiles_1, v_tiles_0, v_tiles_1, o_tiles_0, o_tiles_1,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, o_desc_0, o_desc_1, lse, seed,
                    dropout, scale_log2, total, tiles, section, all_packs, packs, packs_per_kv, kv_heads,
                    group_size, seqlen_q, seqlen_kv,
                ),
            ),
            (
                produce,
                (
                    q_desc_0, q_desc_1, k_desc_0, k_desc_1, v_desc_0, v_desc_1, q_tiles_0, q_tiles_1,
                    k_tiles_0, k_tiles_1, v_tiles_0, v_tiles_1, q_full, q_empty, k_full, k_empty, v_full,
                    v_empty, total, tiles, section, all_packs, packs, packs_per_kv, seqlen_q, seqlen_kv,
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
                q, *by_groups(q), [1, 1, 1, 64, 64], gl.NVMMASharedLayout(128, 16, 5)
            ),
            TensorDescriptor(
                q, *by_groups(q), [1, 1, 1, 64, 32], gl.NVMMASharedLayout(64, 16, 5)
            ),
        ),
        (
            TensorDescriptor(
                k, [*k.shape], [*k.stride()[:3], 1], [1, 1, 128, 64], gl.NVMMASharedLayout(128, 16, 4)
            ),
            TensorDescriptor(
                k, [*k.shape], [*k.stride()[:3], 1], [1, 1, 128, 32], gl.NVMMASharedLayout(64, 16, 4)
            ),
        ),
        (
            TensorDescriptor(
                v, [*v.shape], [*v.stride()[:3], 1], [1, 1, 128, 64], gl.NVMMASharedLayout(128, 16, 4)
            ),
            TensorDescriptor(
                v, [*v.shape], [*v.stride()[:3], 1], [1, 1, 128, 16], gl.NVMMASharedLayout(32, 16, 4)
            ),
        ),
        (
            TensorDescriptor(
                out, *by_groups(out), [1, 1, 1, 64, 64], gl.NVMMASharedLayout(128, 16, 5)
            ),
            TensorDescriptor(
                out, *by_groups(out), [1, 1, 1, 64, 16], gl.NVMMASharedLayout(32, 16, 5)
            ),
        ),
    )


def launch_plan(q, k, v, out, seed):
    """Grid, shapes of float32 workspaces, and the kernel's arguments from `heads` on."""
    batch, heads, seqlen_q, _ = q.shape
    kv_heads, seqlen_kv = k.shape[1], k.shape[2]
    packs = batch * kv_heads * triton.cdiv(heads // kv_heads, 1)
    tiles = triton.cdiv(seqlen_q, 128) * packs
    multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
    grid = (min(tiles, multiprocessors),)
    section = packs
    workspaces = ()
    return grid, workspaces, (heads, heads // kv_heads, heads * batch, seqlen_q, seqlen_kv, section)


def attention(q, k, v, scale=None, *, seed, dropout):
    """Attention of q, k, v, each [batch, heads, seqlen, head_dim] with a contiguous last dimension.

    Weights fall by `seed`, int64 [1] on the same device; `dropout` is the share that does, under 1.

    Returns the output [batch, heads, seqlen_q, value_head_dim] and the log-sum-exp of each row,
    [batch, heads, seqlen_q] in float32.
    """
    # The kernel itself checks nothing: other sizes, types or strides would read and write other memory.
    dtype = torch.float16
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
        ("q", q, dtype, (*rows, 96)),
        ("k", k, dtype, (*keys, 96)),
        ("v", v, dtype, (*keys, 80)),
        ("seed", seed, torch.int64, (1,)),
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
    lse = torch.empty(batch, heads, seqlen_q, dtype=torch.float32, device=q.device)
    if out.numel() == 0 or k.shape[2] == 0:
        return out.zero_(), lse if lse is None else lse.fill_(float("-inf"))
    grid, _, integers = launch_plan(q, k, v, out, seed)
    tensors = (q, k, v, out)
    forward_hopper[grid](
        *(descriptor for parts in descriptors(*tensors) for descriptor in parts),
        out if lse is None else lse,
        seed,
        max(scale, 1e-30),
        dropout,
        *integers,
        num_warps=4,
        num_stages=2,
    )
    return out, lse
