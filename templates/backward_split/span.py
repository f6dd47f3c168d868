"""What the two passes take by their schedules, and what they move."""

from __future__ import annotations

from flashtune.problem import Problem
from flashtune.target import Target
from flashtune.templates.backward_split.space import SplitConfig
from flashtune.templates.common.backward_span import PRODUCTS_OF_KEYS, delta_span, keys_span, queries_span
from flashtune.templates.common.traffic import cycled_queries, stays_in_cache, streamed_keys
from flashtune.templates.family import TrafficItem

FLOAT32 = 4


def split_span(problem: Problem, config: SplitConfig, target: Target) -> float:
    """Time of the three kernels, one behind the other, in ms; packed sequences are given as a batch."""
    keys = keys_span(
        problem,
        config.block_m,
        config.block_n,
        target,
        heads_inner=config.heads_inner,
        products=PRODUCTS_OF_KEYS,
    )
    queries = queries_span(
        problem,
        config.dq_block_m,
        config.dq_block_n,
        target,
        longest_first=config.long_first,
        heads_inner=config.heads_inner,
    )
    return delta_span(problem, target) + keys + queries


def split_traffic(problem: Problem, config: SplitConfig, target: Target | None) -> tuple[TrafficItem, ...]:
    """HBM traffic, item by item, in bytes; packed sequences are given as a batch."""
    size = problem.dtype.itemsize
    both = (problem.head_dim + problem.value_head_dim) * size
    heads = problem.batch * problem.heads
    rows, keys = heads * problem.seqlen_q, problem.batch * problem.kv_heads * problem.seqlen_kv
    walked = heads * cycled_queries(problem, config.block_m, config.block_n)
    streamed = heads * streamed_keys(problem, config.dq_block_m, config.dq_block_n)
    of_queries, of_keys = "q and dout read for every block of keys", "k and v read for every tile of queries"
    programs = target.sm_count if target else 1
    if stays_in_cache(
        _at_once(programs, problem.seqlen_kv, config.block_n) * problem.seqlen_q * both, target
    ):
        of_queries, walked = "q and dout read once, then from L2", min(walked, rows)
    if stays_in_cache(
        _at_once(programs, problem.seqlen_q, config.dq_block_m) * problem.seqlen_kv * both, target
    ):
        of_keys, streamed = "k and v read once, then from L2", min(streamed, keys)
    return (
        TrafficItem("out and dout read for delta", 2 * rows * problem.value_head_dim * size),
        TrafficItem("k and v read once, dk and dv written", 2 * keys * both),
        TrafficItem(of_queries, walked * (both + 2 * FLOAT32)),
        TrafficItem("q and dout read once, dq written", rows * (both + problem.head_dim * size)),
        TrafficItem(of_keys, streamed * both),
    )


def _at_once(programs: int, extent: int, block: int) -> int:
    """Heads that so many programs of neighbouring blocks are of."""
    return -(-programs // max(1, -(-extent // block))) + 1
