"""The gate: how large a row's error may be, and how large it is.

A kernel is right when every row of its output is about as near to the float64 reference as the same
computation done plainly in the kernel's precision. Four figures decide for a row, each a maximum
over the row's elements:

`plain`     the error of the plain computation on this very row. Alone it would refuse right
            kernels, since on some rows every rounding of the plain computation happens to cancel.
`typical`   the error that rounding makes on such a row when nothing cancels, from first
            principles: each weight p of a value v is rounded once, independently, so that the sum
            is off by about u·sqrt(Σ p²v²), where u is the unit roundoff of the weights. Float32
            steps (scores, exponentials, sums) add the same with their own, much smaller, unit.
`rounding`  half a unit in the last place of the row's largest element: output may be rounded once. Weights
            below the smallest normal number of float32 may be zero.
`lost`      what matrix units cut off that keep fewer bits of a sum than float32 has. Hopper's do so with
            8-bit inputs, and with these alone; the plain computation takes its products exactly.

Biases, slopes and caps are float32 steps like those of scores, in proportion to what they add. Keys and
values of a quantised cache may be rounded once to the queries' type after they were scaled: a value's
rounding is like its weight's, and that of a key's elements moves its score by about u·scale·sqrt(Σ q²k²),
independently of other keys' scores. All three add up in quadrature.

A row's error may be 2·(max(plain, typical) + lost) + rounding. The yardstick belongs to the row: rows
that average many keys have small errors, and are not excused by the large ones of rows that see few. A
mistake of one key in a thousand stays under no such bound where that key is a needle. Rows with
nothing to attend to have no error at all: they are zero, and their log-sum-exp is -inf.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from flashtune.core.problem import Dtype, Problem

if TYPE_CHECKING:
    from torch import Tensor

# Largest relative error of rounding once to nearest.
UNIT_ROUNDOFF = {Dtype.BF16: 2.0**-8, Dtype.FP16: 2.0**-11, Dtype.FP32: 2.0**-24, Dtype.E4M3: 2.0**-4}
FLOAT32_ROUNDOFF = UNIT_ROUNDOFF[Dtype.FP32]
# Half of the smallest positive number, for rows whose largest element is next to nothing.
LEAST_ROUNDING = {Dtype.BF16: 2.0**-134, Dtype.FP16: 2.0**-25, Dtype.FP32: 2.0**-150}
# Float32's smallest normal number: smaller ones may become zero.
LEAST_NORMAL = 2.0**-126
# A weight that becomes zero takes a value with it, and the values of a check are smaller than this.
LARGEST_VALUE = 2.0**12
# Weights lie between 0 and this when they are rounded: e4m3 has no small numbers to spare, and is used up
# to the largest power of two that it holds, as FlashAttention-3 does. Larger types are used up to 1.
WEIGHT_RANGE = {Dtype.BF16: 1.0, Dtype.FP16: 1.0, Dtype.FP32: 1.0, Dtype.E4M3: 256.0}

# Hopper's matrix units keep 13 bits behind the leading one of a sum of 8-bit products and cut the rest
# off, at every instruction of 32 products. The DeepSeek-V3 report (2024, section 3.3.2) speaks of about 14
# bits and finds errors of nearly 2 % in sums of 4096 products; "Some Matrix Multiplication Engines Are Not
# As Accurate As We Thought" (PyTorch's blog, 2025) finds 13 behind the leading one in an H100.
TRUNCATED_UNIT = 2.0**-13
PRODUCTS_AT_ONCE = 32
# Matrix units truncate as they add up a score's products: by up to a unit in the last place, which is two
# roundoffs, for each step of 16 products, with one sign. Other units round in at least as many steps as
# these. Measured in roundoffs of the largest score that the row could have: right kernels of head dim 256
# reached 17 in fp16 on an H200, where all products of a row had one sign.
PRODUCTS_OF_A_STEP = 16
ROUNDOFFS_OF_A_STEP = 2.0
LEAST_SCORE_STEPS = 16.0
# Roundoffs of an exponential, a division and a logarithm as the GPU approximates them; and, in proportion to
# the cap, of a hyperbolic tangent that is made of these.
FUNCTION_STEPS = 32.0
# For minus infinity where results are compared: a float64 that is no float32.
FAR = -1e200
# Keys of less weight than this, relative to the row's largest, decide nothing.
LEAST_WEIGHT = 2.0**-30
# What is added to a score: a product, its unit made powers of two, the sum, and the maximum taken off.
ADDING_STEPS = 4.0


class RowScale(NamedTuple):
    """What rounding errors of a row are proportional to; each is [heads, rows] in float64.

    Attributes:
        spread: sqrt(Σ p²v²), at the row's largest column.
        largest: Largest magnitude of the row's exact output.
        score: Largest score that the row's query could have with any key, by Cauchy-Schwarz.
        keys: How many keys the row sees.
        lse: Magnitude of the exact log-sum-exp, 0 where it is -inf.
        added: Largest magnitude of what was added to a score that has weight; None where nothing was.
        softcap: The cap of scores, 0 where there is none.
        products: Of a quantised cache: scale · sqrt(Σ q²k²), at the row's largest key.
        focus: sqrt(Σ p²) there.
    """

    spread: Tensor
    largest: Tensor
    score: Tensor
    keys: Tensor
    lse: Tensor
    added: Tensor | None = None
    softcap: float = 0.0
    products: Tensor | None = None
    focus: Tensor | None = None


def allowed_error(plain: Tensor, scale: RowScale, problem: Problem) -> Tensor:
    """The largest error that each row's output may have: [heads, rows] in float64."""
    steps = FUNCTION_STEPS + _score_steps(problem) * scale.score + scale.keys.sqrt() + _laid_steps(scale)
    typical = scale.spread * (_weight_roundoff(scale, problem) + FLOAT32_ROUNDOFF * steps)
    # The weights' sum is in float32 as well, and its error is common to the row.
    summing = FLOAT32_ROUNDOFF * (4.0 + scale.keys.sqrt())
    # If a sink takes nearly all weight, the other weights of a row may all lie below the normal numbers.
    least = LEAST_ROUNDING[problem.out_dtype] + LEAST_NORMAL * LARGEST_VALUE
    rounding = scale.largest * (UNIT_ROUNDOFF[problem.out_dtype] + summing) + least
    if problem.dtype.is_quantized:
        # A weight is off as its score is, less what all scores of the row are off by.
        typical += scale.spread * scale.score * TRUNCATED_UNIT / 2 * problem.head_dim / PRODUCTS_AT_ONCE
        # Partial sums are about as large as the row's result, or as its spread where that is next to zero.
        rounding += 2.0 * (scale.largest + scale.spread) * _lost(scale.keys)
    return (2.0 * larger(plain, typical) + rounding) * scale.keys.bool()


def allowed_lse_error(plain: Tensor, scale: RowScale, problem: Problem) -> Tensor:
    """The largest error of each row's log-sum-exp, which is float32: [heads, rows] in float64."""
    steps = FUNCTION_STEPS + _score_steps(problem) * scale.score + scale.keys.sqrt() + 4.0 * scale.lse
    allowed = 2.0 * plain + FLOAT32_ROUNDOFF * (steps + _laid_steps(scale))
    if scale.products is not None and scale.focus is not None:
        allowed += 2.0 * UNIT_ROUNDOFF[problem.dtype] * scale.products * scale.focus
    if problem.dtype.is_quantized:
        allowed += 2.0 * scale.score * _lost(torch.tensor(float(problem.head_dim)))
    return allowed


def _score_steps(problem: Problem) -> float:
    """Roundoffs of the largest score that a score may be off by."""
    return max(LEAST_SCORE_STEPS, problem.head_dim / PRODUCTS_OF_A_STEP * ROUNDOFFS_OF_A_STEP)


def _laid_steps(scale: RowScale) -> Tensor | float:
    """Roundoffs that a score is off by for what is laid over it."""
    added = 0.0 if scale.added is None else ADDING_STEPS * scale.added
    return added + FUNCTION_STEPS * scale.softcap


def _weight_roundoff(scale: RowScale, problem: Problem) -> Tensor | float:
    """What a weight times its value is off by, relative to itself, where each step rounds once."""
    roundoff = UNIT_ROUNDOFF[problem.dtype]
    if scale.products is None:
        return roundoff
    # The weight's own rounding, the value's, and what the key's did to the score.
    return roundoff * (2.0 + scale.products * scale.products).sqrt()


def _lost(products: Tensor) -> Tensor:
    """What a sum of so many products loses on average, relative to the sums on the way.

    Each instruction cuts half a unit off the running sum, always towards zero. Each product loses as
    much when it is aligned with the sum, but with a sign of its own.
    """
    return TRUNCATED_UNIT / 2 * (products / PRODUCTS_AT_ONCE + products.sqrt())


def worst_ratio(result: Tensor, exact: Tensor, allowed: Tensor) -> Tensor:
    """The largest error over what is allowed, a scalar; NaN or infinite where anything is not finite.

    Args:
        result: What a kernel wrote, [heads, rows, columns].
        exact: The reference, alike, in float64; -inf where the result must be -inf.
        allowed: [heads, rows] in float64; 0 where the result must be exact.
    """
    error = (_far(result.double()) - _far(exact)).abs().amax(-1)
    # 0 / 0 would be NaN, and is right.
    return (error * inverse(allowed + 1e-300)).amax()


def _far(tensor: Tensor) -> Tensor:
    """Minus infinity, of which differences would be NaN, as a number that no kernel can write."""
    return tensor.nan_to_num(nan=math.nan, posinf=math.inf, neginf=FAR)


def heaviest(added: Tensor, weights: Tensor) -> Tensor:
    """The largest of what was added to scores of each row whose keys have weight, [heads, rows].

    Args:
        added: Magnitudes, [heads, rows, keys].
        weights: Alike, relative to a number that none exceeds by much.
    """
    # What is below one is cut off by a cast: comparing would load kernels of its own.
    return (added * (weights * (1 / LEAST_WEIGHT)).long().bool()).amax(-1)


def squared(tensor: Tensor) -> Tensor:
    """Its square, by a kernel that is in use anyway."""
    return tensor * tensor


def norm(vectors: Tensor) -> Tensor:
    """Euclidean, of the last dimension: by kernels that are in use anyway."""
    return (vectors * vectors).sum(-1).sqrt()


def larger(one: Tensor, other: Tensor) -> Tensor:
    """The larger of two at each place, NaN where either is; by kernels that are in use anyway."""
    both = one.new_empty(2, *one.shape)
    both[0], both[1] = one, other
    return both.amax(0)


def inverse(positive: Tensor) -> Tensor:
    """One over positive numbers, but for a roundoff or two; by kernels that are in use anyway."""
    root = positive.rsqrt()
    return root * root
