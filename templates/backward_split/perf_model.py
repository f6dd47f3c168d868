"""Performance model of the two backward kernels: minimum SRAM, makespan and HBM traffic."""

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.templates.backward_split.space import SplitConfig, chunks_of
from flashtune.templates.common.model.makespan_backward import (
    PRODUCTS_OF_KEYS,
    delta_span,
    keys_span,
    queries_span,
)
from flashtune.templates.common.model.sram import columns
from flashtune.templates.common.model.sram_backward import Walk, walk_columns, walk_items
from flashtune.templates.common.model.traffic import (
    cycled_rows,
    programs_by_key_block,
    streamed_item,
    tiles_of_queries,
    unpacked,
)
from flashtune.templates.common.precision import InputPrecision, at_rate
from flashtune.templates.family import BytesItem, PerformanceModel

KEYS, QUERIES = "k and v", "q and dout"
FLOAT32 = 4


class SplitModel(PerformanceModel[SplitConfig]):
    """The model, without state."""

    def sram_items(
        self, problem: Problem, config: SplitConfig, target: Target, specialization: Specialization
    ) -> tuple[BytesItem, ...]:
        """Returns the items of the kernel or of its epilogue, whichever needs more."""
        queries = walk_items(_of_queries(problem, config), problem, target, specialization, (QUERIES, KEYS))
        keys = walk_items(_of_keys(problem, config), problem, target, specialization, (KEYS, QUERIES))
        return max(keys, queries, key=lambda items: sum(item.bytes for item in items))

    def tensor_memory_columns(self, problem: Problem, config: SplitConfig, target: Target) -> int:
        """Returns columns of tensor memory, of the kernel or of its epilogue, whichever needs more."""
        keys, queries = _of_keys(problem, config), _of_queries(problem, config)
        return max(
            walk_columns(keys, problem, target, keys.columns),
            walk_columns(queries, problem, target, columns(queries.qk_chunks)),
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
        return delta_span(problem, target) + keys + queries

    def hbm_items(
        self, problem: Problem, config: SplitConfig, target: Target | None = None
    ) -> tuple[BytesItem, ...]:
        """Returns HBM traffic, item by item, in bytes."""
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


def _of_keys(problem: Problem, config: SplitConfig) -> Walk:
    """Returns the tiles of the kernel that loops over queries."""
    qk_chunks, v_chunks = chunks_of(problem, config)
    return Walk(
        held=config.block_n,
        walked=config.block_m,
        qk_chunks=qk_chunks,
        v_chunks=v_chunks,
        warps=config.num_warps,
        stages=config.num_stages,
        ieee=config.input_precision is InputPrecision.IEEE,
    )


def _of_queries(problem: Problem, config: SplitConfig) -> Walk:
    """Returns the tiles of the kernel that loops over keys."""
    qk_chunks, v_chunks = chunks_of(problem, config)
    return Walk(
        held=config.dq_block_m,
        walked=config.dq_block_n,
        qk_chunks=qk_chunks,
        v_chunks=v_chunks,
        warps=config.dq_warps,
        stages=config.dq_stages,
        ieee=config.input_precision is InputPrecision.IEEE,
    )
