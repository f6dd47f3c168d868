"""Makespan and traffic of the two backward kernels."""

from __future__ import annotations

from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.templates.backward_split.space import SplitConfig
from flashtune.templates.common.model.makespan_backward import (
    PRODUCTS_OF_KEYS,
    delta_span,
    keys_span,
    queries_span,
)
from flashtune.templates.common.model.traffic import (
    cycled_rows,
    programs_by_key_block,
    streamed_item,
    tiles_of_queries,
)
from flashtune.templates.family import BytesItem

FLOAT32 = 4


def split_span(problem: Problem, config: SplitConfig, target: Target) -> float:
    """Returns the time of the three kernels in sequence, in ms. A varlen batch is passed as a batch."""
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


def split_traffic(problem: Problem, config: SplitConfig, target: Target | None) -> tuple[BytesItem, ...]:
    """Returns HBM traffic, item by item, in bytes. A varlen batch is passed as a batch."""
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
