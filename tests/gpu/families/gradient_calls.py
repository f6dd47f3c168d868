"""Calls of attention with gradients on a GPU, and their references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import flashtune
from flashtune.request.call import CausalOption
from tests.gpu.calls import Triple, tensors

DEVICE = torch.device("cuda")
DROPOUT = 0.2
# Errors of a row over those of the same computation in plain low precision, and in shares of a row's norm.
RATIO, BAND = 2.0, 2e-6


def leaves(seqlen_q: int, seqlen_kv: int, **options: Any) -> Triple:
    q, k, v = (tensor.requires_grad_() for tensor in tensors(seqlen_q, seqlen_kv, **options))
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: CausalOption = True, **options: Any) -> Tensor:
    out: Tensor = flashtune.attention(q, k, v, causal=causal, prefer="generated", **options)
    return out


def gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(attend(q, k, v, **options), (q, k, v), dout)


def plainly(
    inputs: Sequence[Tensor],
    dout: Tensor,
    causal: CausalOption,
    dtype: torch.dtype,
    factors: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Gradients by autograd from the definition, with products in a type and softmax in float32 or more."""
    q, k, v = (tensor.detach().to(dtype).requires_grad_() for tensor in inputs)
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * q.shape[3] ** -0.5
    if causal:
        diagonal = 0 if causal == "top_left" else k.shape[2] - q.shape[2]
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril(diagonal)
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.to(torch.promote_types(dtype, torch.float32)).softmax(-1)
    # Rows that see nothing: zeros, and no gradients of what is not a number.
    weights = torch.where(scores.isneginf().all(-1, keepdim=True), 0.0, weights)
    if factors is not None:
        weights = weights * factors
    out = weights.to(dtype) @ v.repeat_interleave(group, 1)
    return torch.autograd.grad(out, (q, k, v), dout.to(dtype))


def row_error(found: Tensor, exact: Tensor) -> float:
    """The largest error of a row, over the norm that rows have on average."""
    errors = (found.double() - exact).norm(dim=-1)
    return float(errors.max() / exact.norm(dim=-1).mean())


def close(found: Sequence[Tensor], exact: Sequence[Tensor], plain: Sequence[Tensor]) -> None:
    for name, one, right, other in zip(("dq", "dk", "dv"), found, exact, plain, strict=True):
        error, allowed = row_error(one, right), RATIO * row_error(other, right) + BAND
        assert error <= allowed, f"{name}: {error:.3g} where {allowed:.3g} is allowed"


def check(inputs: Triple, causal: CausalOption, **options: Any) -> None:
    """Holds gradients against float64, for inputs that are [batch, heads, seqlen, head_dim]."""
    out = attend(*inputs, causal=causal, **options)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, dout)
    exact = plainly(inputs, dout, causal, torch.float64)
    close(found, exact, plainly(inputs, dout, causal, out.dtype))
