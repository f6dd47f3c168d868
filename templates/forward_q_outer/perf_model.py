"""Performance model of a tile of queries and a stream of K and V: minimum SRAM and makespan."""

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.makespan import portable_span, resident_programs
from flashtune.templates.common.model.sram import Tiles, chunks_of, tiles_of
from flashtune.templates.common.model.sram_stream import Stream, stream_columns, stream_items
from flashtune.templates.common.model.traffic import streamed_items, tiles_of_queries
from flashtune.templates.common.precision import InputPrecision, at_rate
from flashtune.templates.family import BytesItems, PerformanceModel
from flashtune.templates.forward_q_outer.space import Loads, QOuterConfig


class QOuterModel(PerformanceModel[QOuterConfig]):
    """The model, without state."""

    def sram_items(
        self, problem: Problem, config: QOuterConfig, target: Target, specialization: Specialization
    ) -> BytesItems:
        """Returns the items that are live at one point of the main loop."""
        tiles = _tiles(problem, config, target)
        if tiles is None:
            return ()
        descriptors = config.loads is Loads.DESCRIPTOR and specialization.takes_descriptors(problem.dtype)
        stream = Stream(
            tiles=tiles,
            stages=config.num_stages,
            descriptors=descriptors,
            ahead=config.overlap_qk and descriptors,
            aligned_bytes=specialization.alignment * problem.dtype.itemsize,
            halves=problem.dtype.is_float32 and config.input_precision is InputPrecision.TF32X3,
        )
        return stream_items(stream)

    def tensor_memory_columns(self, problem: Problem, config: QOuterConfig, target: Target) -> int:
        tiles = _tiles(problem, config, target)
        halves = problem.dtype.is_float32
        return stream_columns(tiles, config.num_stages, halves) if tiles else 0

    def makespan_ms(self, problem: Problem, config: QOuterConfig, target: Target) -> float:
        return portable_span(
            problem,
            config.block_m,
            config.block_n,
            at_rate(problem, config.input_precision, target),
            longest_first=config.lpt,
            heads_innermost=config.heads_innermost,
            descriptors=config.loads is Loads.DESCRIPTOR,
            resident=resident_programs(
                problem,
                config.block_m,
                config.block_n,
                config.num_warps,
                config.num_stages,
                config.maxnreg,
                target,
            ),
        )

    def hbm_items(self, problem: Problem, config: QOuterConfig, target: Target | None = None) -> BytesItems:
        at_once = tiles_of_queries(problem, config.block_m, target, inner=config.heads_innermost)
        return streamed_items(problem, config.block_m, config.block_n, at_once, target)


def _tiles(problem: Problem, config: QOuterConfig, target: Target) -> Tiles | None:
    """Returns the tiles of a program, None for unknown architectures."""
    ieee = config.input_precision is InputPrecision.IEEE
    chunks = chunks_of(problem, config.split_head_dim)
    return tiles_of(problem, target, (config.block_m, config.block_n), config.num_warps, chunks, ieee=ieee)
