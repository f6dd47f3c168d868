"""Reference gradients of captured tensors of functions, and their tolerances.

The gradient of an element is a sum in float32 over all pairs that read it. A term is dS times the derivative
of the changed score by the element. dS has the errors that it has in the gradient of a slope.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core.features.table_gradients import TableTerm, element_count, table_terms
from flashtune.core.problem import Dtype, Problem
from flashtune.verification.gradients.head_sampling import Pairs
from flashtune.verification.gradients.scores import BackwardCase, Work
from flashtune.verification.gradients.tolerance import Gradient, RowFigures, allowed_error
from flashtune.verification.reference.masks import Rows
from flashtune.verification.reference.scores import score_rows
from flashtune.verification.tolerance import FLOAT32_ROUNDOFF, squared


class OfElements(NamedTuple):
    """Partial sums over rows for the elements of all captured tensors with a gradient: [elements]."""

    exact: Tensor  # The gradients.
    plain: Tensor  # The gradients in the low-precision reference.
    spread: Tensor  # Squares of typical errors.
    squares: Tensor  # Squares of the terms.
    terms: Tensor  # Number of the terms of a sum.
    steps: Tensor  # Largest relative error of the rows' probabilities, in float32 roundoffs.


def element_sums(problem: Problem, inputs: BackwardCase, work: Work, pairs: Pairs) -> OfElements:
    """Returns the partial sums over some rows of some pairs."""
    group = problem.group_size
    some = Rows(pairs.batch.repeat_interleave(group), pairs.heads(problem).flatten(), work.rows)
    rows = score_rows(problem, inputs.lengths, inputs.side, some, work.keys.device)
    by_head = (len(some.head), len(work.rows), -1)
    scores = (work.wide.q @ work.wide.k.mT).mul_(inputs.scale).view(by_head)
    count = element_count(problem, inputs.side)
    exact, plain, spread, squares, terms = (scores.new_zeros(count) for _ in range(5))
    for term in table_terms(scores, rows):
        place = term.place.expand(scores.shape).flatten()
        totals = exact, plain, spread, squares, terms
        for total, part in zip(totals, _parts(work, term, scores), strict=True):
            total.index_add_(0, place, part.flatten())
    return OfElements(exact, plain, spread, squares, terms, work.errors.steps.amax().expand(count))


def _parts(work: Work, term: TableTerm, scores: Tensor) -> tuple[Tensor, ...]:
    """Returns the terms of the sums of `OfElements`, [heads, rows, keys] each."""
    shape, errors = scores.shape, work.errors
    delta, product, weight, least = (
        tensor.view(shape[:2])[..., None].expand(shape)
        for tensor in (errors.delta, errors.product, errors.weight, errors.least.expand(errors.delta.shape))
    )
    weights, biased = work.exact.weights.view(shape), work.exact.biased.view(shape)
    seen = weights > 0.0
    # The derivative may be infinite where the key is hidden.
    slope, rounding = (
        torch.where(seen, part.expand(shape), 0.0) for part in (term.slope, term.errors.to(scores.dtype))
    )
    value = biased * slope
    # An exact derivative may be 0 where that of a kernel is not: its rounding error counts too.
    size = slope.abs() + FLOAT32_ROUNDOFF * rounding
    spread = weight * squared(value) + squared(least * size)
    spread = spread + squared(FLOAT32_ROUNDOFF * biased * rounding)
    # All keys of a row share the error of its delta. Those that read one element add up.
    shared = (delta + product) * weights * size
    ordered = term.place.expand(shape).sort(-1).values
    is_repeated = bool((ordered.diff(dim=-1) == 0).any())
    spread = spread + shared * (shared.sum(-1, keepdim=True) if is_repeated else shared)
    plain = work.plain.biased.view(shape) * slope
    return value, plain, spread, squared(value), seen.double()


def element_gradient(problem: Problem, sums: OfElements) -> Gradient:
    """Returns the gradients of all captured tensors from sums over all pairs. An element is a row."""
    plain = (sums.plain - sums.exact).abs()
    # The order of a sum is any, and an element may have more terms than a row has keys.
    spread = sums.spread + FLOAT32_ROUNDOFF**2 * sums.terms * sums.squares
    figures = RowFigures(plain, spread.sqrt(), sums.exact.abs(), sums.terms, sums.steps)
    return Gradient(sums.exact[:, None], allowed_error(figures, problem, stored=Dtype.FP32))
