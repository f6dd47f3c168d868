"""Calls with features on the CPU, each compared with plain float64."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import flashtune
from flashtune.request.call import dense_call, paged_call, varlen_call
from tests.problems.features import KEYS, QUERIES, agrees, starts

HEADS, KV_HEADS, WIDTH = 4, 2, 32


def dense(batch: int = 2, seqlen_q: int = 20, seqlen_kv: int = 28) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(batch, HEADS, seqlen_q, WIDTH),
        torch.randn(batch, KV_HEADS, seqlen_kv, WIDTH),
        torch.randn(batch, KV_HEADS, seqlen_kv, 16),
    )


def packed() -> tuple[Any, ...]:
    q = torch.randn(sum(QUERIES), HEADS, WIDTH)
    k, v = torch.randn(sum(KEYS), KV_HEADS, WIDTH), torch.randn(sum(KEYS), KV_HEADS, 16)
    return q, k, v, starts(QUERIES), starts(KEYS), max(QUERIES), max(KEYS)


Options = dict[str, Any]
MASKS: dict[str, Options] = {
    "window": {"causal": True, "window": (5, 0)},
    "two-sided window": {"window": (4, 2)},
    "half a window": {"window": (-1, 3)},
    "first tokens": {"causal": True, "window": (5, -1), "sink_tokens": 3},
    "chunk": {"causal": True, "chunk": 8},
    "chunk both ways": {"chunk": 8},
    "softcap": {"causal": True, "softcap": 0.7},
    "top left": {"causal": "top_left", "window": (6, 0)},
    "scale": {"causal": True, "window": (9, 0), "scale": -0.3},
}


def tensors_of_a_batch(batch: int) -> dict[str, Options]:
    return {
        "alibi": {"causal": True, "alibi_slopes": torch.rand(HEADS)},
        "alibi of each sequence": {"alibi_slopes": torch.rand(batch, HEADS)},
        "sinks": {"causal": True, "sinks": torch.randn(HEADS)},
        "prefix": {"causal": True, "prefix_lengths": torch.arange(batch, dtype=torch.int32) * 9},
    }


def all_masks(batch: int) -> Iterator[Options]:
    yield from MASKS.values()
    yield from tensors_of_a_batch(batch).values()


def check_dense(q: Tensor, k: Tensor, v: Tensor, tolerance: float = 2e-5, **options: Any) -> None:
    result = flashtune.attention(q, k, v, return_lse=True, **options)
    agrees(dense_call(q, k, v, return_lse=True, **options), result, tolerance)
    alone = flashtune.attention(q, k, v, **options)
    assert torch.equal(alone, result[0])
    assert alone.is_contiguous()


def check_varlen(*arguments: Any, **options: Any) -> None:
    result = flashtune.attention_varlen(*arguments, return_lse=True, **options)
    agrees(varlen_call(*arguments, return_lse=True, **options), result)


def check_paged(*arguments: Any, **options: Any) -> None:
    result = flashtune.attention_paged(*arguments, return_lse=True, **options)
    agrees(paged_call(*arguments, return_lse=True, **options), result)
    assert torch.equal(flashtune.attention_paged(*arguments, **options), result[0])
