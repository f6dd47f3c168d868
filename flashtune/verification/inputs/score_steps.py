"""Changes queries so that no score is near a step of a score function.

A step is a number at which a comparison of the score, or an int from it, changes. If rounding errors move a
score across it, a correct kernel computes another branch than the float64 reference. Queries with such a
score are changed a little.
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
from flashtune.verification.reference.forward import Sample
from flashtune.verification.reference.masks import Rows
from flashtune.verification.reference.scores import CHUNK_SCORES, chunked, score_rows, widened
from flashtune.verification.tolerance import norm, product_steps

# With a thousand keys, about one query in a hundred has a score near a step after a change. If a function has
# so many steps that queries stay near them, the check may refuse a right kernel.
MAX_CHANGES = 8
# The relative size of a change of a query's elements, so that queries keep about their scores.
CHANGE = 2.0**-4


def away_from_steps(
    problem: Problem,
    tensors: tuple[Tensor, Tensor, Tensor],
    scale: float,
    side: ExtraInputs,
    lengths: Lengths,
    chosen: Sample,
    generator: torch.Generator,
) -> Tensor:
    """Returns the queries, of which those with a score near a step are multiplied by numbers near 1.

    Args:
        problem: Shape, dtype and functions.
        tensors: q, k and v, [batch, heads, tokens, width].
        scale: Softmax scale.
        side: Extra inputs.
        lengths: Lengths of the sequences.
        chosen: The rows and heads that will be compared. Others do not change.
        generator: A generator on the CPU.
    """
    q, k, v = tensors
    for _ in range(MAX_CHANGES):
        near = queries_near_steps(problem, (q, k, v), scale, side, lengths, chosen)
        if near is None or not near.any():
            break
        factors = 1.0 + CHANGE * torch.randn(q.shape, generator=generator).to(q.device)
        q = torch.where(near[..., None], (q.float() * factors).to(q.dtype), q)
    return q


def queries_near_steps(
    problem: Problem,
    tensors: tuple[Tensor, Tensor, Tensor],
    scale: float,
    side: ExtraInputs,
    lengths: Lengths,
    chosen: Sample,
) -> Tensor | None:
    """Returns whether each chosen query has a score near a step, or None if the pass has no steps.

    Returns:
        [batch, heads, seqlen_q]. It is False for other queries.
    """
    functions = derivatives(problem.functions) if problem.is_backward else problem.functions
    if not functions.steps[0]:
        return None
    device, shape = tensors[0].device, (problem.batch, problem.heads, problem.seqlen_q)
    found = torch.zeros(shape, dtype=torch.bool, device=device)
    steps = product_steps(problem.dtype, problem.head_dim)
    for rows in chosen.rows.split(max(1, CHUNK_SCORES[device.type] // max(1, problem.seqlen_kv))):
        for chunk in chunked(problem, chosen.heads, len(rows), device.type):
            some = Rows(chunk.heads // problem.heads, chunk.heads % problem.heads, rows)
            q, k, _ = widened(problem, chunk, rows, tensors, side)
            values = values_of((q @ k.mT).mul_(scale), score_rows(problem, lengths, side, some, device))
            bound = steps * scale * norm(q)[..., None] * norm(k)[:, None]
            near = near_steps(functions, values, bound)
            assert near is not None
            found[some.batch[:, None], some.head[:, None], rows] = near.expand(bound.shape).any(-1)
    return found
