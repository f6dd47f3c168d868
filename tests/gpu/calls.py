"""Calls of attention on a GPU, and their references."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import flashtune
from flashtune.core.session import SESSION
from flashtune.request.call import CausalOption, dense_call
from flashtune.request.read_call import read_call

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
Triple = tuple[Tensor, Tensor, Tensor]


def forget() -> None:
    """Clears all caches of the process: executors, warnings and the database."""
    SESSION.reset()


def tensors(
    seqlen_q: int = 300,
    seqlen_kv: int = 400,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 2,
    heads: int = 8,
    kv_heads: int = 2,
) -> Triple:
    generator = torch.Generator("cuda").manual_seed(seqlen_q + seqlen_kv)

    def normal(count: int, length: int) -> Tensor:
        shape = (batch, count, length, head_dim)
        return torch.randn(shape, dtype=dtype, device="cuda", generator=generator)

    return normal(heads, seqlen_q), normal(kv_heads, seqlen_kv), normal(kv_heads, seqlen_kv)


def reference(q: Tensor, k: Tensor, v: Tensor, causal: CausalOption = False) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64, from the definition, heads first."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * q.shape[3] ** -0.5
    if causal:
        diagonal = 0 if causal == "top_left" else k.shape[2] - q.shape[2]
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device="cuda").tril(diagonal)
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(group, 1), scores.logsumexp(-1)


def close(out: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def generated(q: Tensor, k: Tensor, v: Tensor, causal: CausalOption = True, **options: Any) -> Any:
    return flashtune.attention(q, k, v, causal=causal, prefer="generated", **options)


def request_of(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return read_call(dense_call(q, k, v, causal=True, prefer="generated"))
