"""Tests of the comparison of random calls with SDPA."""

import torch

from benchmarks.kernels.random_calls import largest_difference


def test_gradients_are_compared_with_the_largest_gradient() -> None:
    out, dq, dv = torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([75.0])
    rounded = dq + 5e-5
    assert largest_difference((out, rounded, dv), (out, dq, dv)) < 1e-6
    assert largest_difference((out, dq + 7.5, dv), (out, dq, dv)) > 0.09
    assert largest_difference((out + 0.5, dq, dv), (out, dq, dv)) == 0.5
