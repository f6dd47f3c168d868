"""P and dS of some rows: exact, in the low-precision reference, and their errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashtune.core.layouts import TORCH_DTYPES
from flashtune.verification.gradients.probabilities import (
    BackwardCase,
    Float64Rows,
    Weights,
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
        kept: P after dropout. P itself without dropout.
        slopes: dS of the scores before the softcap. Includes the derivative of the softcap.
        laid: dS of the scores after the softcap and all additions. Equal to `slopes` without softcap.
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
        out: The output as the forward pass stores it, [pairs, group · rows, value_head_dim].
        lse: The log-sum-exp as the forward pass stores it, [pairs, group · rows] in float32.
        keys: Number of visible keys of each row, [pairs, group · rows].
        queries: Number of rows that see each key, [pairs, keys].
        exact: P and dS.
        plain: P and dS of the low-precision reference, rounded to the inputs' dtype.
        errors: Errors of the quantities of each row.
    """

    rows: Tensor
    wide: Float64Rows
    out: Tensor
    lse: Tensor
    keys: Tensor
    queries: Tensor
    exact: Scores
    plain: Scores
    errors: QueryErrors


def work_on(problem: Problem, given: BackwardCase, pairs: Pairs, rows: Tensor) -> Work:
    """Returns the quantities that gradients are computed from, for some query rows of some pairs."""
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
    """Returns P and dS of unfused low-precision code, both rounded to the inputs' dtype."""
    low = TORCH_DTYPES[problem.dtype]
    p = (weights.scores.float() - finite(lse)[..., None]).exp_()
    scores = _scores(p, products, delta, None if weights.slope is None else weights.slope.float(), None)
    slopes = scores.slopes.to(low).double()
    laid = slopes if weights.slope is None else scores.laid.to(low).double()
    rounded_p = p.to(low).double()
    kept = rounded_p if weights.kept is None else rounded_p * weights.kept
    return Scores(rounded_p, kept, slopes, laid)


def _sizes(given: BackwardCase, wide: Float64Rows, weights: Weights, delta: Tensor) -> Sizes:
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
    """Returns a gradient as a float32 sum that is rounded once to the inputs' dtype."""
    return gradient.float().to(TORCH_DTYPES[problem.dtype]).double()


def largest(tensor: Tensor) -> Tensor:
    """Returns the largest magnitude of each row."""
    return tensor.abs().amax(-1)
