# A stand-alone kernel by flashtune; it needs torch and triton alone.
# `attention` runs it. Selected on nvidia-h100 and nvidia-h200.

"""Attention of few queries over latent keys (MLA) on Hopper, in Gluon: one warp copies, two groups of four compute.

Computes     bf16, head dim 576, value head dim 512, causal: bottom_right
Keys         in pages of 64, as many as seqlens_kv says; values are their first columns
Config       1 queries and 64 heads a tile, 2 stages, 1 parts, overlap_pv True
Assumes      addresses and strides that are multiples of 16 bytes
Template     decode_latent_hopper acf2380cd1ab

All heads share one KV head, so that heads (and queries) are the rows of a tile. A block of keys is
copied once, as the left and the right half of the values and the rest, and is in both products.

Algorithm of one program
  producer: copy q_tile; for each block of keys, from the last to the first: copy left, rest and right
  first group, for each block:
      scores = q_tile @ k_tile.T * scale_log2, and -inf where hidden
      new_max = maximum of row_max and the rows of scores, if that exceeds row_max by SLACK; else row_max
      weights, rescale = exp2(scores - new_max), exp2(row_max - new_max)
      running_sum = running_sum * rescale + sums of the rows of weights
      store weights and rescale for the second group
      accumulator = accumulator * rescale + weights @ left
  second group, for each block: accumulator = accumulator * rescale + weights @ right
  out = accumulators / running_sum;  lse = row_max + log2(running_sum)

Notation
  left, right, rest                 columns of a key: halves of the values, and those that only scores need
  *_desc                            TMA descriptor of a tensor: shape, strides, tile
  tiles, full, empty                a ring of tiles in shared memory, and its barriers
  *_log2                            a quantity in units of log2, so that exp2 replaces exp
Tunables
  POSITIONS, HEADS                  queries of a tile, and heads: the rows of a tile are their product
  STAGES                            blocks of keys in flight
  overlap_pv                        second group's product of a block during the first one's next softmax
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

ROWS = gl.constexpr(64)
POSITIONS = gl.constexpr(1)
HEADS = gl.constexpr(64)
BLOCK_N = gl.constexpr(64)
STAGES = gl.constexpr(2)
# Blocks of weights on their way from one group to the other.
SLOTS = gl.constexpr(2)
# Columns of half the values, and of a key behind the values.
HALF = gl.constexpr(256)
REST = gl.constexpr(64)
PAGE = gl.constexpr(64)
# Of a dimension that no coordinate leaves, and of keys counted backwards: see `descriptors`.
FAR = gl.constexpr(2**30)
LOG2_E = gl.constexpr(1.4426950408889634)
# A maximum may be outgrown by this much, in log2, before the accumulators are rescaled to a new one.
SLACK = gl.constexpr(8.0)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, SCORES))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
OUTPUT_ROWS = gl.constexpr(gl.SliceLayout(1, OUTPUT))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, OUTPUT, 2))
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())
NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@aggregate
class Ring:
    """Tiles in shared memory, and their barriers: a tile has arrived, a tile may be overwritten."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty):
        self.tiles = tiles
        self.full = full
        self.empty = empty


@aggregate
class Queries:
    """Halves of the queries and their rest, and the barrier of their arrival."""

    tiles: gl.shared_memory_descriptor
    rest_tile: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, rest_tile, full):
        self.tiles = tiles
        self.rest_tile = rest_tile
        self.full = full


@aggregate
class Exchange:
    """Data from the first group to the second: a ring of probabilities and factors of earlier output."""

    tiles: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    final_factors: gl.shared_memory_descriptor
    finished: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, factors, full, empty, final_factors, finished):
        self.tiles = tiles
        self.factors = factors
        self.full = full
        self.empty = empty
        self.final_factors = final_factors
        self.finished = finished


@aggregate
class Tiling:
    """The numbers of tiles, heads, queries and keys, the lengths, the pages."""

    tiles: gl.tensor
    heads: gl.tensor
    seqlen_q: gl.tensor
    seqlen_kv: gl.tensor
    seqlens_kv: gl.tensor
    block_table: gl.tensor
    stride_table: gl.tensor

    @gluon.constexpr_function
    def __init__(self, tiles, heads, seqlen_q, seqlen_kv, seqlens_kv, block_table, stride_table):
        self.tiles = tiles
        self.heads = heads
        self.seqlen_q = seqlen_q
        self.seqlen_kv = seqlen_kv
        self.seqlens_kv = seqlens_kv
        self.block_table = block_table
        self.stride_table = stride_table


@gluon.jit
def make_barriers(SLOTS: gl.constexpr):
    """Returns two barriers for each slot of a ring."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    return full, empty


@gluon.jit
def next_slot(stage, phase, STAGES: gl.constexpr):
    """The slot of a ring after this one; each time around, the parity of its barriers flips."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def locate(tiling):
    """What this program does: a sequence, its first head and query, and blocks of keys [begin, end).

    There is a block even where there is nothing to see: the sequence then counts as empty, and of its
    keys nothing is read. Tiles are innermost, so that programs that read the same keys run together.
    """
    seqlen_kv = tiling.seqlen_kv
    tile = gl.program_id(0) % tiling.tiles
    sequence = gl.program_id(0) // tiling.tiles
    head_tiles = (tiling.heads + HEADS - 1) // HEADS
    head = tile % head_tiles * HEADS
    position = tile // head_tiles * POSITIONS
    # A length beyond the tensors counts as their end. A negative count of blocks would never end.
    seqlen_kv = gl.maximum(gl.minimum(gl.load(tiling.seqlens_kv + sequence), seqlen_kv), 0)
    diagonal = seqlen_kv - tiling.seqlen_q
    last_key = gl.minimum(gl.minimum(position + POSITIONS, tiling.seqlen_q) + diagonal, seqlen_kv)
    blocks = (gl.maximum(last_key, 0) + BLOCK_N - 1) // BLOCK_N
    begin = 0
    end = blocks
    is_empty = begin == end
    seqlen_kv = gl.where(is_empty, 0, seqlen_kv)
    begin = gl.where(is_empty, 0, begin)
    end = gl.where(is_empty, 1, end)
    return sequence, head, position, seqlen_kv, diagonal, begin, end


@gluon.jit
def declare_growth(GROUP: gl.constexpr):
    """A register for each thread, which holds whether some row of its warp needs a new maximum."""
    gl.inline_asm_elementwise(f".reg .b32 growth_{GROUP}; mov.b32 $0, 0;", "=r,r", [0], gl.int32, False, 1)


@gluon.constexpr_function
def voting(group):
    """PTX that notes whether one of a thread's two flags is set in any lane of its warp."""
    return (
        "{ .reg .pred any, one; setp.ne.s32 any, $2, 0; setp.ne.s32 one, $3, 0; or.pred any, any, one; "
        "mov.b32 $0, 0; mov.b32 $1, 0; vote.sync.any.pred any, any, 0xffffffff; "
        f"selp.b32 growth_{group}, 1, 0, any; }}"
    )


@gluon.jit
def note_growth(growth, GROUP: gl.constexpr):
    """Combines the votes of all lanes of the warp. Rows of other warps do not matter."""
    asm: gl.constexpr = voting(GROUP)
    gl.inline_asm_elementwise(asm, "=r,=r,r,r", [growth], gl.int32, False, 2)


@gluon.jit
def has_grown(GROUP: gl.constexpr):
    return gl.inline_asm_elementwise(f"mov.b32 $0, growth_{GROUP};", "=r,r", [0], gl.int32, False, 1) != 0


@gluon.jit
def produce(
    q_desc, q_rest_desc, k_desc, k_rest_desc, queries, left, right, rest, tiling,
):
    """Copies queries in, and blocks of keys from the last to the first."""
    sequence, head, position, seqlen_kv, _, begin, end = locate(tiling)
    mbarrier.expect(queries.full.index(0), 73728)
    for half in gl.static_range(2):
        copy_in(q_desc, [sequence, head, position, half * HALF], queries.full.index(0), queries.tiles.index(half))
    copy_in(q_rest_desc, [sequence, head, position, 512], queries.full.index(0), queries.rest_tile.index(0))
    stage, phase = 0, 1
    pages = tiling.block_table + sequence.to(gl.int64) * tiling.stride_table
    # Page numbers are loaded one block ahead, and none of an empty sequence.
    page = gl.load(pages + (end - 1) * BLOCK_N // PAGE, mask=seqlen_kv > 0, other=0)
    for step in range(end - begin):
        block = end - 1 - step
        index = page
        first_row = 0
        rows = gl.minimum(seqlen_kv - block * BLOCK_N + first_row, PAGE)
        page = gl.load(pages + gl.maximum(block - 1, 0) * BLOCK_N // PAGE, mask=seqlen_kv > 0, other=0)
        mbarrier.wait(left.empty.index(stage), phase)
        mbarrier.expect(left.full.index(stage), 32768)
        copy_in(k_desc, [FAR, rows, index, FAR - rows + first_row, 0], left.full.index(stage), left.tiles.index(stage))
        mbarrier.wait(rest.empty.index(0), (step & 1) ^ 1)
        mbarrier.expect(rest.full.index(0), 8192)
        copy_in(k_rest_desc, [FAR, rows, index, FAR - rows + first_row, 512], rest.full.index(0), rest.tiles.index(0))
        mbarrier.wait(right.empty.index(stage), phase)
        mbarrier.expect(right.full.index(stage), 32768)
        copy_in(k_desc, [FAR, rows, index, FAR - rows + first_row, HALF], right.full.index(stage), right.tiles.index(stage))
        stage, phase = next_slot(stage, phase, STAGES)


@gluon.jit
def weigh(
    queries, left, right, rest, exchange, out, lse, scale_log2, tiling,
):
    """The first group: scores and weights of all blocks, and the left half of the output."""
    sequence, head, position, seqlen_kv, diagonal, begin, end = locate(tiling)
    key_offsets = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    row_positions = position + gl.arange(0, ROWS, SCORE_ROWS) % POSITIONS
    # Query i sees the keys before visible_end[i]; blocks before open_blocks are seen whole by all rows.
    visible_end = gl.minimum(row_positions + (diagonal + 1), seqlen_kv)
    open_blocks = gl.maximum(gl.minimum(position + diagonal + 1, seqlen_kv), 0) // BLOCK_N
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    accumulator = gl.zeros([ROWS, HALF], gl.float32, OUTPUT)
    declare_growth(0)
    k_stage, k_phase, v_stage = 0, 0, 0

    # The first block stands alone.
    mbarrier.wait(queries.full.index(0), 0)
    mbarrier.wait(left.full.index(k_stage), k_phase)
    q_tile = queries.tiles.index(0).reshape([ROWS, HALF])
    k_tile = left.tiles.index(k_stage).reshape([BLOCK_N, HALF])
    scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    mbarrier.wait(rest.full.index(0), 0)
    q_tile = queries.rest_tile.index(0).reshape([ROWS, REST])
    k_tile = rest.tiles.index(0).reshape([BLOCK_N, REST])
    scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), scores, is_async=True)
    mbarrier.wait(right.full.index(k_stage), k_phase)
    q_tile = queries.tiles.index(1).reshape([ROWS, HALF])
    k_tile = right.tiles.index(k_stage).reshape([BLOCK_N, HALF])
    scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), scores, is_async=True)
    k_stage, k_phase = next_slot(k_stage, k_phase, STAGES)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(rest.empty.index(0))
    if end > open_blocks:
        # Columns of a thread differ by constants: one subtraction serves them all.
        limits = visible_end[:, None] - (end - 1) * BLOCK_N - (key_offsets & 6)[None, :]
        scores = gl.where((key_offsets & -7)[None, :] < limits, scores, float("-inf"))
    row_max = gl.max(scores, 1) * scale_log2
    # A row that has seen no key yet: its maximum is -inf, and -inf - -inf would be NaN.
    shift = gl.where(row_max == float("-inf"), 0.0, row_max)
    exponentials = gl.exp2(scores * scale_log2 - shift[:, None])
    weights = gl.convert_layout(exponentials.to(gl.bfloat16), WEIGHTS)
    # Each thread sums its own columns; rows are summed over threads once, at the end.
    block_sum = gl.sum(gl.sum(exponentials.reshape([ROWS, BLOCK_N // 8, 4, 2]), 3), 1)
    running_sum = block_sum
    rescale = gl.full([ROWS], 1.0, gl.float32, SCORE_ROWS)

    for step in range(1, end - begin):
        # Values first, so that room for the next keys is given back early; scores are queued behind.
        v_tile = left.tiles.index(v_stage).reshape([BLOCK_N, HALF])
        accumulator = warpgroup_mma(weights, v_tile, accumulator, is_async=True)
        slot = (step - 1) & 1
        mbarrier.wait(exchange.empty.index(slot), ((step - 1) >> 1 & 1) ^ 1)
        exchange.tiles.index(slot).store(gl.convert_layout(weights, SCORES))
        exchange.factors.index(slot).store(rescale)
        fence_async_shared()
        # Zero, as the compiler does not know: or it keeps descriptors of all queries in registers, and spills.
        anew = step >> 24
        mbarrier.wait(left.full.index(k_stage), k_phase)
        q_tile = queries.tiles.index(anew).reshape([ROWS, HALF])
        k_tile = left.tiles.index(k_stage).reshape([BLOCK_N, HALF])
        scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        mbarrier.wait(rest.full.index(0), step & 1)
        q_tile = queries.rest_tile.index(anew).reshape([ROWS, REST])
        k_tile = rest.tiles.index(0).reshape([BLOCK_N, REST])
        scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), scores, is_async=True)
        accumulator, weights = warpgroup_mma_wait(2, deps=[accumulator, weights])
        mbarrier.arrive(left.empty.index(v_stage))
        v_stage, _ = next_slot(v_stage, 0, STAGES)
        mbarrier.wait(right.full.index(k_stage), k_phase)
        q_tile = queries.tiles.index(anew + 1).reshape([ROWS, HALF])
        k_tile = right.tiles.index(k_stage).reshape([BLOCK_N, HALF])
        scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), scores, is_async=True)
        k_stage, k_phase = next_slot(k_stage, k_phase, STAGES)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(rest.empty.index(0))
        # The other group multiplies while this one weighs.
        mbarrier.arrive(exchange.full.index(slot))
        block = end - 1 - step
        if block >= open_blocks:
            # Columns of a thread differ by constants: one subtraction serves them all.
            limits = visible_end[:, None] - block * BLOCK_N - (key_offsets & 6)[None, :]
            scores = gl.where((key_offsets & -7)[None, :] < limits, scores, float("-inf"))
        block_max = gl.max(scores, 1) * scale_log2
        grows = block_max > row_max + SLACK
        note_growth(grows.to(gl.int32), 0)
        new_max = gl.where(grows, block_max, row_max)
        rescale = gl.exp2(row_max - gl.where(new_max == float("-inf"), 0.0, new_max))
        row_max = new_max
        # A row that has seen no key yet: its maximum is -inf, and -inf - -inf would be NaN.
        shift = gl.where(row_max == float("-inf"), 0.0, row_max)
        exponentials = gl.exp2(scores * scale_log2 - shift[:, None])
        weights = gl.convert_layout(exponentials.to(gl.bfloat16), WEIGHTS)
        # Each thread sums its own columns; rows are summed over threads once, at the end.
        block_sum = gl.sum(gl.sum(exponentials.reshape([ROWS, BLOCK_N // 8, 4, 2]), 3), 1)
        sum_rescale = gl.convert_layout(rescale, gl.SliceLayout(1, running_sum.type.layout))
        running_sum = running_sum * sum_rescale[:, None] + block_sum
        if has_grown(0):
            accumulator = accumulator * gl.convert_layout(rescale, OUTPUT_ROWS)[:, None]

    v_tile = left.tiles.index(v_stage).reshape([BLOCK_N, HALF])
    accumulator = warpgroup_mma(weights, v_tile, accumulator, is_async=True)
    slot = (end - begin - 1) & 1
    mbarrier.wait(exchange.empty.index(slot), ((end - begin - 1) >> 1 & 1) ^ 1)
    exchange.tiles.index(slot).store(gl.convert_layout(weights, SCORES))
    exchange.factors.index(slot).store(rescale)
    fence_async_shared()
    mbarrier.arrive(exchange.full.index(slot))
    # Rows that saw no key have a sum of zero: their output is zero and their log-sum-exp -inf.
    row_sum = gl.convert_layout(gl.sum(running_sum, 1), SCORE_ROWS)
    final_factor = 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum)
    exchange.final_factors.index(0).store(final_factor)
    mbarrier.arrive(exchange.finished.index(0))
    accumulator = warpgroup_mma_wait(0, deps=[accumulator])
    factor = gl.convert_layout(final_factor, OUTPUT_ROWS)
    o_tile = accumulator * factor[:, None]
    room = queries.tiles.index(0)
    room.reshape([ROWS, HALF]).store(o_tile.to(gl.bfloat16))
    fence_async_shared()
    copy_out(out, [sequence, head, position, 0 * HALF], room)
    tma.store_wait(0)


@gluon.jit
def consume(
    queries, right, exchange, out, tiling,
):
    """The second group: the right half of the output, by the first one's weights."""
    sequence, head, position, _, _, begin, end = locate(tiling)
    accumulator = gl.zeros([ROWS, HALF], gl.float32, OUTPUT)
    declare_growth(1)
    stage, phase = 0, 0
    for step in range(end - begin):
        slot = step & 1
        mbarrier.wait(right.full.index(stage), phase)
        mbarrier.wait(exchange.full.index(slot), step >> 1 & 1)
        rescale = exchange.factors.index(slot).load(OUTPUT_ROWS)
        note_growth((rescale != 1.0).to(gl.int32), 1)
        if has_grown(1):
            accumulator = accumulator * rescale[:, None]
        v_tile = right.tiles.index(stage).reshape([BLOCK_N, HALF])
        accumulator = warpgroup_mma(exchange.tiles.index(slot), v_tile, accumulator, is_async=True)
        accumulator = warpgroup_mma_wait(0, deps=[accumulator])
        mbarrier.arrive(right.empty.index(stage))
        mbarrier.arrive(exchange.empty.index(slot))
        stage, phase = next_slot(stage, phase, STAGES)
    mbarrier.wait(exchange.finished.index(0), 0)
    factor = exchange.final_factors.index(0).load(OUTPUT_ROWS)
    o_tile = accumulator * factor[:, None]
    room = queries.tiles.index(1)
    room.reshape([ROWS, HALF]).store(o_tile.to(gl.bfloat16))
    fence_async_shared()
    copy_out(out, [sequence, head, position, 1 * HALF], room)
    tma.store_wait(0)


@gluon.jit
def decode_latent_hopper(
    q_desc,
    q_rest_desc,
    k_desc,
    k_rest_desc,
    o_desc,
    lse,
    seqlens_kv,
    block_table,
    scale,
    heads,
    all_heads,
    seqlen_q,
    seqlen_kv,
    stride_table,
):
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 1, HEADS, POSITIONS, HALF], gl.NVMMASharedLayout(128, 16, 4))
    q_rest_tile = gl.allocate_shared_memory(gl.bfloat16, [1, 1, HEADS, POSITIONS, REST], gl.NVMMASharedLayout(128, 16, 4))
    left_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, 1, BLOCK_N, HALF], gl.NVMMASharedLayout(128, 16, 5))
    right_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, 1, BLOCK_N, HALF], gl.NVMMASharedLayout(128, 16, 5))
    # Only scores need the rest: it is free again before the next block is needed.
    rest_tiles = gl.allocate_shared_memory(gl.bfloat16, [1, 1, 1, 1, BLOCK_N, REST], gl.NVMMASharedLayout(128, 16, 5))
    p_tiles = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, ROWS, BLOCK_N], gl.NVMMASharedLayout(128, 16, 2))
    factors = gl.allocate_shared_memory(gl.float32, [SLOTS, ROWS], NUMBERS)
    final_factors = gl.allocate_shared_memory(gl.float32, [1, ROWS], NUMBERS)
    left_full, left_empty = make_barriers(STAGES)
    right_full, right_empty = make_barriers(STAGES)
    rest_full, rest_empty = make_barriers(1)
    p_full, p_empty = make_barriers(SLOTS)
    q_full, finished = make_barriers(1)
    fence_async_shared()

    queries = Queries(q_tiles, q_rest_tile, q_full)
    left = Ring(left_tiles, left_full, left_empty)
    right = Ring(right_tiles, right_full, right_empty)
    rest = Ring(rest_tiles, rest_full, rest_empty)
    exchange = Exchange(p_tiles, factors, p_full, p_empty, final_factors, finished)
    tiles = (heads + HEADS - 1) // HEADS * ((seqlen_q + POSITIONS - 1) // POSITIONS)
    tiling = Tiling(tiles, heads, seqlen_q, seqlen_kv, seqlens_kv, block_table, stride_table)
    scale_log2 = scale * LOG2_E
    gl.warp_specialize(
        [
            (weigh, (queries, left, right, rest, exchange, o_desc, lse, scale_log2, tiling)),
            (consume, (queries, right, exchange, o_desc, tiling)),
            (produce, (q_desc, q_rest_desc, k_desc, k_rest_desc, queries, left, right, rest, tiling)),
        ],
        [4, 1],
        [240, 24],
    )


def descriptors(q, k, v, out):
    """What the copy engine is told of each tensor; past its ends it reads zeros and writes nothing.

    Row r of a page (or of a sequence's keys) of which n rows are in use has the coordinates (FAR, n, page,
    FAR - n + r), so that from r = n on it lies outside. FAR steps of the first stride and of that of rows are
    a multiple of 2^64 together: addresses wrap around, and what is left is r steps of a row.
    """
    pages, _, _, width = k.shape
    of_row, beyond = k.stride(2), 2**31 - 2**16
    shape = [beyond, beyond, pages, 2**30, width]
    strides = [2**34 - of_row, of_row, k.stride(0), of_row, 1]

    return (
        (
            TensorDescriptor(
                q, [*q.shape], [*q.stride()[:3], 1], [1, 64, 1, 256], gl.NVMMASharedLayout(128, 16, 4)
            ),
            TensorDescriptor(
                q, [*q.shape], [*q.stride()[:3], 1], [1, 64, 1, 64], gl.NVMMASharedLayout(128, 16, 4)
            ),
        ),
        (
            TensorDescriptor(k, shape, strides, [1, 1, 1, 64, 256], gl.NVMMASharedLayout(128, 16, 5)),
            TensorDescriptor(k, shape, strides, [1, 1, 1, 64, 64], gl.NVMMASharedLayout(128, 16, 5)),
        ),
        (),
        (
            TensorDescriptor(
                out, [*out.shape], [*out.stride()[:3], 1], [1, 64, 1, 256], gl.NVMMASharedLayout(128, 16, 4)
            ),
        ),
    )


def launch_plan(q, k, v, out, seqlens_kv, block_table):
    """Grid, shapes of float32 workspaces, and the kernel's arguments from `heads` on."""
    batch, heads, seqlen_q, _ = q.shape
    tiles = triton.cdiv(heads, 64) * triton.cdiv(seqlen_q, 1)
    counts = (heads, heads * batch, seqlen_q, block_table.shape[1] * 64, block_table.stride(0))
    return (tiles * batch,), (), counts


def attention(q, k, v, scale=None, *, seqlens_kv, block_table):
    """Returns the output [batch, heads, seqlen_q, value_head_dim] and the log-sum-exp of each row.

    q, k, v           [batch, heads, seqlen, head_dim] with a contiguous last dimension
    seqlens_kv        number of keys of each sequence
    block_table       pages of each sequence; k and v are [pages, kv_heads, page size, head_dim]
    The checks state the dtype and the shape of each input. The log-sum-exp is None: this kernel does not write it.
    """
    # The kernel itself checks nothing: other sizes, types or strides would read and write other memory.
    large = [("q", q), ("k", k), ("v", v)]
    for name, tensor in [
        *large,
        ("block_table", block_table),
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
    if kv_heads != 1:
        raise ValueError(f"k has {kv_heads} heads, expected 1")
    rows = (batch, heads, seqlen_q)
    keys = (k.shape[0], kv_heads, 64)
    for name, tensor, expected, shape in (
        ("q", q, dtype, (*rows, 576)),
        ("k", k, dtype, (*keys, 576)),
        ("v", v, dtype, (*keys, 512)),
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
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}, expected 1 for the last dimension")
    if (v.data_ptr(), v.stride()) != (k.data_ptr(), k.stride()):
        raise ValueError("v is a tensor of its own, expected the first 512 columns of k")
    for name, tensor in large:
        if any(stride % 8 for stride in tensor.stride()[:3]):
            raise ValueError(f"{name} has strides {tensor.stride()}, expected multiples of 8 before the last")
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name} has the address {tensor.data_ptr()}, expected a multiple of 16")
    if block_table.numel() and k.shape[0] == 0:
        raise ValueError("k has no pages, and block_table lists some")
    if not q.is_cuda:
        raise ValueError(f"q is on {q.device}, expected a GPU")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if scale < 0:
        q, scale = -q, -scale
    out = torch.empty(*q.shape[:3], 512, dtype=q.dtype, device=q.device)
    lse = None
    if out.numel() == 0 or k.numel() == 0:
        return out.zero_(), lse if lse is None else lse.fill_(float("-inf"))
    tensors = (q, k, v, out, seqlens_kv, block_table)
    row_lse = out if lse is None else lse
    grid, shapes, integers = launch_plan(*tensors)
    workspaces = [torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes]
    for parameter in decode_latent_hopper.params[-len(integers) :]:
        # By default Triton makes an integer of 1 a constant, but fields of aggregates are tensors. A decorator would
        # change the digest of the kernel.
        parameter.do_not_specialize = True
    decode_latent_hopper[grid](
        *(descriptor for parts in descriptors(*tensors[:4]) for descriptor in parts),
        row_lse,
        *tensors[4:],
        *workspaces,
        max(scale, 1e-30),
        *integers,
        num_warps=4,
        num_stages=2,
    )
    return out, lse
