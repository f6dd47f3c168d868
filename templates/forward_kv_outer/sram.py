"""The SRAM that a tile of K and V and a cycle of queries need at the least, item by item."""

from __future__ import annotations

from flashtune.templates.common.sram import Engine, Tiles
from flashtune.templates.family import TrafficItem

FLOAT32_BYTES = 4
# Rows that one warp's matrix instruction covers.
WARP_ROWS = 16
MANY_WARPS = 8


def cycle_items(tiles: Tiles) -> tuple[TrafficItem, ...]:
    """The items, which are all live at one point of the inner loop.

    A barrier stands in both loops, so nothing is pipelined and alignment changes nothing.
    """
    if tiles.engine is Engine.MFMA:
        # Everything rests in registers; shared memory only reorders it, one tile after the other.
        weights = tiles.weights if tiles.block_m <= WARP_ROWS * tiles.warps else 0
        largest = max(*tiles.q, *tiles.k, *tiles.v, weights, _reordered_output(tiles))
        return (TrafficItem("the largest tile in passing", largest),)
    weights = tiles.weights if tiles.engine is Engine.VECTOR else tiles.crossing_weights()
    return (
        TrafficItem("k", sum(tiles.k)),
        TrafficItem("v", sum(tiles.shared_v)),
        TrafficItem("q, weights or output in passing", max(*tiles.q, weights, _reordered_output(tiles))),
    )


def _reordered_output(tiles: Tiles) -> int:
    """The carried output: loaded row by row, then spread over warps as matrix units have it."""
    widest = max(chunk.width for chunk in tiles.v_chunks)
    output = tiles.block_m * widest * FLOAT32_BYTES
    if tiles.block_m > WARP_ROWS * tiles.warps:
        return 0
    by_engine = {
        Engine.MFMA: True,
        Engine.WARPGROUP: tiles.warps >= MANY_WARPS,
        Engine.WARP: tiles.warps >= MANY_WARPS and tiles.block_m >= widest and tiles.itemsize < FLOAT32_BYTES,
    }
    return output if by_engine.get(tiles.engine, False) else 0
