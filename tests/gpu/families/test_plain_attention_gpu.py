"""Tests of both passes on a GPU against plain attention, a reference apart from the verification's."""

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtune
from flashtune import testing
from tests.gpu.calls import Triple, tensors
from tests.gpu.marks import SERVED
from tests.problems.plain_masks import plain_attention

pytestmark = SERVED

# The largest error over the largest number: bf16 gradients of unlike sums.
TOLERANCE = 2e-2
OPTIONS = pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": "top_left"},
        {"window": (70, 0)},
        {"dropout_p": 0.3},
        {"dropout_p": 0.3, "causal": True},
    ],
    ids=str,
)
HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 128])


def plain(leaves: Triple, **options: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of float64 tensors on the CPU, with the weights that the next seed keeps."""
    inputs = testing.attention_inputs(*(leaf.detach().bfloat16().cuda() for leaf in leaves), **options)
    extra = inputs.extra
    if extra.seed is not None:
        extra = extra._replace(seed=extra.seed.cpu())
    return plain_attention(inputs.problem, *leaves, extra, inputs.scale)


def double(inputs: Triple) -> Triple:
    q, k, v = (tensor.detach().cpu().double().requires_grad_() for tensor in inputs)
    return q, k, v


def close(result: Tensor, exact: Tensor) -> None:
    assert (result.cpu().double() - exact).abs().max() < TOLERANCE * exact.abs().max()


@OPTIONS
@HEAD_DIMS
def test_outputs_match_plain_attention(options: dict[str, Any], head_dim: int) -> None:
    inputs = tensors(300, 401, head_dim)
    torch.manual_seed(11)
    out, lse = flashtune.attention(*inputs, prefer="generated", return_lse=True, **options)
    torch.manual_seed(11)
    exact_out, exact_lse = plain(double(inputs), **options)
    close(out, exact_out)
    close(lse, exact_lse)


@OPTIONS
@HEAD_DIMS
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_match_plain_attention(options: dict[str, Any], head_dim: int, deterministic: bool) -> None:
    inputs = tensors(300, 401, head_dim)
    leaves = double(inputs)
    q, k, v = (tensor.requires_grad_() for tensor in inputs)
    torch.manual_seed(11)
    out = flashtune.attention(q, k, v, prefer="generated", deterministic=deterministic, **options)
    dout = torch.randn_like(out)
    results = torch.autograd.grad(out, (q, k, v), dout)
    torch.manual_seed(11)
    exact_out, _ = plain(leaves, **options)
    exact = torch.autograd.grad(exact_out, leaves, dout.cpu().double())
    for result, gradient in zip(results, exact, strict=True):
        close(result, gradient)
