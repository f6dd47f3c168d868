"""Calls of attention with gradients on a GPU, and their references."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import flashtune
from flashtune import testing
from flashtune.request.call import CausalOption
from tests.gpu.calls import Triple, tensors

DEVICE = torch.device("cuda")
DROPOUT = 0.2


def leaves(seqlen_q: int, seqlen_kv: int, **options: Any) -> Triple:
    q, k, v = (tensor.requires_grad_() for tensor in tensors(seqlen_q, seqlen_kv, **options))
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: CausalOption = True, **options: Any) -> Tensor:
    out: Tensor = flashtune.attention(q, k, v, causal=causal, prefer="generated", **options)
    return out


def gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(attend(q, k, v, **options), (q, k, v), dout)


def close(results: Sequence[Tensor], inputs: Sequence[Tensor], dout: Tensor, **options: Any) -> None:
    """Compares gradients with the reference. Dropout draws the seed of the next call."""
    q, k, v = (tensor.detach() for tensor in inputs)
    expected = testing.reference(testing.attention_inputs(q, k, v, **options).backward(dout))
    for gradient, exact in zip(results, expected[2:], strict=False):
        assert exact is not None
        testing.close(gradient, exact)


def check(inputs: Triple, causal: CausalOption, **options: Any) -> None:
    """Compares gradients with the reference, for inputs that are [batch, heads, seqlen, head_dim]."""
    out = attend(*inputs, causal=causal, **options)
    dout = torch.randn_like(out)
    close(torch.autograd.grad(out, inputs, dout), inputs, dout, causal=causal)
