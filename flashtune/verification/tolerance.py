"""The tolerance of the forward pass: the largest error that a row may have, and the error of a result.

A kernel is correct if each row of its output is about as close to the float64 reference as a low-precision
reference is. Five figures determine the tolerance of a row. Each is a maximum over the row's elements:

`plain`     The error of the low-precision reference in this row. Alone it would reject correct kernels,
            because in some rows its rounding errors cancel.
`typical`   The rounding error of such a row if nothing cancels. Each probability p of a value v is rounded
            once, independently. The error of the sum is then about u·sqrt(Σ p²v²), where u is the unit
            roundoff of the probabilities. Float32 steps (scores, exponentials, sums) add a similar term
            with their own, much smaller, unit roundoff.
`rounding`  Half a unit in the last place of the row's largest element, because the output may be rounded
            once. Probabilities below the smallest normal number of float32 may be zero.
`lost`      The truncation error of Tensor Cores that keep fewer bits of a sum than float32 has. Hopper's do
            so with 8-bit inputs only. The low-precision reference computes its products exactly.
`common`    The error of the row's largest element if all probabilities are rounded alike. Nearly equal
            probabilities are, by an amount that depends on the maximum to which a kernel relates them.
            Only 8-bit probabilities are rounded more than the output, so it only counts for these.

Biases, slopes and caps are float32 steps like those of scores, in proportion to their size. Keys and values
of a quantised cache may be rounded once to the queries' dtype after scaling. The rounding of a value has the
same effect as that of its probability. The rounding of a key changes its score by about
u·scale·sqrt(Σ q²k²), independently of other scores. These three errors add up in quadrature.

The tolerance of a row is 2·(max(plain, typical) + lost) + rounding, with `common` added to the first term in
quadrature. It is specific to the row: rows that average many keys have small errors, and rows with few keys
have large ones. One wrong key in a thousand exceeds it if that key is a needle. Rows without visible keys
must be exact: zero, with a log-sum-exp of -inf.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core.problem import Dtype, Problem

# Largest relative error of one rounding to nearest.
UNIT_ROUNDOFF = {
    Dtype.BF16: 2.0**-8,
    Dtype.FP16: 2.0**-11,
    Dtype.FP32: 2.0**-24,
    Dtype.TF32: 2.0**-11,
    Dtype.E4M3: 2.0**-4,
}
FLOAT32_ROUNDOFF = UNIT_ROUNDOFF[Dtype.FP32]
# Half of the smallest positive number, for rows whose largest element is near zero.
MIN_ROUNDING = {Dtype.BF16: 2.0**-134, Dtype.FP16: 2.0**-25, Dtype.FP32: 2.0**-150, Dtype.TF32: 2.0**-150}
# The smallest normal number of float32. Smaller numbers may become zero.
MIN_NORMAL = 2.0**-126
# A probability that becomes zero loses the contribution of its value. Values of a check are below this bound.
LARGEST_VALUE = 2.0**12
# Unnormalised probabilities are between 0 and this value when they are rounded. e4m3 has few small numbers,
# so its range is used up to the largest power of two, as in FlashAttention-3. Larger dtypes are used up to 1.
WEIGHT_RANGE = {Dtype.BF16: 1.0, Dtype.FP16: 1.0, Dtype.FP32: 1.0, Dtype.TF32: 1.0, Dtype.E4M3: 256.0}

# Hopper's Tensor Cores keep 13 bits after the leading bit of a sum of 8-bit products. They truncate the rest
# at every instruction of 32 products. The DeepSeek-V3 report (2024, section 3.3.2) reports about 14 bits, and
# errors of nearly 2 % in sums of 4096 products. "Some Matrix Multiplication Engines Are Not As Accurate As
# We Thought" (PyTorch blog, 2025) reports 13 bits after the leading bit on an H100.
TRUNCATED_UNIT = 2.0**-13
PRODUCTS_AT_ONCE = 32
# Tensor Cores truncate when they sum the products of a score: by up to a unit in the last place, which is two
# roundoffs, for each step of 16 products, always with the same sign. Other units round in at least as many
# steps. Correct kernels of head dim 256 reached 17 roundoffs of the row's largest possible score, in fp16 on
# an H200. All products of a row had the same sign.
PRODUCTS_OF_A_STEP = 16
ROUNDOFFS_OF_A_STEP = 2.0
MIN_SCORE_STEPS = 16.0
# The sum of the squares of a product's terms, relative to the square of the largest product over its width:
# that of a normally distributed vector with itself.
SQUARES_OF_TERMS = 3.0
# Roundoffs of the GPU's approximate exponential, division and logarithm. Also those of a hyperbolic tangent
# that is computed from these, in proportion to the softcap.
FUNCTION_STEPS = 32.0
# Replaces minus infinity when results are compared: a float64 outside the range of float32.
FAR = -1e200
# Keys whose probability is lower than this, relative to the row's largest, are ignored.
MIN_WEIGHT = 2.0**-30
# Roundings of an addition to a score: a product, the conversion to log2 units, the sum, the maximum's
# subtraction.
ADDING_STEPS = 4.0


class RowScale(NamedTuple):
    """Magnitudes that rounding errors of a row are proportional to, each [heads, rows] in float64."""

    spread: Tensor  # sqrt(Σ p²v²) of the column in which it is largest.
    largest: Tensor  # Largest magnitude of the row's exact output.
    score: Tensor  # Upper bound of the row's scores, by Cauchy-Schwarz.
    keys: Tensor  # Number of visible keys of the row.
    lse: Tensor  # Magnitude of the exact log-sum-exp, 0 if it is -inf.
    # Largest magnitude of a bias or ALiBi term of a key with weight. None without such terms.
    added: Tensor | None = None
    softcap: float = 0.0  # The softcap, 0 without one.
    # scale · sqrt(Σ q²k²) of the key where it is largest. Only for a quantised cache.
    products: Tensor | None = None
    focus: Tensor | None = None  # sqrt(Σ p²). Only for a quantised cache.


def allowed_error(plain: Tensor, scale: RowScale, problem: Problem) -> Tensor:
    """Returns the tolerance of each row's output, [heads, rows] in float64."""
    of_score = product_steps(problem.dtype, problem.head_dim) * scale.score
    steps = FUNCTION_STEPS + of_score + scale.keys.sqrt() + _addition_steps(scale)
    typical = scale.spread * (_weight_roundoff(scale, problem) + FLOAT32_ROUNDOFF * steps)
    # The sum of the weights is in float32 too, and its error affects the whole row.
    summing = FLOAT32_ROUNDOFF * (4.0 + scale.keys.sqrt())
    # If a sink takes nearly all the weight, all other weights of a row may be subnormal.
    least = MIN_ROUNDING[problem.out_dtype] + MIN_NORMAL * LARGEST_VALUE
    rounding = scale.largest * (UNIT_ROUNDOFF[problem.out_dtype] + summing) + least
    if problem.dtype.is_quantized:
        # The relative error of a weight is the error of its score, less the common error of the row's scores.
        typical += scale.spread * scale.score * TRUNCATED_UNIT / 2 * problem.head_dim / PRODUCTS_AT_ONCE
        # Partial sums are about as large as the row's result, or as its spread if the result is near zero.
        rounding += 2.0 * (scale.largest + scale.spread) * _lost(scale.keys)
    allowed = 2.0 * larger(plain, typical)
    if problem.dtype.is_quantized:
        common = UNIT_ROUNDOFF[problem.dtype] * scale.largest
        allowed = (allowed * allowed + common * common).sqrt()
    return (allowed + rounding) * scale.keys.bool()


def allowed_lse_error(plain: Tensor, scale: RowScale, problem: Problem) -> Tensor:
    """Returns the tolerance of each row's float32 log-sum-exp, [heads, rows] in float64."""
    of_score = product_steps(problem.dtype, problem.head_dim) * scale.score
    steps = FUNCTION_STEPS + of_score + scale.keys.sqrt() + 4.0 * scale.lse
    allowed = 2.0 * plain + FLOAT32_ROUNDOFF * (steps + _addition_steps(scale))
    if scale.products is not None and scale.focus is not None:
        allowed += 2.0 * UNIT_ROUNDOFF[problem.dtype] * scale.products * scale.focus
    if problem.dtype.is_quantized:
        allowed += 2.0 * scale.score * _lost(torch.tensor(float(problem.head_dim)))
    return allowed


def product_steps(dtype: Dtype, width: int) -> float:
    """Returns the error of a product of vectors of this width, in float32 roundoffs of the largest product.

    In tf32 both factors of each term may be rounded, independently. The squares of all terms have a sum of at
    most about 3 / width of the square of the largest product.
    """
    steps = max(MIN_SCORE_STEPS, width / PRODUCTS_OF_A_STEP * ROUNDOFFS_OF_A_STEP)
    if dtype is Dtype.TF32:
        steps += UNIT_ROUNDOFF[dtype] / FLOAT32_ROUNDOFF * math.sqrt(2 * SQUARES_OF_TERMS / width)
    return steps


def _addition_steps(scale: RowScale) -> Tensor | float:
    """Returns the error of a score from bias, ALiBi and softcap, in roundoffs."""
    added = 0.0 if scale.added is None else ADDING_STEPS * scale.added
    return added + FUNCTION_STEPS * scale.softcap


def _weight_roundoff(scale: RowScale, problem: Problem) -> Tensor | float:
    """Returns the relative error of a weight times its value if each step rounds once."""
    roundoff = UNIT_ROUNDOFF[problem.dtype]
    if scale.products is None:
        return roundoff
    # The roundings of the weight and of the value, and the effect of the key's rounding on the score.
    return roundoff * (2.0 + scale.products * scale.products).sqrt()


def _lost(products: Tensor) -> Tensor:
    """Returns the mean truncation error of a sum of so many products, relative to its partial sums.

    Each instruction truncates the running sum by half a unit, towards zero. Aligning a product with the sum
    truncates it by as much, with the sign of the product.
    """
    return TRUNCATED_UNIT / 2 * (products / PRODUCTS_AT_ONCE + products.sqrt())


def worst_ratio(result: Tensor, exact: Tensor, allowed: Tensor) -> Tensor:
    """Returns the largest ratio of error to tolerance, a scalar. NaN or infinite if a result is not finite.

    `result` is a kernel's output, [heads, rows, columns]. `exact` is the reference of the same shape in
    float64, -inf if the result must be -inf. `allowed` are tolerances, [heads, rows] in float64, 0 if the
    result must be exact.
    """
    error = (_far(result.double()) - _far(exact)).abs().amax(-1)
    # Avoids 0 / 0: an exact result with a tolerance of 0 is correct.
    return (error * inverse(allowed + 1e-300)).amax()


def _far(tensor: Tensor) -> Tensor:
    """Returns the tensor with -inf replaced by a number outside float32: differences of -inf would be NaN."""
    return tensor.nan_to_num(nan=math.nan, posinf=math.inf, neginf=FAR)


def heaviest(added: Tensor, weights: Tensor) -> Tensor:
    """Returns the largest magnitude that was added to a score of each row, [heads, rows].

    Keys without weight are ignored. `added` are magnitudes, [heads, rows, keys]. `weights` have the same
    shape and are relative to about the largest of the row.
    """
    # The cast makes numbers below one zero. A comparison would load another CUDA kernel.
    return (added * (weights * (1 / MIN_WEIGHT)).long().bool()).amax(-1)


def squared(tensor: Tensor) -> Tensor:
    """Returns the square of a tensor, without loading another CUDA kernel."""
    return tensor * tensor


def norm(vectors: Tensor) -> Tensor:
    """Returns the Euclidean norm over the last dimension, without loading another CUDA kernel."""
    return (vectors * vectors).sum(-1).sqrt()


def larger(first: Tensor, second: Tensor) -> Tensor:
    """Returns the elementwise maximum, NaN if either is, without loading another CUDA kernel."""
    both = first.new_empty(2, *first.shape)
    both[0], both[1] = first, second
    return both.amax(0)


def inverse(positive: Tensor) -> Tensor:
    """Returns the inverse of positive numbers up to two roundoffs, without loading another CUDA kernel."""
    root = positive.rsqrt()
    return root * root
