"""Tests of the tolerance between launches with unordered sums."""

import math

import pytest
import torch
from torch import Tensor

from flashtune.verification.gradients.tolerance import beyond_order
from flashtune.verification.inputs.guarded_tensors import bits_of

TYPES = (torch.bfloat16, torch.float16)
ALLOWED = 1.0


def beyond(first: Tensor, later: Tensor, allowed: float = 0.0) -> float:
    room = torch.full(first.shape[:-1], allowed, dtype=torch.float64)
    return beyond_order(first, later, room, first.dtype).item()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [0.0, 0.7, 1.0, -1.0, 2.0, 300.0, 2.0**-14, 2.0**-24])
def test_adjacent_float_is_within_any_tolerance(dtype: torch.dtype, value: float) -> None:
    row = torch.tensor([[value, 0.0]], dtype=dtype)
    assert beyond(row, row) <= 0
    for step in (-1, 1):
        extra_inputs = row.clone()
        bits_of(extra_inputs)[0, 0] += step
        if extra_inputs[0, 0].isfinite():
            assert beyond(row, extra_inputs) <= 0
            assert beyond(extra_inputs, row) <= 0
    extra_inputs = row.clone()
    bits_of(extra_inputs)[0, 0] += 3
    assert beyond(row, extra_inputs) > 0


@pytest.mark.parametrize("dtype", TYPES)
def test_launches_may_differ_by_a_fraction_of_the_tolerance(dtype: torch.dtype) -> None:
    row = torch.zeros(1, 2, dtype=dtype)
    moved = row.clone()
    moved[0, 1] = ALLOWED / 128
    assert beyond(row, moved, ALLOWED) <= 0
    moved[0, 1] = ALLOWED / 32
    assert beyond(row, moved, ALLOWED) > 0


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_nan_is_not_within_tolerance(wrong: float) -> None:
    row = torch.zeros(1, 2, dtype=torch.bfloat16)
    spoilt = torch.full_like(row, wrong)
    assert not beyond(row, spoilt, ALLOWED) <= 0
    assert not beyond(spoilt, row, ALLOWED) <= 0
    assert not beyond(spoilt, spoilt, ALLOWED) <= 0
