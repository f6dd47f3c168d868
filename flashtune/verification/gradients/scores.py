"""P and dS of some rows: exact, as plain code in low precision has them, and how far they may be off."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashtune.core.layouts import TORCH_DTYPES
from flashtune.verification.gradients.probabilities import (
    Given,
    Weights,
    Wide,
    finite,
    rounded,
    weights_of,
    widened,
)
from flashtune.verification.gradients.tolerance import QueryErrors, Sizes, query_errors
from flashtune.verification.tolerance import norm

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.core.problem import Problem
    from flashtune.verification.gradients.head_sampling import Pairs


class Scores(NamedTuple):
    """P and dS of some rows, [pairs, group · rows, keys] in float64.

    Attributes:
        weights: P.
        kept: P as it meets the values: zero where it is dropped, and the rest the larger. P itself where
            nothing is.
        slopes: dS, of the scores as they were multiplied: times the slope of a cap.
        laid: dS of the scores at last, with all that is laid over them; the same where nothing is capped.
    """

    weights: Tensor
    kept: Tensor
    slopes: Tensor
    laid: Tensor


class Work(NamedTuple):
    """Some query rows of some pairs.

    Attributes:
        rows: The rows, [rows] in int64 on the CPU.
        wide: Inputs.
        out: The output as the forward pass stored it, [pairs, group · rows, value_head_dim].
        lse: The log-sum-exp likewise, [pairs, group · rows] in float32.
        keys: How many keys each row sees, alike.
        queries: How many rows see each key, [pairs, keys].
        exact: P and dS.
        plain: P and dS as plain code has them, rounded to the inputs' type.
        errors: What figures of each row are off by.
    """

    rows: Tensor
    wide: Wide
    out: Tensor
    lse: Tensor
    keys: Tensor
    queries: Tensor
    exact: Scores
    plain: Scores
    errors: QueryErrors


def work_on(problem: Problem, given: Given, pairs: Pairs, rows: Tensor) -> Work:
    """All that gradients are made of, of some query rows of some pairs."""
    wide = widened(problem, given, pairs, rows)
    weights = weights_of(problem, given, wide, pairs, rows)
    out, lse = rounded(weights.out, problem), weights.lse.float()
    products = wide.dout @ wide.v.mT
    if weights.kept is not None:
        products.mul_(weights.kept)
    exact_delta = (wide.dout * weights.out).sum(-1) - wide.dlse
    plain_delta = ((wide.dout * out.double()).sum(-1) - wide.dlse).float()
    exact = _scores(weights.exact, products, exact_delta, weights.slope, weights.kept)
    plain = _plain(problem, weights, lse, products.float(), plain_delta)
    errors = query_errors(problem, _sizes(given, wide, weights, exact_delta), given.side.softcap or 0.0)
    return Work(rows, wide, out, lse, weights.keys, weights.queries, exact, plain, errors)


def _scores(
    weights: Tensor, products: Tensor, delta: Tensor, slope: Tensor | None, kept: Tensor | None
) -> Scores:
    laid = (products - delta[..., None]).mul_(weights)
    dropped = weights if kept is None else weights * kept
    return Scores(weights, dropped, laid if slope is None else laid * slope, laid)


def _plain(problem: Problem, weights: Weights, lse: Tensor, products: Tensor, delta: Tensor) -> Scores:
    """P and dS as unfused code in low precision has them, both rounded to the inputs' type."""
    low = TORCH_DTYPES[problem.dtype]
    p = (weights.scores.float() - finite(lse)[..., None]).exp_()
    scores = _scores(p, products, delta, None if weights.slope is None else weights.slope.float(), None)
    slopes = scores.slopes.to(low).double()
    laid = slopes if weights.slope is None else scores.laid.to(low).double()
    rounded_p = p.to(low).double()
    kept = rounded_p if weights.kept is None else rounded_p * weights.kept
    return Scores(rounded_p, kept, slopes, laid)


def _sizes(given: Given, wide: Wide, weights: Weights, delta: Tensor) -> Sizes:
    kept = 1.0 / (1.0 - (given.side.dropout or 0.0))
    product = norm(wide.dout) * norm(wide.v).amax(-1, keepdim=True) * kept
    return Sizes(
        score=given.scale * norm(wide.q) * norm(wide.k).amax(-1, keepdim=True),
        lse=finite(weights.lse).abs(),
        added=weights.added,
        product=product,
        delta=norm(wide.dout * weights.out),
        change=product + delta.abs(),
        kept=kept,
    )


def once(gradient: Tensor, problem: Problem) -> Tensor:
    """A gradient as float32 sums that are rounded once to the inputs' type."""
    return gradient.float().to(TORCH_DTYPES[problem.dtype]).double()


def largest(tensor: Tensor) -> Tensor:
    """Largest magnitude of each row."""
    return tensor.abs().amax(-1)
