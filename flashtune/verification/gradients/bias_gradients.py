"""Gradients of an additive bias and of ALiBi slopes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from flashtune.verification.gradients.scores import Work, once
from flashtune.verification.gradients.tolerance import (
    Gradient,
    RowFigures,
    allowed_query_error,
    allowed_slope_error,
)
from flashtune.verification.reference.scores import distances
from flashtune.verification.tolerance import larger, squared

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.core.problem import Problem
    from flashtune.verification.gradients.head_sampling import Pairs
    from flashtune.verification.lengths import Lengths


class OfSlopes(NamedTuple):
    """Partial sums of the slopes' gradients over some rows, [pairs, group] each. `steps` is a maximum.

    Attributes:
        exact: The gradients.
        plain: The gradients in the low-precision reference.
        spread: Squares of typical errors.
        terms: Number of pairs of a query and a visible key.
        steps: Largest relative error of the rows' probabilities, in float32 roundoffs.
    """

    exact: Tensor
    plain: Tensor
    spread: Tensor
    terms: Tensor
    steps: Tensor


def bias_gradient(problem: Problem, work: Work, chosen: Tensor) -> Gradient:
    """Returns the gradient of the bias in the compared rows: [pairs, group, rows, keys, 1].

    It is dS, with each element as a row of its own. Each is rounded once and has an error of P times the
    errors of dP and delta. It is zero for hidden keys.

    Args:
        problem: The group size.
        work: The rows.
        chosen: Compared rows, [rows] in int64 on the CPU.
    """
    group, errors = problem.group_size, work.errors
    here = torch.isin(work.rows, chosen).nonzero().flatten()

    def picked(rows: Tensor) -> Tensor:
        split: Tensor = rows.unflatten(1, (group, -1))
        part = split if len(here) == len(work.rows) else split[:, :, here]
        return part if part.dim() > 3 else part[..., None]

    exact, weights = picked(work.exact.laid), picked(work.exact.weights)
    typical = picked(errors.delta + errors.product) * weights + picked(errors.weight).sqrt() * exact.abs()
    typical += picked(errors.least)
    plain = (once(picked(work.plain.laid), problem) - exact).abs()
    seen = weights.bool().double()
    figures = RowFigures(plain, typical, exact.abs(), seen, picked(errors.steps).expand(seen.shape))
    return Gradient(exact[..., None], allowed_query_error(figures, problem))


def slope_sums(problem: Problem, work: Work, pairs: Pairs, lengths: Lengths) -> OfSlopes:
    """Returns the partial sums of the slopes' gradients over some rows."""
    group = problem.group_size
    batch = pairs.batch.repeat_interleave(group)
    distance = distances(problem, lengths, batch, work.rows, work.keys.device)
    distance = distance.expand(len(batch), -1, -1).reshape(work.exact.laid.shape)
    errors, laid = work.errors, work.exact.laid
    # All keys of a row share the error of its delta.
    alike = (errors.delta + errors.product) * (work.exact.weights * distance).sum(-1)
    spread = errors.weight * squared(laid * distance).sum(-1) + squared(alike)
    spread += squared(errors.least) * squared(distance).sum(-1)

    def of_heads(rows: Tensor) -> Tensor:
        total: Tensor = rows.unflatten(1, (group, -1)).sum(-1)
        return total

    return OfSlopes(
        exact=-of_heads((laid * distance).sum(-1)),
        plain=-of_heads((work.plain.laid * distance).sum(-1)),
        spread=of_heads(spread),
        terms=of_heads(work.keys),
        steps=errors.steps.unflatten(1, (group, -1)).amax(-1),
    )


def added_slopes(one: OfSlopes, other: OfSlopes) -> OfSlopes:
    """Returns the sum of the partial sums of two slices of rows."""
    sums = OfSlopes(*map(torch.add, one, other))
    return sums._replace(steps=larger(one.steps, other.steps))


def slope_gradient(problem: Problem, sums: OfSlopes) -> Gradient:
    """Returns the gradients of slopes from the sums over all rows. Each head is a row of one element."""
    plain = (sums.plain - sums.exact).abs()
    figures = RowFigures(plain, sums.spread.sqrt(), sums.exact.abs(), sums.terms, sums.steps)
    return Gradient(sums.exact[..., None], allowed_slope_error(figures, problem))
