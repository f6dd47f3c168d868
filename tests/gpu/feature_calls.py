"""Calls with features on a GPU, compared with the reference."""

from typing import Any

import torch
from torch import Tensor

import flashtune
from flashtune import testing
from tests.problems.features import Paged, paged, starts

HEADS, KV_HEADS, WIDTH = 8, 2, 64
KEYS = (700, 0, 33, 256, 129)
QUERIES = (300, 0, 33, 1, 128)
GENERATED: Any = {"prefer": "generated", "return_lse": True}
TOLERANCE = 2e-2


def close(inputs: testing.Inputs, result: Any) -> None:
    out, lse = result
    reference = testing.reference(inputs)
    testing.close(out, reference.out)
    testing.close(lse, reference.lse)


def check_dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    result = flashtune.attention(q, k, v, **options | GENERATED)
    close(testing.attention_inputs(q, k, v, **options), result)


def check_varlen(*arguments: Any, **options: Any) -> None:
    result = flashtune.attention_varlen(*arguments, **options | GENERATED)
    close(testing.varlen_inputs(*arguments, **options), result)


def check_paged(*arguments: Any, **options: Any) -> None:
    result = flashtune.attention_paged(*arguments, **options | GENERATED)
    close(testing.paged_inputs(*arguments, **options), result)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def on_gpu(cache: Paged, dtype: torch.dtype = torch.bfloat16) -> Paged:
    return Paged(*(tensor.cuda() for tensor in (*(pool.to(dtype) for pool in cache[:2]), *cache[2:])))


def cache_of(keys: tuple[int, ...] = KEYS, **shape: Any) -> Paged:
    return on_gpu(paged(keys, kv_heads=KV_HEADS, widths=(WIDTH, WIDTH), **shape))


def packed(queries: tuple[int, ...] = QUERIES, keys: tuple[int, ...] = KEYS) -> tuple[Any, ...]:
    q, k, v = (
        normal(sum(queries), HEADS, WIDTH),
        normal(sum(keys), KV_HEADS, WIDTH),
        normal(sum(keys), KV_HEADS, WIDTH),
    )
    return q, k, v, starts(queries).cuda(), starts(keys).cuda(), max(queries), max(keys)
