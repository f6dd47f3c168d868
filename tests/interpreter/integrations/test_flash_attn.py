"""Tests of flash_attn's functions on float32 and bfloat16 tensors, with kernels in Triton's interpreter."""

from typing import Any

import pytest
import torch

from flashtune.integrations.flash_attn import flash_attn_3, flash_attn_4, low_level_2
from tests.integrations.test_flash_attn_2 import flash_attn_func, flash_attn_varlen_func, numbers, starts
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


def test_the_dropout_pattern_is_that_of_the_kernels() -> None:
    q, k = rounded(5, 2, 16), rounded(7, 1, 16)
    torch.manual_seed(2)
    lengths = starts((2, 3)), starts((4, 3)), 3, 4
    out, _, pattern = flash_attn_varlen_func(q, k, k, *lengths, 0.5, return_attn_probs=True)
    for b, (own_q, own_k) in enumerate(zip(q.split((2, 3)), k.split((4, 3)), strict=True)):
        kept = pattern[b, :, : len(own_q), : len(own_k)] >= 0
        expected, _ = one_sequence(own_q, own_k, own_k, Rule(), kept, 0.5)
        assert near(out.split((2, 3))[b], expected)


def test_blocks_of_ring_attention() -> None:
    q, k, dout = rounded(1, 3, 2, 16), rounded(1, 6, 1, 16), rounded(1, 3, 2, 16, seed=2)
    theirs = [tensor.double().requires_grad_() for tensor in (q, k, k)]
    expected, _ = batch_of(theirs[0], theirs[1], theirs[2], Rule())
    wanted = torch.autograd.grad(expected, theirs, dout.double())
    out, lse, _ = flash_attn_func(q, k, k, return_attn_probs=True)
    low_level: Any = low_level_2
    total = torch.zeros_like(q)
    for block in (slice(0, 2), slice(2, 6)):
        own = k[:, block]
        buffers = torch.empty_like(q), torch.empty_like(own), torch.empty_like(own)
        options = 0.0, SCALE, False, -1, -1, 0.0, None, False
        low_level._flash_attn_backward(dout, q, own, own, out, lse, *buffers, *options)
        total += buffers[0]
        assert near(buffers[1], wanted[1][:, block])
        assert near(buffers[2], wanted[2][:, block])
    assert near(total, wanted[0])


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


def test_negative_bounds_and_sinks_of_version_4() -> None:
    inputs = rounded(1, 4, 2, 16), rounded(1, 5, 1, 16), rounded(1, 5, 1, 16, seed=1), rounded(2).bfloat16()
    own = [tensor.clone().requires_grad_() for tensor in inputs]
    theirs = [tensor.double().requires_grad_() for tensor in inputs]
    out, _ = version_4.flash_attn_func(*own[:3], window_size=(None, -1), learnable_sink=own[3])
    expected, _ = batch_of(theirs[0], theirs[1], theirs[2], Rule(right=-1, sinks=theirs[3]))
    assert near(out, expected)
    dout = rounded(1, 4, 2, 16, seed=3)
    gradients = torch.autograd.grad(out, own, dout)
    wanted = torch.autograd.grad(expected, theirs, dout.double())
    assert all(near(gradient, exact) for gradient, exact in zip(gradients[:3], wanted[:3], strict=True))
    assert near(gradients[3], wanted[3], 1e-2)


def test_values_of_300_columns_and_chunks_of_version_3() -> None:
    q, k, v = rounded(1, 3, 2, 16), rounded(1, 6, 1, 16), rounded(1, 6, 1, 300)
    out = version_3.flash_attn_func(q, k, v, causal=True, attention_chunk=2)
    assert near(out, batch_of(q, k, v, Rule(causal=True, chunk=2))[0])
