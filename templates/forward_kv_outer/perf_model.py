"""Performance model of a loop over queries for each tile of K and V: minimum SRAM and HBM traffic."""

import math

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.cost import BANDWIDTH_SHARE
from flashtune.templates.common.model.makespan import portable_span
from flashtune.templates.common.model.sram import (
    SHARING_RELEASE,
    Engine,
    Tiles,
    chunks_of,
    columns,
    columns_of,
    reordered,
    tiles_of,
    triton_release,
)
from flashtune.templates.common.model.traffic import AtOnce, cycled_rows, missed
from flashtune.templates.common.precision import at_rate, fixed_precision
from flashtune.templates.family import BytesItem, BytesItems, PerformanceModel
from flashtune.templates.forward_kv_outer.space import KVOuterConfig

FLOAT32_BYTES = 4
# Rows of one warp's matrix instruction.
WARP_ROWS = 16
MFMA_ROWS = 32
MANY_WARPS = 8


class KVOuterModel(PerformanceModel[KVOuterConfig]):
    """The model, without state."""

    def sram_items(
        self, problem: Problem, config: KVOuterConfig, target: Target, specialization: Specialization
    ) -> BytesItems:
        """Returns the items that are live at one point of the inner loop.

        Both loops contain a barrier, so nothing is pipelined and alignment changes nothing.
        """
        tiles = _tiles(problem, config, target)
        if tiles is None:
            return ()
        if tiles.engine is Engine.MFMA:
            return (BytesItem("the largest tile in passing", _largest_reordered(tiles)),)
        weights = tiles.weights if tiles.engine is Engine.VECTOR else tiles.crossing_weights()
        passing = max(*tiles.q, weights, _spread_output(tiles))
        return (
            BytesItem("k", sum(tiles.spread(tiles.k))),
            BytesItem("v", sum(tiles.shared_v)),
            BytesItem("q, weights or output in passing", passing),
        )

    def tensor_memory_columns(self, problem: Problem, config: KVOuterConfig, target: Target) -> int:
        """Returns columns of tensor memory: of scores and output, which is there only during its update."""
        tiles = _tiles(problem, config, target)
        if tiles is None:
            return 0
        scores, output = tiles.block_n, columns(tiles.v_chunks)
        if triton_release() >= SHARING_RELEASE:
            return columns_of(tiles, max(scores, output))
        # Probabilities are half as wide as scores. Scores that are summed over chunks are stored twice.
        twice = min(len(tiles.qk_chunks), 2)
        return columns_of(tiles, scores * twice + scores // 2 + output)

    def makespan_ms(self, problem: Problem, config: KVOuterConfig, target: Target) -> float:
        """Returns the time of a launch, in ms. One program computes a head, so few heads leave SMs idle."""
        heads = max(1, problem.batch * problem.heads)
        idle = math.ceil(heads / target.sm_count) * target.sm_count / heads
        moved = sum(item.bytes for item in self.hbm_items(problem, config, target))
        moving = moved / (target.hbm_bandwidth * 1e6 * BANDWIDTH_SHARE)
        target = at_rate(problem, fixed_precision(problem), target)
        return max(idle * portable_span(problem, config.block_m, config.block_n, target), moving)

    def hbm_items(self, problem: Problem, config: KVOuterConfig, target: Target | None = None) -> BytesItems:
        size = problem.dtype.itemsize
        all_heads = problem.batch * problem.heads
        rows = all_heads * problem.seqlen_q
        state = (problem.value_head_dim + 2) * FLOAT32_BYTES
        # One program for each head. It iterates over all queries of its head and their state.
        programs = min(all_heads, target.sm_count) if target else all_heads
        row_bytes = problem.head_dim * size + state
        visits, often = cycled_rows(
            problem, config.block_m, config.block_n, row_bytes, AtOnce(programs, programs), target
        )
        last = rows * missed(programs * problem.seqlen_q * row_bytes, target)
        keys = all_heads * problem.seqlen_kv * (problem.head_dim + problem.value_head_dim) * size
        return (
            BytesItem("k and v read once for every query head", keys),
            BytesItem("carried max, sum and output first written", rows * state),
            BytesItem(f"q read {often}", visits * problem.head_dim * size),
            BytesItem(f"carried max, sum and output read {often}", visits * state),
            BytesItem(f"carried max, sum and output written {often}", visits * state),
            BytesItem("carried max, sum and output last read", round(last) * state),
            BytesItem("out written once", rows * problem.value_head_dim * size),
        )


def _tiles(problem: Problem, config: KVOuterConfig, target: Target) -> Tiles | None:
    """Returns the tiles of a program, None for unknown architectures."""
    chunks = chunks_of(problem, config.split_head_dim)
    return tiles_of(problem, target, (config.block_m, config.block_n), config.num_warps, chunks, ieee=False)


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
