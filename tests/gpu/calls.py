"""Calls of attention on a GPU, and their references."""

import gc
from typing import Any

import torch
from torch import Tensor

import flashtune
from flashtune import testing
from flashtune.request.call import CausalOption, dense_call
from flashtune.request.read_call import read_call
from tests.support.runtime import forget_all

Triple = tuple[Tensor, Tensor, Tensor]


def forget() -> None:
    """Clears all caches of the process: executors, warnings and the database."""
    forget_all()


def free_memory() -> int:
    """The bytes of free memory without the garbage of earlier tests."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


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


def reference(q: Tensor, k: Tensor, v: Tensor, causal: CausalOption = False) -> testing.Reference:
    return testing.reference(testing.attention_inputs(q, k, v, causal=causal))


def generated(q: Tensor, k: Tensor, v: Tensor, causal: CausalOption = True, **options: Any) -> Any:
    return flashtune.attention(q, k, v, causal=causal, prefer="generated", **options)


def request_of(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return read_call(dense_call(q, k, v, causal=True, prefer="generated"))
