"""Makespans of backward kernels, from the terms of the forward kernels."""

import msgspec

from flashtune.core.problem import Causal, Direction, Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.cost import BANDWIDTH_SHARE
from flashtune.templates.common.model.makespan import PACE, portable_span

# A forward block has two products. A backward block has those of the scores and of probabilities' gradients.
# A kernel that loops over queries adds those of dk and dv, and one that loops over keys that of dq. A fused
# kernel has all.
PRODUCTS_OF_KEYS = 4 / 2
PRODUCTS_OF_ALL = 5 / 2
PRODUCTS_OF_QUERIES = 3 / 2
TURNED_CAUSAL = {Causal.TOP_LEFT: Causal.BOTTOM_RIGHT, Causal.BOTTOM_RIGHT: Causal.TOP_LEFT}


def turned(problem: Problem) -> Problem:
    """Returns a forward problem of the same pairs with keys as queries, one head for each KV head.

    Under a causal mask both count from the end, so that the mask again hides later positions.
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
    problem: Problem, block_m: int, block_n: int, target: Target, *, heads_innermost: bool, products: float
) -> float:
    """Returns the time of a kernel that loops over the queries of a group for each block of keys, in ms.

    A varlen problem counts as a batch. `products` is the number of products of a pair of blocks, over that of
    the forward pass.
    """
    # The most queries see the first keys, and their programs start first.
    span = portable_span(
        turned(problem), block_n, block_m, target, longest_first=True, heads_innermost=heads_innermost
    )
    return _multiplied(span, products * problem.group_size)


def queries_span(
    problem: Problem,
    block_m: int,
    block_n: int,
    target: Target,
    *,
    longest_first: bool,
    heads_innermost: bool,
) -> float:
    """Returns the time of a dq kernel, which loops over keys for each tile of queries, in ms."""
    forward = msgspec.structs.replace(problem, direction=Direction.FORWARD)
    span = portable_span(
        forward, block_m, block_n, target, longest_first=longest_first, heads_innermost=heads_innermost
    )
    return _multiplied(span, PRODUCTS_OF_QUERIES)


def _multiplied(span: float, factor: float) -> float:
    """Returns the time of one launch with a factor more work than a forward launch, in ms."""
    launch = PACE.launch / 1e3
    return launch + factor * (span - launch)


def delta_span(problem: Problem, target: Target) -> float:
    """Returns the time of the prologue, which reads out and dout, in ms."""
    rows = problem.batch * problem.heads * problem.seqlen_q
    moved = 2 * rows * problem.value_head_dim * problem.dtype.itemsize
    return moved / (target.hbm_bandwidth * 1e6 * BANDWIDTH_SHARE)
