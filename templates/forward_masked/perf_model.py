"""Performance model of a tile of queries and a stream of K and V: minimum SRAM and makespan."""

from collections.abc import Iterable

import msgspec

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.makespan import portable_span
from flashtune.templates.common.model.sram import Engine, Tiles, head_chunks, tiles_of
from flashtune.templates.common.model.sram_stream import Stream, stream_columns, stream_items
from flashtune.templates.common.model.traffic import streamed_items, tiles_of_queries, unpacked
from flashtune.templates.common.precision import InputPrecision, at_rate
from flashtune.templates.family import BytesItem, BytesItems, PerformanceModel
from flashtune.templates.forward_masked.space import (
    MaskedConfig,
    masked_space,
    tile_splits,
    value_chunks,
)

# If a page number is loaded just before its keys, each load waits for another: two stages are left.
STAGES_OF_PAGES = 2


class MaskedModel(PerformanceModel[MaskedConfig]):
    """The model, without state."""

    def sram_items(
        self, problem: Problem, config: MaskedConfig, target: Target, specialization: Specialization
    ) -> BytesItems:
        """Returns the items that are live at one point of the main loop."""
        tiles = _tiles(problem, config, target)
        if tiles is None:
            return ()
        stored = 1 if problem.kv_dtype else problem.dtype.itemsize
        stream = Stream(
            tiles=tiles,
            stages=min(config.num_stages, STAGES_OF_PAGES)
            if _waits_for_pages(problem, config)
            else config.num_stages,
            descriptors=False,
            ahead=False,
            aligned_bytes=specialization.alignment * stored,
            halves=problem.dtype.is_float32 and config.input_precision is InputPrecision.TF32X3,
        )
        return _converted_items(stream) if problem.kv_dtype else stream_items(stream)

    def tensor_memory_columns(self, problem: Problem, config: MaskedConfig, target: Target) -> int:
        tiles = _tiles(problem, config, target)
        return stream_columns(tiles, config.num_stages, problem.dtype.is_float32) if tiles else 0

    def makespan_ms(self, problem: Problem, config: MaskedConfig, target: Target) -> float:
        problem = unpacked(problem)
        return portable_span(
            problem,
            config.block_m,
            config.block_n,
            at_rate(problem, config.input_precision, target),
            longest_first=config.lpt,
            heads_innermost=config.heads_innermost,
            splits=config.num_splits,
        )

    def schedule_variants(
        self, problem: Problem, config: MaskedConfig, target: Target
    ) -> Iterable[MaskedConfig]:
        """Returns points of the space with other splits."""
        return split_variants(problem, config, target)

    def hbm_items(self, problem: Problem, config: MaskedConfig, target: Target | None = None) -> BytesItems:
        problem = unpacked(problem)
        at_once = tiles_of_queries(problem, config.block_m, target, inner=config.heads_innermost)
        return streamed_items(problem, config.block_m, config.block_n, at_once, target)


def split_variants(problem: Problem, config: MaskedConfig, target: Target) -> Iterable[MaskedConfig]:
    """Returns points of the space that differ in the splits."""
    space = masked_space(problem, target)
    for splits in tile_splits(problem, target):
        other = msgspec.structs.replace(config, num_splits=splits)
        if other != config and space.contains(other):
            yield other


def _waits_for_pages(problem: Problem, config: MaskedConfig) -> bool:
    """Returns whether every loop jumps from a sequence's start to a band, so its next page is unknown."""
    has_band = problem.window_left is not None or problem.chunk > 0
    lifts = has_band and (problem.sink_tokens > 0 or problem.prefix)
    return problem.page_size > 0 and lifts and not config.split_masked_loop


def _tiles(problem: Problem, config: MaskedConfig, target: Target) -> Tiles | None:
    """Returns the tiles of a program as the products read them."""
    ieee = config.input_precision is InputPrecision.IEEE
    chunks = head_chunks(problem.head_dim, config.split_head_dim), value_chunks(problem, config)
    return tiles_of(problem, target, (config.block_m, config.block_n), config.num_warps, chunks, ieee=ieee)


def _converted_items(stream: Stream) -> BytesItems:
    """Returns K and V that are stored in 8 bits: they pass through registers, so one stage is free early."""
    tiles = stream.tiles
    if tiles.engine not in (Engine.WARPGROUP, Engine.WARP):
        return ()
    narrow = msgspec.structs.replace(stream, tiles=msgspec.structs.replace(tiles, itemsize=1))
    items = [
        BytesItem("q", sum(tile for tile in tiles.q if tiles.worth_a_copy(tile))),
        BytesItem(f"k in 8 bits, {stream.stages - 1} in flight", (stream.stages - 1) * narrow.k),
        BytesItem(f"v in 8 bits, {stream.stages - 1} in flight", (stream.stages - 1) * narrow.v),
    ]
    if tiles.engine is Engine.WARPGROUP:
        items.append(BytesItem("k or v in the type of q", max(*tiles.k, *tiles.v)))
    return tuple(item for item in items if item.bytes)
