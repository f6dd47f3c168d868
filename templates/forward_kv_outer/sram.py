"""The minimum SRAM of a tile of K and V and a loop over queries, item by item."""

from __future__ import annotations

from flashtune.templates.common.model.sram import (
    SHARING_RELEASE,
    Engine,
    Tiles,
    columns_of,
    reordered,
    triton_release,
)
from flashtune.templates.family import BytesItem

FLOAT32_BYTES = 4
# Rows of one warp's matrix instruction.
WARP_ROWS = 16
MFMA_ROWS = 32
MANY_WARPS = 8


def cycle_items(tiles: Tiles) -> tuple[BytesItem, ...]:
    """Returns the items that are live at one point of the inner loop.

    Both loops contain a barrier, so nothing is pipelined and alignment changes nothing.
    """
    if tiles.engine is Engine.MFMA:
        return (BytesItem("the largest tile in passing", _largest_reordered(tiles)),)
    weights = tiles.weights if tiles.engine is Engine.VECTOR else tiles.crossing_weights()
    passing = max(*tiles.q, weights, _spread_output(tiles))
    return (
        BytesItem("k", sum(tiles.spread(tiles.k))),
        BytesItem("v", sum(tiles.shared_v)),
        BytesItem("q, weights or output in passing", passing),
    )


def cycle_columns(tiles: Tiles) -> int:
    """Returns columns of tensor memory: of scores and output, which is there only during its update."""
    scores, output = tiles.block_n, sum(chunk.width for chunk in tiles.v_chunks)
    if triton_release() >= SHARING_RELEASE:
        return columns_of(tiles, max(scores, output))
    # Probabilities are half as wide as scores. Scores that are summed over chunks are stored twice.
    twice = min(len(tiles.qk_chunks), 2)
    return columns_of(tiles, scores * twice + scores // 2 + output)


def _largest_reordered(tiles: Tiles) -> int:
    # Everything is in registers. Shared memory is only used to reorder one tile at a time.
    largest = max((0, *tiles.spread((*tiles.q, *tiles.k, *tiles.v))))
    if tiles.block_m <= WARP_ROWS * tiles.warps:
        largest = max(largest, reordered(tiles.weights))
    if tiles.block_m <= MFMA_ROWS * tiles.warps and tiles.spread(tiles.v):
        largest = max(largest, reordered(_output(tiles)))
    return largest


def _spread_output(tiles: Tiles) -> int:
    """Returns the bytes to distribute the stored output over warps for the matrix units."""
    if tiles.warps < MANY_WARPS or tiles.block_m > WARP_ROWS * tiles.warps:
        return 0
    tall = tiles.block_m >= max(chunk.width for chunk in tiles.v_chunks)
    small = tiles.itemsize < FLOAT32_BYTES
    spread = tiles.engine is Engine.WARPGROUP or (tiles.engine is Engine.WARP and tall and small)
    return _output(tiles) if spread else 0


def _output(tiles: Tiles) -> int:
    """Returns the bytes of the output's widest chunk."""
    return tiles.block_m * max(chunk.width for chunk in tiles.v_chunks) * FLOAT32_BYTES
