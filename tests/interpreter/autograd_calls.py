"""Calls with gradients on the CPU, and float64 gradients."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtune
from flashtune.core.session import SESSION

Triple = tuple[Tensor, Tensor, Tensor]
HEADS, KV_HEADS = 4, 2


@pytest.fixture(autouse=True)
def fresh_runtime() -> Iterator[None]:
    SESSION.reset()
    torch._dynamo.reset()
    yield
    SESSION.forget()


def tensors(seqlen_q: int = 20, seqlen_kv: int = 28, head_dim: int = 32, value_head_dim: int = 16) -> Triple:
    torch.manual_seed(seqlen_q)
    q = torch.randn(2, HEADS, seqlen_q, head_dim)
    k = torch.randn(2, KV_HEADS, seqlen_kv, head_dim)
    v = torch.randn(2, KV_HEADS, seqlen_kv, value_head_dim)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out: Tensor = flashtune.attention(q, k, v, causal=True, prefer="generated", **options)
    return out


def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v).square().sum()


def expected(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """Gradients of `loss`, from the definition in float64."""
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    return torch.autograd.grad(definition(*wide)[0].square().sum(), wide)  # type: ignore[return-value]


def definition(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Causal attention and its log-sum-exp by differentiable operators."""
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = q @ k.mT * q.shape[3] ** -0.5
    if bias is not None:
        scores = scores + bias
    seen = torch.ones(scores.shape[2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def close(actual: Any, wanted: Any) -> None:
    for gradient, reference in zip(actual, wanted, strict=True):
        torch.testing.assert_close(gradient.double(), reference.double(), atol=2e-5, rtol=2e-5)
