"""Calls with features on a GPU, compared with float64 on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import flashtune
from flashtune.core.features.records import ExtraInputs
from flashtune.request.call import Call, dense_call, paged_call, varlen_call
from tests.problems.features import Paged, expected, paged, starts

HEADS, KV_HEADS, WIDTH = 8, 2, 64
KEYS = (700, 0, 33, 256, 129)
QUERIES = (300, 0, 33, 1, 128)
GENERATED: Any = {"prefer": "generated", "return_lse": True}
TOLERANCE = 2e-2


def on_cpu(call: Call) -> Call:
    """A call whose tensors are on the CPU."""
    q, k, v = (tensor.cpu() for tensor in call[:3])
    beside: list[Any] = [one.cpu() if isinstance(one, torch.Tensor) else one for one in call.side]
    side = ExtraInputs(*beside)
    return call._replace(q=q, k=k, v=k if call.v is call.k else v, side=side)


def close(call: Call, result: Any) -> None:
    out, lse = result
    right, right_lse = expected(on_cpu(call))
    torch.testing.assert_close(out.double().cpu(), right, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(lse.double().cpu(), right_lse, atol=1e-3, rtol=1e-3)


def check_dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    result = flashtune.attention(q, k, v, **options | GENERATED)
    close(dense_call(q, k, v, **options | GENERATED), result)


def check_varlen(*given: Any, **options: Any) -> None:
    result = flashtune.attention_varlen(*given, **options | GENERATED)
    close(varlen_call(*given, **options | GENERATED), result)


def check_paged(*given: Any, **options: Any) -> None:
    result = flashtune.attention_paged(*given, **options | GENERATED)
    close(paged_call(*given, **options | GENERATED), result)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def on_gpu(cache: Paged, dtype: torch.dtype = torch.bfloat16) -> Paged:
    return Paged(*(tensor.cuda() for tensor in (*(one.to(dtype) for one in cache[:2]), *cache[2:])))


def cache_of(keys: tuple[int, ...] = KEYS, **shape: Any) -> Paged:
    return on_gpu(paged(keys, kv_heads=KV_HEADS, widths=(WIDTH, WIDTH), **shape))


def packed(queries: tuple[int, ...] = QUERIES, keys: tuple[int, ...] = KEYS) -> tuple[Any, ...]:
    q, k, v = (
        normal(sum(queries), HEADS, WIDTH),
        normal(sum(keys), KV_HEADS, WIDTH),
        normal(sum(keys), KV_HEADS, WIDTH),
    )
    return q, k, v, starts(queries).cuda(), starts(keys).cuda(), max(queries), max(keys)
