"""The tolerance of the backward pass: the largest error that a row of a gradient may have.

A row of dq belongs to a query, a row of dk or dv to a key. The error of a row is the largest of its elements.
As in `flashtune.verification.tolerance`, it may be

    factor · max(plain, typical) + rounding

The factor is 2, and 3 for dk and dv in bf16. FlashAttention's tests accept gradients within two to three
times the error of a low-precision reference (Dao et al.).

The gradients are

    P = exp(S - lse)    dP = dO·Vᵀ    delta = rowsum(dO·O)    dS = P·(dP - delta)
    dq = scale·dS·K     dk = scale·dSᵀ·Q                      dv = Pᵀ·dO

`plain`     The error of the low-precision reference in this row. It rounds P to the inputs' dtype before the
            product with dO, and dS before the products with K and Q. It computes dS from P in 16 bits with
            the range of float32 in three cases: with a softcap, with a score function that scales scores, and
            with head dims above 128. Kernels hold no more bits there until dP is known. It computes delta
            from the rounded output. Scores, probabilities and products are float32 otherwise, and results are
            rounded once.
`typical`   The error of the same roundings if nothing cancels. u is the unit roundoff of the inputs' dtype, f
            that of float32:
            - Each dS (each P for dv) is rounded once, independently: u·sqrt(Σ dS²k²).
            - Each probability has a relative error of f times the steps of its score, including those of the
              log-sum-exp. A sum of n terms adds f·sqrt(n), in any order of the blocks. Both are in quadrature
              with u. An accumulation by atomics is such a sum, of fewer terms.
            - Each dP has an error of f times its steps, in proportion to |dO|·max|V|. Times P it is an error
              of dS.
            - delta has an error of u·sqrt(Σ dO²O²), because each element of the output was rounded. It is
              common to a row of dS. In dq it is multiplied by |Σ P·k|, without averaging. In dk the rows are
              independent, so its square is multiplied by Σ P²q².
            - Each dS and P may have an error of half the smallest positive 16-bit number.
            - Float32 arithmetic may flush numbers below the smallest normal one, 2^-126, to zero, as the
              exponentials of GPUs do. A probability that is flushed is an error of |dP - delta| in dS. Such
              small probabilities are common with steep slopes or biases, and bfloat16 can represent them.
`rounding`  Half a unit in the last place of the row's largest element, because results are rounded once. Also
            the common relative error of all probabilities of a row (f times their steps). With 16-bit inputs,
            also the truncation of Tensor Cores: up to two roundoffs of the sum at each step of 16 products,
            and half of that on average, towards zero.

The gradient of a bias is dS itself, rounded once. The gradient of a slope is -Σ dS·distance in float32, and
all pairs of a row share the error of delta. The gradient of a sink is -Σ exp(sink - lse)·delta in float32.

A derivative of a score function that is larger than 1 multiplies the errors of dP and delta too.

A softcap multiplies dS by 1 - tanh². Its error is that of a hyperbolic tangent, in proportion to
P·|dP - delta|.

Rows without any visible pair must be exactly zero.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core.expressions.derivative import derivatives
from flashtune.core.problem import Dtype, Problem
from flashtune.verification.tolerance import (
    ADDING_STEPS,
    FLOAT32_ROUNDOFF,
    FUNCTION_STEPS,
    MIN_NORMAL,
    MIN_ROUNDING,
    PRODUCTS_OF_A_STEP,
    ROUNDOFFS_OF_A_STEP,
    UNIT_ROUNDOFF,
    larger,
    product_steps,
    squared,
)

FACTOR = 2.0
BF16_KEYS_FACTOR = 3.0
# Roundoffs of a log-sum-exp's magnitude: it is rounded, converted to log2 units and subtracted.
LSE_STEPS = 4.0
# Problems with head dims above this one have P in 16 bits when dS is computed.
MAX_FLOAT32_P_DIM = 128
# Factor of P in 16 bits. Products with P below 2^-26 lose bits of fp16.
P_SCALE = 2.0**12
# The share of a 16-bit row's tolerance that the order of float32 sums may change.
ORDER_SHARE = 2.0**-6


class QueryErrors(NamedTuple):
    """Errors of the quantities of each query row, [..., rows] in float64."""

    steps: Tensor  # Relative error of its probabilities in float32 roundoffs.
    weight: Tensor  # Square of the relative error of each rounded probability, or dS.
    product: Tensor  # Error of each dP.
    delta: Tensor  # Error of delta.
    least: Tensor  # Absolute error that each dS may have, however small it is.
    # Absolute error that each P may have in the product with dO; the same for all rows.
    least_weight: float


class Sizes(NamedTuple):
    """Magnitudes that the errors of each query row are proportional to, [..., rows] in float64."""

    score: Tensor  # Upper bound of its scores, by Cauchy-Schwarz.
    lse: Tensor  # Magnitude of its log-sum-exp, 0 if it is -inf.
    # Largest magnitude of a bias or ALiBi term of a key with weight. None without such terms.
    added: Tensor | None
    product: Tensor  # Upper bound of its dP, by Cauchy-Schwarz.
    delta: Tensor  # Root of the sum of squares of dO·O.
    change: Tensor  # Upper bound of |dP - delta|.
    kept: float  # Dropout factor of probabilities that are not dropped, 1 without dropout.


def query_errors(problem: Problem, sizes: Sizes, softcap: float) -> QueryErrors:
    """Returns the errors of the quantities of query rows, from first principles."""
    roundoff = UNIT_ROUNDOFF[problem.dtype]
    of_score = product_steps(problem.dtype, problem.head_dim) * sizes.score
    steps = FUNCTION_STEPS + of_score + LSE_STEPS * sizes.lse
    if sizes.added is not None:
        steps = steps + ADDING_STEPS * sizes.added
    steps_of_product = product_steps(problem.dtype, problem.value_head_dim)
    if softcap:
        # A score's error changes its probability and the factor 1 - tanh², together by at most twice as much.
        steps = 2.0 * (steps + FUNCTION_STEPS * softcap)
        steps_of_product += 4.0 * FUNCTION_STEPS
    longest = max(problem.seqlen_kv, problem.group_size * problem.seqlen_q)
    float32_part = FLOAT32_ROUNDOFF * (steps + longest**0.5)
    return QueryErrors(
        steps=steps,
        weight=roundoff**2 + squared(float32_part),
        product=FLOAT32_ROUNDOFF * steps_of_product * sizes.product,
        delta=(roundoff + FLOAT32_ROUNDOFF * steps_of_product) * sizes.delta,
        least=MIN_ROUNDING[problem.dtype] + MIN_NORMAL * (1.0 + sizes.change),
        least_weight=(MIN_ROUNDING[problem.dtype] + MIN_NORMAL) * sizes.kept,
    )


def keeps_low_p(problem: Problem) -> bool:
    """Returns whether kernels may compute dS from P in the inputs' dtype."""
    widest = max(problem.head_dim, problem.value_head_dim)
    is_scaled = problem.softcap or derivatives(problem.functions).slope >= 0
    return not problem.dtype.is_float32 and (is_scaled or widest > MAX_FLOAT32_P_DIM)


class Gradient(NamedTuple):
    """The reference of one gradient and its tolerances, in float64."""

    exact: Tensor  # The gradient, [..., rows, columns].
    allowed: Tensor  # Tolerances, [..., rows].


class RowFigures(NamedTuple):
    """The figures that determine the tolerance of a gradient's rows, [..., rows] each in float64."""

    plain: Tensor  # Error of the low-precision reference.
    typical: Tensor  # Error of its roundings if nothing cancels.
    largest: Tensor  # Largest magnitude of the exact row.
    terms: Tensor  # Number of pairs of a query and a key in the row's sum.
    steps: Tensor  # Common relative error of all probabilities in float32 roundoffs.


def allowed_error(
    figures: RowFigures, problem: Problem, *, factor: float = FACTOR, stored: Dtype | None = None
) -> Tensor:
    """Returns the tolerance of each row of a gradient. It is stored in the inputs' dtype, or in `stored`."""
    plain, typical, largest, terms, steps = figures
    stored = stored or problem.dtype.stored
    adding = terms.sqrt()
    if not problem.dtype.is_float32:
        adding = adding + terms * (ROUNDOFFS_OF_A_STEP / 2 / PRODUCTS_OF_A_STEP)
    relative = UNIT_ROUNDOFF[stored] + FLOAT32_ROUNDOFF * (4.0 + steps + adding)
    least = MIN_ROUNDING[stored] + MIN_NORMAL
    allowed = factor * larger(plain, typical) + largest * relative + least
    return allowed * terms.bool()


def beyond_order(first: Tensor, later: Tensor, allowed: Tensor, stored: torch.dtype) -> Tensor:
    """Returns by how much the difference of two launches exceeds that of another order of sums, a scalar.

    It must not be above 0. Another order of float32 sums may round an element to the neighbouring number. Its
    error before rounding is a small share of the row's tolerance. Most of the tolerance is for 16-bit
    rounding errors, which all launches share. `first` and `later` are rows of two launches, [..., rows,
    columns]. `allowed` are the tolerances of rows, [..., rows] in float64. `stored` is the 16-bit dtype of
    the rows.
    """
    numbers = torch.finfo(stored)
    wide = first.double()
    room = numbers.eps * (wide.abs() + numbers.tiny) + ORDER_SHARE * allowed[..., None]
    return ((wide - later.double()).abs() - room).amax()
