"""Tests of flash_attn's functions on float32 and bfloat16 tensors, with kernels in Triton's interpreter."""

from typing import Any

import pytest
import torch

from flashtune.integrations.flash_attn import flash_attn_3, flash_attn_4
from tests.integrations.test_flash_attn_2 import flash_attn_func, numbers, starts
from tests.support.flash_attn_reference import Rule, batch_of, one_sequence

version_3: Any = flash_attn_3
version_4: Any = flash_attn_4
BOUND = 2e-6
SCALE = 16**-0.5


def near(out: torch.Tensor, right: torch.Tensor, bound: float = BOUND) -> bool:
    return out.shape == right.shape and torch.allclose(out.double(), right.double(), rtol=bound, atol=bound)


def rounded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return numbers(*shape, seed=seed).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_calls_and_gradients(dtype: torch.dtype) -> None:
    inputs = [rounded(1, 3, 2, 16, dtype=dtype), rounded(1, 5, 1, 16, dtype=dtype)]
    inputs.append(rounded(1, 5, 1, 16, seed=1, dtype=dtype))
    own = [tensor.clone().requires_grad_() for tensor in inputs]
    theirs = [tensor.double().requires_grad_() for tensor in inputs]
    out, lse, _ = flash_attn_func(*own, causal=True, window_size=(2, 0), return_attn_probs=True)
    expected, expected_lse = batch_of(theirs[0], theirs[1], theirs[2], Rule(causal=True, left=2))
    bound = BOUND if dtype is torch.float32 else 2e-2
    assert near(out, expected, bound)
    assert near(lse, expected_lse)
    dout = rounded(1, 3, 2, 16, seed=2, dtype=dtype)
    gradients = torch.autograd.grad(out, own, dout)
    wanted = torch.autograd.grad(expected, theirs, dout.double())
    assert all(near(gradient, exact, bound) for gradient, exact in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize("page", [None, 4, 32])
@pytest.mark.parametrize("is_packed", [False, True])
def test_caches_with_new_tokens(page: int | None, is_packed: bool) -> None:
    lengths = [3, 9]
    size = 16 if page is None else page
    k_cache, v_cache = rounded(8, size, 1, 16), rounded(8, size, 1, 16, seed=1)
    table = (
        None
        if page is None
        else torch.randperm(8, generator=torch.Generator().manual_seed(1)).int().view(2, 4)
    )
    pages = torch.arange(8)[:2, None] if table is None else table.long()
    q, k = rounded(2, 2, 2, 16), rounded(2, 1, 1, 16)
    before = [k_cache[own].flatten(0, 1) for own in pages], [v_cache[own].flatten(0, 1) for own in pages]
    out = version_3.flash_attn_with_kvcache(
        q.flatten(0, 1) if is_packed else q,
        k_cache,
        v_cache,
        k,
        k,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        page_table=table,
        cu_seqlens_q=starts((2, 2)) if is_packed else None,
        max_seqlen_q=2 if is_packed else None,
        causal=True,
        softcap=4.0,
    )
    for b, length in enumerate(lengths):
        keys, values = (torch.cat([cache[b][:length], k[b]]) for cache in before)
        expected, _ = one_sequence(q[b], keys, values, Rule(causal=True, softcap=4.0))
        assert near(out.view_as(q)[b], expected)
