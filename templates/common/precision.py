"""The precision of float32 products, an axis of portable families."""

import enum

import msgspec

from flashtune.core.config import Axis
from flashtune.core.problem import Dtype, Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.sram import widest_tile


class InputPrecision(enum.StrEnum):
    """How products of float32 tiles are computed.

    `IEEE` is ordinary float32 arithmetic. The others are products of Tensor Cores: one or three of numbers
    that are rounded to tf32, or three or six of parts in bf16. `TF32X3` and `BF16X6` are as precise as
    float32. `TF32` and `BF16X3` are for problems of type `tf32`.
    """

    IEEE = "ieee"
    TF32X3 = "tf32x3"
    TF32 = "tf32"
    BF16X3 = "bf16x3"
    BF16X6 = "bf16x6"


# Rate of float32 products in the forward pass of portable kernels up to head dim 128, relative to the peak
# rate of 16-bit products. All rates here were measured on an H200 with the fastest of a few tiles.
RATE = {
    InputPrecision.IEEE: 1 / 1000,
    InputPrecision.TF32X3: 1 / 22,
    InputPrecision.TF32: 1 / 8,
    InputPrecision.BF16X3: 1 / 8.5,
    InputPrecision.BF16X6: 1 / 15,
}
# Rates relative to these, by the width of the head dim: wide tiles spill registers.
FORWARD_RATE = {64: 1.0, 128: 1.0, 256: 0.5}
BACKWARD_RATE = {64: 0.9, 128: 0.66, 256: 0.13}


def input_precisions(problem: Problem, target: Target) -> tuple[InputPrecision, ...]:
    """Returns the precisions to search. The default config has the last."""
    if not problem.dtype.is_float32 or not target.is_nvidia:
        return (InputPrecision.IEEE,)
    if problem.dtype is Dtype.TF32:
        return (InputPrecision.BF16X3,)
    return InputPrecision.TF32X3, InputPrecision.BF16X6


def fixed_precision(problem: Problem) -> InputPrecision:
    """Returns the precision of families without the axis."""
    return InputPrecision.BF16X3 if problem.dtype is Dtype.TF32 else InputPrecision.BF16X6


def precision_axis(problem: Problem, target: Target) -> Axis:
    """Returns the axis. It has several values for float32 on NVIDIA's GPUs only."""
    return Axis("input_precision", input_precisions(problem, target), False)


def at_rate(problem: Problem, precision: InputPrecision, target: Target) -> Target:
    """Returns a target whose rate of float32 products is that of portable kernels with this precision."""
    if not problem.dtype.is_float32 or not target.is_nvidia:
        return target
    by_width = BACKWARD_RATE if problem.is_backward else FORWARD_RATE
    rate = RATE[precision] * by_width[float32_width(problem)]
    peak = msgspec.structs.replace(target.peak, fp32=target.peak.half * rate)
    return msgspec.structs.replace(target, peak=peak)


def float32_width(problem: Problem) -> int:
    """Returns the head dim for which tiles and rates of float32 are stated: 64, 128 or 256."""
    return min(256, max(64, widest_tile(problem)))
