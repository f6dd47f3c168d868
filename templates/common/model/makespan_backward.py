"""What the kernels of a backward pass take by their schedules, by the terms of the forward kernels."""

from __future__ import annotations

import msgspec

from flashtune.core.problem import Causal, Direction, Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.cost import BANDWIDTH_SHARE
from flashtune.templates.common.model.makespan import PACE, portable_span

# A forward block has two products. Beside those of the scores and of the weights' gradients, one that keeps
# keys adds to dk and dv, and one that keeps queries to dq; or the one that keeps keys adds to all.
PRODUCTS_OF_KEYS = 4 / 2
PRODUCTS_OF_ALL = 5 / 2
PRODUCTS_OF_QUERIES = 3 / 2
TURNED_CAUSAL = {Causal.TOP_LEFT: Causal.BOTTOM_RIGHT, Causal.BOTTOM_RIGHT: Causal.TOP_LEFT}


def turned(problem: Problem) -> Problem:
    """The same pairs as a forward problem whose queries are the keys, one head for each KV head.

    Under a causal mask both are counted from the end, so that the mask hides what lies behind again.
    """
    left, right = problem.window_left, problem.window_right
    return msgspec.structs.replace(
        problem,
        direction=Direction.FORWARD,
        heads=problem.kv_heads,
        seqlen_q=problem.seqlen_kv,
        seqlen_kv=problem.seqlen_q,
        causal=TURNED_CAUSAL.get(problem.causal, Causal.NONE),
        window_left=left if problem.is_causal else right,
        window_right=right if problem.is_causal else left,
    )


def keys_span(
    problem: Problem, block_m: int, block_n: int, target: Target, *, heads_inner: bool, products: float
) -> float:
    """Time of a kernel whose programs keep a block of keys and walk the queries of a group of heads, in ms.

    Args:
        problem: What is computed; packed sequences as a batch.
        block_m: Queries of a block.
        block_n: Keys of a block.
        target: The GPU.
        heads_inner: Whether neighbouring programs work on different heads.
        products: Products of a pair of blocks, over those of the forward pass.
    """
    # The first keys are seen by the most queries, and their programs are begun first.
    span = portable_span(
        turned(problem), block_n, block_m, target, longest_first=True, heads_inner=heads_inner
    )
    return _multiplied(span, products * problem.group_size)


def queries_span(
    problem: Problem, block_m: int, block_n: int, target: Target, *, longest_first: bool, heads_inner: bool
) -> float:
    """Time of a kernel whose programs keep a tile of queries and walk keys, for dq alone, in ms."""
    forward = msgspec.structs.replace(problem, direction=Direction.FORWARD)
    span = portable_span(
        forward, block_m, block_n, target, longest_first=longest_first, heads_inner=heads_inner
    )
    return _multiplied(span, PRODUCTS_OF_QUERIES)


def _multiplied(span: float, factor: float) -> float:
    """The time of one launch, in ms, where a forward launch of that time does less work by a factor."""
    launch = PACE.launch / 1e3
    return launch + factor * (span - launch)


def delta_span(problem: Problem, target: Target) -> float:
    """Time of the prologue, which reads out and dout, in ms."""
    rows = problem.batch * problem.heads * problem.seqlen_q
    moved = 2 * rows * problem.value_head_dim * problem.dtype.itemsize
    return moved / (target.hbm_bandwidth * 1e6 * BANDWIDTH_SHARE)
