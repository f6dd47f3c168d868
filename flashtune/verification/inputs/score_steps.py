"""Queries whose scores are not at a step of a score function.

A comparison of the score has another result if rounding errors move the score across the compared number. A
correct kernel then computes another branch than the float64 reference. Queries with such a score are drawn
again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtune.core.expressions.derivative import derivatives
from flashtune.core.expressions.evaluation import near_steps
from flashtune.core.features.functions import values_of
from flashtune.core.features.records import ExtraInputs
from flashtune.core.problem import Problem
from flashtune.verification.lengths import Lengths
from flashtune.verification.reference.masks import Rows
from flashtune.verification.reference.scores import chunked, score_rows, widened
from flashtune.verification.tolerance import norm, product_steps

# A query with a thousand keys has a score at a step in one of a hundred draws.
DRAWS = 8
# The relative change of a query's elements in a draw, so that queries keep about their scores.
CHANGE = 2.0**-4


def away_from_steps(
    problem: Problem,
    tensors: tuple[Tensor, Tensor, Tensor],
    scale: float,
    side: ExtraInputs,
    lengths: Lengths,
    heads: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Returns the queries, of which those with a score at a step are multiplied by random numbers near 1.

    Tensors are q, k and v, [batch, heads, tokens, width]. `heads` are those that will be compared, ascending
    numbers as in `Sample`. The generator is on the CPU.
    """
    q, k, v = tensors
    for _ in range(DRAWS):
        near = queries_at_steps(problem, (q, k, v), scale, side, lengths, heads)
        if near is None or not near.any():
            break
        factors = 1.0 + CHANGE * torch.randn(q.shape, generator=generator).to(q.device)
        q = torch.where(near[..., None], (q.float() * factors).to(q.dtype), q)
    return q


def queries_at_steps(
    problem: Problem,
    tensors: tuple[Tensor, Tensor, Tensor],
    scale: float,
    side: ExtraInputs,
    lengths: Lengths,
    heads: Tensor,
) -> Tensor | None:
    """Returns whether each query of some heads has a score at a step; None if there are no steps.

    Returns:
        [batch, heads, seqlen_q]. It is False for other heads.
    """
    if problem.functions.score < 0:
        return None
    device, rows = tensors[0].device, torch.arange(problem.seqlen_q)
    functions = derivatives(problem.functions) if problem.is_backward else problem.functions
    wanted = range(len(functions.nodes)) if problem.is_backward else (functions.score,)
    steps = product_steps(problem.dtype, problem.head_dim)
    found = torch.zeros(problem.batch, problem.heads, len(rows), dtype=torch.bool, device=device)
    for chunk in chunked(problem, heads, len(rows), device.type):
        some = Rows(chunk.heads // problem.heads, chunk.heads % problem.heads, rows)
        q, k, _ = widened(problem, chunk, rows, tensors, side)
        values = values_of((q @ k.mT).mul_(scale), score_rows(problem, lengths, side, some, device))
        bound = steps * scale * norm(q)[..., None] * norm(k)[:, None]
        near = near_steps(functions, values, bound, *wanted)
        if near is None:
            return None
        found[some.batch, some.head] = near.expand(bound.shape).any(-1)
    return found
