"""Calls that autograd goes through, and the gradients that they should have."""

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import flashtune
from flashtune.core.problem import Direction, Problem
from flashtune.core.record import Record
from flashtune.runtime import backward_executors
from tests.support.machine import expected, inputs
from tests.support.records import make_record

quiet = pytest.mark.filterwarnings("ignore::flashtune.core.notices.FlashtuneWarning")


def leaves(problem: Problem, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (tensor.requires_grad_() for tensor in inputs(problem, dtype))
    return q, k, v


def backward_record(problem: Problem, ms: float = 1.0, peers: dict[str, float] | None = None) -> Record:
    """A record of the backward pass, as a search stores it."""
    backward = msgspec.structs.replace(problem, direction=Direction.BACKWARD)
    return make_record(backward, ms, peers=peers, family="backward_split", kernel=None)


def gradients(problem: Problem, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
    out = flashtune.attention(*tensors, causal=True, **options)
    return torch.autograd.grad(out.square().sum(), tensors)


def right(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(expected(q, k, v).square().sum(), (q, k, v))


def close(results: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for gradient, other in zip(results, wanted, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-4, rtol=1e-4)


def executor_of(out: Tensor) -> backward_executors.BoundBackward:
    """Returns the executor that computes gradients from those of an output."""
    bound = out.grad_fn.call[0].backward.__self__  # type: ignore[union-attr]
    assert isinstance(bound, backward_executors.BoundBackward)
    return bound
