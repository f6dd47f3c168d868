"""The precision of float32 products, an axis of portable families."""

from __future__ import annotations

import enum

from flashtune.core.config import Axis
from flashtune.core.problem import Dtype, Problem
from flashtune.core.target import Target


class InputPrecision(enum.StrEnum):
    """Products of float32 tiles: in float32, or as three products of tf32 halves."""

    IEEE = "ieee"
    TF32X3 = "tf32x3"


def precision_axis(problem: Problem, target: Target) -> Axis:
    """Returns the axis. It has several values for float32 on NVIDIA's GPUs only."""
    several = problem.dtype is Dtype.FP32 and target.is_nvidia
    return Axis("input_precision", tuple(InputPrecision) if several else (InputPrecision.IEEE,), False)
