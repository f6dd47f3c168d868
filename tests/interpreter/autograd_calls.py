"""Calls with gradients on the CPU, and float64 gradients."""

import functools
from typing import Any

import torch
from torch import Tensor

import flashtune
from flashtune import testing
from tests.support.attention_operators import by_definition

Triple = tuple[Tensor, Tensor, Tensor]
HEADS, KV_HEADS = 4, 2


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


definition = functools.partial(by_definition, causal=True, bottom_right=True)


def expected(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """Gradients of `loss`, from the definition in float64."""
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    return torch.autograd.grad(definition(*wide)[0].square().sum(), wide)  # type: ignore[return-value]


def exact_gradients(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
    """Gradients of `attend(q, k, v, **options).square().sum()`, from the reference.

    Slopes and sinks are those of all sequences.
    """
    inputs = testing.attention_inputs(q, k, v, causal=True, **options)
    dout = 2 * testing.reference(inputs).out.exact
    gradients = [each for each in testing.reference(inputs.backward(dout))[2:] if each is not None]
    return [each.exact.sum(0) if each.name in ("dslopes", "dsinks") else each.exact for each in gradients]
