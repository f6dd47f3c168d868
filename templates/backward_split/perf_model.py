"""Performance model of the two backward kernels: minimum SRAM, makespan and HBM traffic."""

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.templates.backward_split.space import SplitConfig
from flashtune.templates.common.model.functions import share_of_functions
from flashtune.templates.common.model.makespan_backward import (
    PRODUCTS_OF_KEYS,
    delta_span,
    keys_span,
    queries_span,
)
from flashtune.templates.common.model.sram import Tiles, backward_chunks, columns, columns_of, tiles_of
from flashtune.templates.common.model.sram_backward import walk_items
from flashtune.templates.common.model.traffic import (
    cycled_rows,
    programs_by_key_block,
    streamed_item,
    tiles_of_queries,
    unpacked,
)
from flashtune.templates.common.precision import InputPrecision, at_rate
from flashtune.templates.family import BytesItem, BytesItems, PerformanceModel

KEYS, QUERIES = "k and v", "q and dout"
FLOAT32 = 4


class SplitModel(PerformanceModel[SplitConfig]):
    """The model, without state."""

    def sram_items(
        self, problem: Problem, config: SplitConfig, target: Target, specialization: Specialization
    ) -> BytesItems:
        """Returns the items of the kernel or of its epilogue, whichever needs more."""
        keys, queries = _tiles(problem, config, target)
        return max(
            walk_items(keys, config.num_stages, problem, specialization, (KEYS, QUERIES)),
            walk_items(queries, config.dq_stages, problem, specialization, (QUERIES, KEYS)),
            key=lambda items: sum(item.bytes for item in items),
        )

    def tensor_memory_columns(self, problem: Problem, config: SplitConfig, target: Target) -> int:
        """Returns columns of tensor memory, of the kernel or of its epilogue, whichever needs more."""
        keys, queries = _tiles(problem, config, target)
        if keys is None or queries is None:
            return 0
        qk = columns(keys.qk_chunks)
        # Sums, and a tile of scores.
        return max(
            columns_of(keys, qk + columns(keys.v_chunks) + keys.block_n),
            columns_of(queries, qk + queries.block_n),
        )

    def makespan_ms(self, problem: Problem, config: SplitConfig, target: Target) -> float:
        """Returns the time of the three kernels in sequence, in ms."""
        problem = unpacked(problem)
        target = at_rate(problem, config.input_precision, target)
        keys = keys_span(
            problem,
            config.block_m,
            config.block_n,
            target,
            heads_innermost=config.heads_innermost,
            products=PRODUCTS_OF_KEYS,
        )
        queries = queries_span(
            problem,
            config.dq_block_m,
            config.dq_block_n,
            target,
            longest_first=config.lpt,
            heads_innermost=config.heads_innermost,
        )
        return delta_span(problem, target) + (keys + queries) * (1.0 + share_of_functions(problem))

    def hbm_items(self, problem: Problem, config: SplitConfig, target: Target | None = None) -> BytesItems:
        problem = unpacked(problem)
        size = problem.dtype.itemsize
        both = (problem.head_dim + problem.value_head_dim) * size
        heads = problem.batch * problem.heads
        rows, keys = heads * problem.seqlen_q, problem.batch * problem.kv_heads * problem.seqlen_kv
        kept = programs_by_key_block(problem, config.block_n, target, inner=config.heads_innermost)
        row_bytes = both + 2 * FLOAT32
        walked, often = cycled_rows(problem, config.block_m, config.block_n, row_bytes, kept, target)
        at_once = tiles_of_queries(problem, config.dq_block_m, target, inner=config.heads_innermost)
        streamed = streamed_item(problem, config.dq_block_m, config.dq_block_n, at_once, target)
        return (
            BytesItem("out and dout read for delta", 2 * rows * problem.value_head_dim * size),
            BytesItem("k and v read once, dk and dv written", 2 * keys * both),
            BytesItem(f"q and dout read {often}", walked * row_bytes),
            BytesItem("q and dout read once, dq written", rows * (both + problem.head_dim * size)),
            streamed,
        )


def _tiles(problem: Problem, config: SplitConfig, target: Target) -> tuple[Tiles | None, Tiles | None]:
    """Returns the tiles of the kernel that loops over queries, and of the one that loops over keys."""
    chunks = backward_chunks(problem, config.split_head_dim)
    ieee = config.input_precision is InputPrecision.IEEE
    keys, queries = (config.block_n, config.block_m), (config.dq_block_m, config.dq_block_n)
    return (
        tiles_of(problem, target, keys, config.num_warps, chunks, ieee=ieee),
        tiles_of(problem, target, queries, config.dq_warps, chunks, ieee=ieee),
    )
