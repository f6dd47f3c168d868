"""The minimum SRAM of a tile of queries and a stream of K and V, item by item."""

import msgspec

from flashtune.templates.common.model.sram import (
    ASYNC_BYTES,
    SHARING_RELEASE,
    Engine,
    Tiles,
    columns_of,
    reordered,
    triton_release,
)
from flashtune.templates.family import BytesItem, BytesItems

# With four stages, AMD's pipeliner keeps one buffer of each and overlaps both products.
MFMA_SINGLE_BUFFER_STAGES = 4
MFMA_ROWS = 16
MFMA_WIDE_ROWS = 64


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """The loads of K and V."""

    tiles: Tiles  # The tiles, warps and units.
    stages: int  # Stages of the software pipeline.
    descriptors: bool  # Whether TMA loads them.
    ahead: bool  # Whether the next block's scores are issued before this block's softmax.
    aligned_bytes: int  # Known alignment of every address, in bytes.
    halves: bool  # Whether float32 operands are split into halves of tf32.

    def buffered(self, tiles: tuple[int, ...]) -> int:
        """Returns the bytes of one pipeline stage of these tiles, those with asynchronous copies."""
        if self.stages == 1 or not (self.descriptors or self.aligned_bytes >= ASYNC_BYTES):
            return 0
        return sum(tile for tile in tiles if self.descriptors or self.tiles.worth_a_copy(tile))

    @property
    def k(self) -> int:
        """One pipeline stage of K."""
        return self.buffered(self.tiles.k)

    @property
    def v(self) -> int:
        """One pipeline stage of V."""
        return self.buffered(self.tiles.v)


def stream_items(stream: Stream) -> BytesItems:
    """Returns the items that are live at one point of the main loop."""
    by_engine = {
        Engine.WARPGROUP: _warpgroup_items,
        Engine.TENSOR_MEMORY: _tensor_memory_items,
        Engine.WARP: _warp_items,
        Engine.VECTOR: _vector_items,
        Engine.MFMA: _mfma_items,
    }
    return tuple(item for item in by_engine[stream.tiles.engine](stream) if item.bytes)


def stream_columns(tiles: Tiles, stages: int, halves: bool) -> int:
    """Returns columns of tensor memory: of output and scores, and of operands that are stored there.

    `halves` means that float32 operands are split into halves of tf32.
    """
    scores, output = tiles.block_n, sum(chunk.width for chunk in tiles.v_chunks)
    # In 16 bits, probabilities are half as wide as scores.
    weights = scores // 2
    if triton_release() >= SHARING_RELEASE:
        # Probabilities replace scores, unless several products read them.
        reread = len(tiles.v_chunks) > 1 and stages > 1 and not halves
        return columns_of(tiles, output + scores + (weights if reread else 0))
    if halves:
        queries = sum(chunk.width for chunk in tiles.qk_chunks)
        return columns_of(tiles, output + 3 * scores + 3 * queries)
    # Scores that are summed over chunks are stored twice.
    return columns_of(tiles, output + scores * min(len(tiles.qk_chunks), 2) + weights)


def _resident_queries(stream: Stream) -> int:
    return sum(tile for tile in stream.tiles.q if stream.tiles.worth_a_copy(tile))


def _stages(stream: Stream, count: int) -> list[BytesItem]:
    return [
        BytesItem(f"k, {count} in flight", count * stream.k),
        BytesItem(f"v, {count} in flight", count * stream.v),
    ]


def _warpgroup_items(stream: Stream) -> list[BytesItem]:
    # Operands are read from shared memory during the instruction, so no stage is free early.
    items = [BytesItem("q", _resident_queries(stream)), *_stages(stream, stream.stages)]
    if stream.ahead and stream.tiles.whole:
        items.append(BytesItem("k of the block ahead", stream.k))
    return items


def _tensor_memory_items(stream: Stream) -> list[BytesItem]:
    # Split operands are in tensor memory or in shared memory, depending on the Triton version.
    queries = [] if stream.halves else [BytesItem("q", _resident_queries(stream))]
    if not (stream.k or stream.v or stream.halves):
        return [*queries, *_stored_operands(stream)]
    if stream.tiles.whole:
        return [*queries, *_stages(stream, stream.stages)]
    # Triton 3.9 frees one of the two early if a head dim is split.
    held = 0 if stream.halves else min(stream.k, stream.v)
    return [*queries, *_stages(stream, stream.stages - 1), BytesItem("k or v in use", held)]


def _stored_operands(stream: Stream) -> list[BytesItem]:
    """Returns K and V if threads load and store them. If pipelined, V of the next block is stored early."""
    k, v = stream.tiles.k, stream.tiles.v
    if stream.stages == 1:
        return [BytesItem("v in use", max(v))]
    return [
        BytesItem("k", max(k)),
        BytesItem("v", sum(v)),
        BytesItem("v of the next block", sum(v)),
    ]


def _warp_items(stream: Stream) -> list[BytesItem]:
    # A tile in use is in registers, so one stage fewer is in flight.
    tiles = stream.tiles
    flight = _stages(stream, stream.stages - 1)
    crossing = BytesItem("weights that cross warps", tiles.crossing_weights())
    queries = BytesItem("q", _resident_queries(stream))
    if stream.ahead:
        exchanged = [] if stream.halves else [crossing]
        if triton_release() < SHARING_RELEASE and not stream.halves:
            return [queries, *flight, *exchanged]
        # The queries pass through shared memory to registers.
        return _larger([queries] if tiles.whole else [], [*flight, *exchanged])
    pipelined = stream.k + stream.v > 0
    # Without pipelining, K may be transposed in registers, but V is not.
    loop = flight if pipelined else [BytesItem("v", max(tiles.v))]
    if not stream.halves:
        return [queries, *loop, crossing]
    halves = BytesItem("q in halves of tf32", queries.bytes)
    return [queries, halves, *([*loop, crossing] if pipelined else _larger(loop, [crossing]))]


def _vector_items(stream: Stream) -> list[BytesItem]:
    tiles = stream.tiles
    queries = BytesItem("q", _resident_queries(stream))
    weights = BytesItem("weights", tiles.weights)
    if stream.k + stream.v:
        loop = [*_stages(stream, stream.stages - 1), weights]
    else:
        loop = [BytesItem("v in passing", max((0, *tiles.shared_v))), weights]
    return [queries, *_larger([BytesItem("k in passing", max(tiles.k))], loop)]


def _mfma_items(stream: Stream) -> list[BytesItem]:
    # Everything is in registers. Shared memory is only used to reorder one tile at a time.
    tiles = stream.tiles
    single = stream.stages == MFMA_SINGLE_BUFFER_STAGES and tiles.whole
    flight = _stages(stream, 1 if single else stream.stages - 1)
    crossing = BytesItem("weights that cross lanes", _mfma_crossing(stream))
    passing = max(tiles.q[0] if tiles.whole else 0, 0 if stream.k + stream.v else max(tiles.v))
    return _larger([BytesItem("q or v in passing", passing)], [*flight, crossing])


def _mfma_crossing(stream: Stream) -> int:
    """Returns the probabilities' bytes if the second product needs another layout than that of scores."""
    tiles = stream.tiles
    narrow_warps = MFMA_WIDE_ROWS <= tiles.block_m <= MFMA_ROWS * tiles.warps
    one_row_of_warps = tiles.block_m == MFMA_ROWS and tiles.itemsize == 4
    return reordered(tiles.weights) if narrow_warps or one_row_of_warps else 0


def _larger(first: list[BytesItem], other: list[BytesItem]) -> list[BytesItem]:
    """Returns the larger of two sets of items that are not live together."""
    return max(first, other, key=lambda items: sum(item.bytes for item in items))
