"""Attention of one batch of a serving engine: new tokens of several sequences over a paged KV cache."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.canonical import rounded_up
from flashtune.core.kernel import Specialization
from flashtune.core.layouts import DTYPES, KV_DTYPES
from flashtune.core.problem import PAGE_SIZES, Causal, Problem
from flashtune.core.target import find_target
from flashtune.request.call import Call, paged_call, varlen_call
from flashtune.runtime.call_key import unsigned
from flashtune.runtime.session import SESSION
from flashtune.templates.family import unsupported_reason
from flashtune.templates.registry import find_family

# The family of batch-invariant kernels, and the compute capability of its GPUs.
INVARIANT_FAMILY, INVARIANT = "forward_hopper", (9, 0)
# Keyword arguments of `attention_paged` and `attention_varlen`.
Options = Mapping[str, Any]


class PagedBatch(NamedTuple):
    """The sequences of a batch. The host reads only the shapes of these tensors."""

    block_table: Tensor  # Pages of each sequence, int32 [batch, max_pages].
    seqlens_k: Tensor  # Keys of each sequence, including those of the new tokens: int32 [batch].
    # Offsets of the sequences' queries, int32 [batch + 1]. None if each has one query.
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int = 1  # Queries of the longest sequence, or more.
    # Whether no sequence has keys before its new tokens, by lengths on the host.
    is_fresh: bool = False


def cache_call(q: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, options: Options) -> Call:
    """Returns the call of new tokens' attention to the cache.

    Args:
        q: Queries [tokens, heads, head_dim].
        keys: Pages of keys, [pages, kv_heads, page_size, head_dim], of any strides.
        values: Pages of values, likewise.
        batch: The sequences.
        options: Options of `attention_paged`.
    """
    more: dict[str, Any] = {"layout": "hnd", **options}
    if batch.cu_seqlens_q is not None:
        more |= {"cu_seqlens_q": batch.cu_seqlens_q, "max_seqlen_q": min(batch.max_seqlen_q, q.shape[0])}
    return paged_call(q, keys, values, batch.block_table, batch.seqlens_k, **more)


def packed_call(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, options: Options) -> Call:
    """Returns the call of sequences whose keys are all new, without the cache.

    Args:
        q: Queries [tokens, heads, head_dim].
        k: Keys [tokens, kv_heads, head_dim].
        v: Values, likewise.
        starts: Offsets of the sequences, int32 [batch + 1].
        longest: Tokens of the longest sequence, or more.
        options: Options of `attention_varlen`.
    """
    longest = min(longest, q.shape[0])
    return varlen_call(q, k, v, starts, starts, longest, longest, **options)


def prepare(call: Call) -> None:
    """Selects, compiles and loads the kernels of a call and checks them, without its result."""
    SESSION.executor(unsigned(call))


def window_of(tokens: int | None, causal: bool) -> dict[str, Any]:
    """Returns the option of a sliding window, given the keys that a query sees before its own."""
    return {} if tokens is None else {"window": (tokens, 0 if causal else tokens)}


def rounded_pages(max_seqlen_k: int, page_size: int) -> int:
    """Returns the columns of a block table for sequences of at most `max_seqlen_k` keys.

    The number is rounded up to a power of two, so that few numbers occur. The shape of the table is part of
    a call's kind, and kernels are selected by it.
    """
    return rounded_up(-(-max_seqlen_k // page_size))


def with_regular_strides(pages: Tensor) -> Tensor:
    """Returns pages [pages, kv_heads, page_size, head_dim] with aligned strides of dimensions of one element.

    Torch permits any stride there, and one-head caches have strides of 1. Kernels select by all strides.
    """
    strides = list(pages.stride())
    if pages.shape[2] == 1:
        strides[2] = pages.shape[3]
    for dim in range(2):
        if pages.shape[dim] == 1:
            strides[dim] = strides[2] * pages.shape[2]
    return pages if tuple(strides) == pages.stride() else torch.as_strided(pages, pages.shape, strides)


def unordered_reason(
    head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, capability: tuple[int, int]
) -> str | None:
    """Returns why no batch-invariant kernel decodes pages of a model with such types and GPUs, or None."""
    if capability != INVARIANT:
        return "batch-invariant kernels need sm_90"
    problem = Problem(
        dtype=DTYPES[dtype],
        heads=1,
        kv_heads=1,
        batch=1,
        seqlen_q=1,
        seqlen_kv=PAGE_SIZES[-1],
        head_dim=head_dim,
        value_head_dim=head_dim,
        causal=Causal.BOTTOM_RIGHT,
        page_size=PAGE_SIZES[-1],
        kv_dtype=None if kv_dtype is dtype else KV_DTYPES[kv_dtype],
        batch_invariant=True,
    )
    return unsupported_reason(find_family(INVARIANT_FAMILY), problem, find_target("h100"), Specialization())
