"""The gate of the backward pass: how large an error a row of a gradient may have.

A row of dq belongs to a query, rows of dk and dv to a key. As in `flashtune.verification.tolerance` a
row's error, the largest over its elements, may be

    factor · max(plain, typical) + rounding

where the factor is 2, and 3 for dk and dv in bf16: FlashAttention accepts gradients within two to three
times the error of the same computation in plain low precision (Dao et al., their tests).

With P = exp(S - lse), dP = dO·Vᵀ, delta = rowsum(dO·O) and dS = P·(dP - delta), the gradients are
dq = scale·dS·K, dk = scale·dSᵀ·Q and dv = Pᵀ·dO.

`plain`     the error of these on this very row where P is rounded to the inputs' type before it meets dO,
            delta is made of the output that the forward pass rounded, dS is rounded before it meets K and Q,
            scores, weights and products are float32, and results are rounded once.
`typical`   what the same roundings make where nothing cancels. u is the unit roundoff of the inputs' type, f
            that of float32:
            - each dS (for dv each P) is rounded once, independently: u·sqrt(Σ dS²k²);
            - each weight is relatively off by f times the steps that its score takes, its row's log-sum-exp
              among them, and each sum of n terms by f·sqrt(n), in whatever order blocks are added up: that is
              in quadrature with u. An accumulation by atomics is such a sum, of fewer terms;
            - each dP is off by f times its steps, in proportion to |dO|·max|V|: times P it is an error of dS;
            - delta is off by u·sqrt(Σ dO²O²), as each element of the output was rounded. That error
              belongs to a whole row of dS: in dq it meets |Σ P·k|, and nothing averages it away; in dk
              the rows are independent, Σ P²q² times its square;
            - 16-bit floats have a smallest number, half of which each dS and P may be off by;
            - and float32 arithmetic may take what lies under its smallest normal number, 2^-126, for zero, as
              the exponentials of GPUs do. A weight that is lost so is an error of |dP - delta| in dS. Weights
              so small are common beside steep slopes or biases, and bfloat16 has numbers for them.
`rounding`  half a unit in the last place of the row's largest element, since results are rounded once; what
            all weights of a row may be off by alike (f times their steps); and, where matrix units add up
            16-bit products, what they cut off: up to two roundoffs of the sum at each step of 16
            products and half of that on average, always towards zero.

A bias's gradient is dS itself, rounded once; that of a slope is -Σ dS·distance in float32, and
all pairs of a row share the error of their delta.

Caps multiply dS by 1 - tanh²: its error is that of a hyperbolic tangent, in proportion to P·|dP - delta|.

Rows that meet no pair at all have no error: they are zero, exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from flashtune.core.problem import Dtype, Problem
from flashtune.verification.tolerance import (
    ADDING_STEPS,
    FLOAT32_ROUNDOFF,
    FUNCTION_STEPS,
    LEAST_NORMAL,
    LEAST_ROUNDING,
    LEAST_SCORE_STEPS,
    PRODUCTS_OF_A_STEP,
    ROUNDOFFS_OF_A_STEP,
    UNIT_ROUNDOFF,
    larger,
    squared,
)

if TYPE_CHECKING:
    from torch import Tensor

FACTOR = 2.0
BF16_KEYS_FACTOR = 3.0
# Roundoffs of a log-sum-exp's magnitude: it is rounded, made powers of two, and taken off.
LSE_STEPS = 4.0
# Of what a row of a 16-bit gradient may be off by, the part that the order of float32 sums may change.
ORDER_SHARE = 2.0**-6


class QueryErrors(NamedTuple):
    """What the figures of each query row are off by, [..., rows] in float64.

    Attributes:
        steps: Roundoffs of float32 that its weights may be off by, relative to themselves.
        weight: What each weight, or dS, is off by once it is rounded, relative to itself; squared.
        product: What each dP is off by.
        delta: What its delta is off by.
        least: What each dS may be off by, however small it is.
        least_weight: Likewise each P as it meets dO; the same for all rows.
    """

    steps: Tensor
    weight: Tensor
    product: Tensor
    delta: Tensor
    least: Tensor
    least_weight: float


class Sizes(NamedTuple):
    """Magnitudes of each query row that its errors are in proportion to, [..., rows] in float64.

    Attributes:
        score: Largest score that it could have with any key, by Cauchy-Schwarz.
        lse: Magnitude of its log-sum-exp, 0 where that is -inf.
        added: Largest magnitude of what was added to a score that has weight; None where nothing was.
        product: Largest dP that it could have with any value, likewise.
        delta: Root of the sum of squares of dO·O.
        change: Largest |dP - delta| that it could have.
        kept: What dropout multiplies weights by that stay; 1 where none are dropped.
    """

    score: Tensor
    lse: Tensor
    added: Tensor | None
    product: Tensor
    delta: Tensor
    change: Tensor
    kept: float


def query_errors(problem: Problem, sizes: Sizes, softcap: float) -> QueryErrors:
    """What the figures of query rows are off by, from first principles.

    Args:
        problem: Types and widths.
        sizes: Magnitudes.
        softcap: The cap of scores, 0 where there is none.
    """
    roundoff = UNIT_ROUNDOFF[problem.dtype]
    steps = FUNCTION_STEPS + _product_steps(problem.head_dim) * sizes.score + LSE_STEPS * sizes.lse
    if sizes.added is not None:
        steps = steps + ADDING_STEPS * sizes.added
    product_steps = _product_steps(problem.value_head_dim)
    if softcap:
        # A score's error changes its weight and its slope 1 - tanh², by no more than twice as much.
        steps = 2.0 * (steps + FUNCTION_STEPS * softcap)
        product_steps += 4.0 * FUNCTION_STEPS
    longest = max(problem.seqlen_kv, problem.group_size * problem.seqlen_q)
    float32_part = FLOAT32_ROUNDOFF * (steps + longest**0.5)
    return QueryErrors(
        steps=steps,
        weight=roundoff**2 + squared(float32_part),
        product=FLOAT32_ROUNDOFF * product_steps * sizes.product,
        delta=(roundoff + FLOAT32_ROUNDOFF * product_steps) * sizes.delta,
        least=LEAST_ROUNDING[problem.dtype] + LEAST_NORMAL * (1.0 + sizes.change),
        least_weight=(LEAST_ROUNDING[problem.dtype] + LEAST_NORMAL) * sizes.kept,
    )


def _product_steps(width: int) -> float:
    """Roundoffs of the largest product of vectors so wide that such a product may be off by."""
    return max(LEAST_SCORE_STEPS, width / PRODUCTS_OF_A_STEP * ROUNDOFFS_OF_A_STEP)


class Gradient(NamedTuple):
    """What a right kernel writes of one gradient, and how far it may be off; in float64.

    Attributes:
        exact: [..., rows, columns].
        allowed: [..., rows].
    """

    exact: Tensor
    allowed: Tensor


class RowFigures(NamedTuple):
    """What decides on a gradient's rows, [..., rows] each in float64.

    Attributes:
        plain: Error of the plain computation.
        typical: Error that its roundings make when nothing cancels.
        largest: Largest magnitude of the exact row.
        terms: How many pairs of a query and a key it is a sum over.
        steps: Roundoffs of float32 that all weights may be off by alike.
    """

    plain: Tensor
    typical: Tensor
    largest: Tensor
    terms: Tensor
    steps: Tensor


def allowed_query_error(figures: RowFigures, problem: Problem) -> Tensor:
    """The largest error that each row of dq, or of a bias's gradient, may have."""
    return _allowed(figures, problem, FACTOR, problem.dtype)


def allowed_key_error(figures: RowFigures, problem: Problem) -> Tensor:
    """The largest error that each row of dk or of dv may have."""
    factor = BF16_KEYS_FACTOR if problem.dtype is Dtype.BF16 else FACTOR
    return _allowed(figures, problem, factor, problem.dtype)


def allowed_slope_error(figures: RowFigures, problem: Problem) -> Tensor:
    """The largest error that the gradient of each slope may have: it is float32 and stays so."""
    return _allowed(figures, problem, FACTOR, Dtype.FP32)


def _allowed(figures: RowFigures, problem: Problem, factor: float, stored: Dtype) -> Tensor:
    plain, typical, largest, terms, steps = figures
    adding = terms.sqrt()
    if problem.dtype is not Dtype.FP32:
        adding = adding + terms * (ROUNDOFFS_OF_A_STEP / 2 / PRODUCTS_OF_A_STEP)
    relative = UNIT_ROUNDOFF[stored] + FLOAT32_ROUNDOFF * (4.0 + steps + adding)
    least = LEAST_ROUNDING[stored] + LEAST_NORMAL
    allowed = factor * larger(plain, typical) + largest * relative + least
    return allowed * terms.bool()


def beyond_order(first: Tensor, later: Tensor, allowed: Tensor, stored: torch.dtype) -> Tensor:
    """By how much two launches are farther apart than sums in another order take them: a scalar, not above 0.

    An element may be rounded to the number beside. What float32 sums differ by before is a small share
    of what a row may be off by, most of which is roundings of 16 bits that all launches make alike.

    Args:
        first: Rows as one launch wrote them, [..., rows, columns].
        later: As another did.
        allowed: The largest error of each row, [..., rows] in float64.
        stored: The type of 16 bits in which they were written.
    """
    numbers = torch.finfo(stored)
    one = first.double()
    room = numbers.eps * (one.abs() + numbers.tiny) + ORDER_SHARE * allowed[..., None]
    return ((one - later.double()).abs() - room).amax()
