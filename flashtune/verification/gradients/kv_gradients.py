"""Gradients of keys and values: sums over the query rows of all heads that share them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from flashtune.verification.gradients.scores import Work, largest, once
from flashtune.verification.gradients.tolerance import Gradient, RowFigures, allowed_key_error
from flashtune.verification.tolerance import larger, squared

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.core.problem import Problem


class OfKeys(NamedTuple):
    """Partial sums of the gradients of k and v over some rows, [pairs, keys, ...]. `steps` is a maximum.

    Attributes:
        dk, dv: Exact gradients; dk without the scale.
        plain_dk, plain_dv: Those of the low-precision reference.
        dk_spread, dv_spread: Squares of typical errors of each column.
        queries: Number of rows that see each key, [pairs, keys].
        steps: Largest relative error of the rows' probabilities, in float32 roundoffs, [pairs, 1].
    """

    dk: Tensor
    dv: Tensor
    plain_dk: Tensor
    plain_dv: Tensor
    dk_spread: Tensor
    dv_spread: Tensor
    queries: Tensor
    steps: Tensor


def key_sums(work: Work) -> OfKeys:
    """Returns the partial sums over some rows."""
    wide, exact, plain, errors = work.wide, work.exact, work.plain, work.errors
    weight, least = errors.weight[..., None], squared(errors.least)[..., None]
    q, dout, squares = squared(wide.q), squared(wide.dout), squared(exact.weights)
    # The errors of different rows' deltas are independent.
    of_product = (squared(errors.delta) + squared(errors.product))[..., None] * q
    dk_spread = squared(exact.slopes).mT @ (weight * q) + squares.mT @ of_product
    dv_spread = squared(exact.kept).mT @ (weight * dout)
    return OfKeys(
        dk=exact.slopes.mT @ wide.q,
        dv=exact.kept.mT @ wide.dout,
        plain_dk=plain.slopes.mT @ wide.q,
        plain_dv=plain.kept.mT @ wide.dout,
        dk_spread=dk_spread + (least * q).sum(-2, keepdim=True),
        dv_spread=dv_spread + errors.least_weight**2 * dout.sum(-2, keepdim=True),
        queries=work.queries,
        steps=errors.steps.amax(1, keepdim=True),
    )


def added(one: OfKeys, other: OfKeys) -> OfKeys:
    """Returns the sum of the partial sums of two slices of rows."""
    sums = OfKeys(*map(torch.add, one, other))
    return sums._replace(steps=larger(one.steps, other.steps))


def key_gradients(problem: Problem, scale: float, sums: OfKeys) -> tuple[Gradient, Gradient]:
    """Returns dk and dv of some pairs from the sums over all their query rows."""
    steps = sums.steps.expand(sums.queries.shape)

    def gradient(exact: Tensor, plain: Tensor, typical: Tensor) -> Gradient:
        plain_error = largest(once(plain, problem) - exact)
        figures = RowFigures(plain_error, typical, largest(exact), sums.queries, steps)
        return Gradient(exact, allowed_key_error(figures, problem))

    dk_typical, dv_typical = (spread.amax(-1).sqrt() for spread in (sums.dk_spread, sums.dv_spread))
    dk = gradient(scale * sums.dk, scale * sums.plain_dk, scale * dk_typical)
    return dk, gradient(sums.dv, sums.plain_dv, dv_typical)
