"""Tests of requests with features, and of their validation."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune.core.errors import ProblemError
from flashtune.core.layouts import Layout
from flashtune.core.problem import Bias, Causal, KvDtype, KvScale
from flashtune.request.call import dense_call, paged_call, varlen_call
from flashtune.request.read_call import read_call

INT = torch.int32


def dense(**options: Any) -> Any:
    q = torch.zeros(2, 4, 10, 32, dtype=torch.bfloat16)
    k, v = q.new_zeros(2, 2, 20, 32), q.new_zeros(2, 2, 20, 16)
    return read_call(dense_call(q, k, v, return_lse=False, **options))


def varlen(tokens: int = 300, longest: int = 100, **options: Any) -> Any:
    q = torch.zeros(tokens, 4, 32)
    k = torch.zeros(500, 2, 32)
    ends = torch.zeros(4, dtype=INT)
    return read_call(varlen_call(q, k, k, ends, ends, longest, 200, return_lse=False, **options))


def cache(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pages = torch.zeros(shape or (9, 16, 2, 32), dtype=dtype)
    return pages, pages, torch.zeros(3, 5, dtype=INT), torch.zeros(3, dtype=INT)


def pages(q: Tensor, *operands: Any, **options: Any) -> Any:
    return read_call(paged_call(q, *(operands or cache()), return_lse=True, **options))


def test_masks() -> None:
    problem = dense(causal=True, window=(5, -1), sink_tokens=2, softcap=3.0, chunk=8).problem
    assert (problem.window_left, problem.window_right, problem.causal) == (5, None, Causal.BOTTOM_RIGHT)
    assert (problem.sink_tokens, problem.softcap, problem.chunk) == (2, True, 8)
    assert dense(window=(None, 4)).problem.window_right == 4
    assert not dense(window=(-1, -1), softcap=0.0).problem.features
    assert not dense(causal=True, window=(4096, 0)).problem.features
    assert dense(attn_bias=torch.zeros(20, dtype=torch.bfloat16).expand(10, 20)).problem.bias is Bias.ADDITIVE
    assert dense(attn_mask=torch.ones(10, 20, dtype=torch.bool)).problem.bias is Bias.BOOLEAN
    assert dense(kv_lengths=torch.zeros(2, dtype=INT)).problem.kv_lengths


def test_bias_is_constant_unless_it_requires_grad() -> None:
    q = torch.zeros(2, 4, 10, 32, requires_grad=True)
    bias = torch.zeros(10, 20)
    call = functools.partial(dense_call, q, *torch.zeros(2, 2, 4, 20, 32), return_lse=False)
    assert read_call(call(attn_bias=bias)).constant_bias
    assert not read_call(call(attn_bias=bias.clone().requires_grad_())).constant_bias
    assert not read_call(call(attn_bias=bias), needs_grad=False).constant_bias
    assert not read_call(call(attn_mask=bias == 0)).constant_bias


def test_varlen_extents_are_rounded_to_powers_of_two() -> None:
    request = varlen()
    assert (request.problem.packed, request.problem.seqlen_q, request.problem.seqlen_kv) == (512, 128, 256)
    assert (request.problem.batch, request.tokens) == (3, 300)
    assert request.out_shape == (300, 4, 32)
    assert request.lse_shape == (4, 300)
    assert varlen(299, 65).problem == request.problem
    assert varlen(window=(255, 0), causal=True).problem.window_left is None
    assert varlen(window=(254, 0), causal=True).problem.window_left == 254


def test_pages() -> None:
    token = pages(torch.zeros(3, 4, 32))
    assert token.layout is Layout.BHD
    assert (token.problem.page_size, token.problem.seqlen_q, token.problem.seqlen_kv) == (16, 1, 128)
    assert (token.out_shape, token.lse_shape) == ((3, 4, 32), (3, 4))
    few = pages(torch.zeros(3, 2, 4, 32))
    assert (few.problem.seqlen_q, few.out_shape, few.lse_shape) == (2, (3, 2, 4, 32), (3, 4, 2))
    packed = pages(torch.zeros(7, 4, 32), cu_seqlens_q=torch.zeros(4, dtype=INT), max_seqlen_q=5)
    assert (packed.problem.packed, packed.problem.seqlen_q, packed.lse_shape) == (8, 8, (4, 7))
    other = pages(torch.zeros(3, 4, 32), *cache(9, 2, 64, 32), layout="hnd")
    assert (other.problem.page_size, other.problem.kv_heads) == (64, 2)
    keys, _, *lengths = cache(9, 16, 1, 576)
    latent = pages(torch.zeros(3, 4, 576), keys, None, *lengths, value_head_dim=512)
    assert latent.problem.mla
    assert latent.out_shape == (3, 4, 512)
    assert latent.views(torch.zeros(3, 4, 576), keys, keys)[2].shape == (9, 1, 16, 512)


@pytest.mark.parametrize(
    ("shape", "kind"), [((1,), KvScale.TENSOR), ((2,), KvScale.HEAD), ((9, 2), KvScale.PAGE)]
)
def test_quantised_caches(shape: tuple[int, ...], kind: KvScale) -> None:
    scales = {"k_scale": torch.ones(shape), "v_scale": torch.ones(1)}
    operands = cache(9, 16, 2, 32, dtype=torch.float8_e4m3fn)
    problem = pages(torch.zeros(3, 4, 32), *operands, **scales).problem
    assert (problem.kv_dtype, problem.kv_scale) == (KvDtype.E4M3, kind)


def test_expanded_page_scales_are_head_scales() -> None:
    shared = {name: torch.ones(2).expand(9, 2) for name in ("k_scale", "v_scale")}
    operands = cache(9, 16, 2, 32, dtype=torch.int8)
    assert pages(torch.zeros(3, 4, 32), *operands, **shared).problem.kv_scale is KvScale.HEAD
    mixed = {**shared, "v_scale": torch.ones(9, 2)}
    assert pages(torch.zeros(3, 4, 32), *operands, **mixed).problem.kv_scale is KvScale.PAGE


TOKEN = torch.zeros(3, 4, 32)
WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: dense(window=5), r"window cannot be 5: pass \(left, right\)"),
    (lambda: dense(window=(-2, 0)), "the window's left bound cannot be -2: pass a number of keys, or -1"),
    (lambda: dense(softcap=-1.0), "softcap cannot be -1.0: pass a positive number"),
    (lambda: dense(chunk=-8), "chunk cannot be -8: pass how many keys"),
    (lambda: dense(sink_tokens=1.5), "sink_tokens cannot be 1.5"),
    (lambda: dense(alibi_slopes=torch.zeros(3)), r"alibi_slopes has shape \[3\]: pass contiguous \[4\]"),
    (
        lambda: dense(alibi_slopes=torch.zeros(4).half()),
        "alibi_slopes is torch.float16: pass",
    ),
    (lambda: dense(sinks=torch.zeros(2)), r"sinks has shape \[2\]: pass \[4\]"),
    (lambda: dense(attn_bias=torch.zeros(10, 20)), "attn_bias is torch.float32 and q torch.bfloat16"),
    (lambda: dense(attn_bias=TOKEN, attn_mask=TOKEN == 0), "attn_bias and attn_mask are both given"),
    (lambda: dense(attn_mask=torch.zeros(10, 20)), "attn_mask is torch.float32: pass a bool tensor"),
    (
        lambda: dense(attn_mask=torch.ones(9, 20, dtype=torch.bool)),
        r"has shape \[9, 20\]: pass \[2, 4, ",
    ),
    (lambda: dense(attn_mask=torch.ones(10, 1, dtype=torch.bool)), r"has shape \[10, 1\]: pass"),
    (lambda: dense(kv_lengths=torch.zeros(3, dtype=INT)), r"has shape \[3\]: pass \[2\] for 2 sequences"),
    (lambda: dense(prefix_lengths=torch.zeros(2)), "prefix_lengths is torch.float32: pass prefix_lengths.to"),
    (lambda: dense(sinks=torch.zeros(4), k_scale=torch.ones(1)), "k_scale is given and k is torch.bfloat16"),
    (lambda: dense(sinks=torch.zeros(4, device="meta")), "sinks is on meta and q on cpu: move it there"),
    (lambda: varlen(longest=-1), "max_seqlen_q cannot be -1"),
    (
        lambda: varlen(sinks=torch.zeros(4), prefix_lengths=torch.zeros(2, dtype=INT)),
        r"has shape \[2\]: pass \[3\]",
    ),
    (lambda: pages(TOKEN, *cache(9, 20, 2, 32)), "pages of 20 keys are not supported"),
    (lambda: pages(TOKEN, *cache(), layout="dhn"), "layout cannot be 'dhn': pass 'nhd' or 'hnd'"),
    (lambda: pages(TOKEN, *cache(), max_seqlen_q=3), "cu_seqlens_q and max_seqlen_q belong together"),
    (lambda: pages(TOKEN, *cache(), value_head_dim=16), "pass one of v_cache and value_head_dim"),
    (
        lambda: pages(TOKEN, cache()[0], None, *cache()[2:], value_head_dim=0),
        "value_head_dim cannot be 0: pass how many columns",
    ),
    (lambda: pages(TOKEN[:2]), r"kv_lengths has shape \[3\]: pass \[2\]"),
    (
        lambda: pages(TOKEN, *cache()[:2], torch.zeros(2, 5, dtype=INT), torch.zeros(3, dtype=INT)),
        r"block_table has shape \[2, 5\]: pass \[3, pages of the longest\]",
    ),
    (lambda: pages(TOKEN, *cache(9, 16, 2, 32, dtype=torch.int8)), "pass k_scale and v_scale"),
    (lambda: pages(TOKEN.to(torch.float8_e4m3fn)), "q is torch.float8_e4m3fn: with masks, packed sequences"),
    (lambda: pages(TOKEN.half()), "q, k and v are torch.float16, torch.float32 and torch.float32"),
]


@pytest.mark.parametrize(("call", "sentence"), WRONG, ids=[sentence[:24] for _, sentence in WRONG])
def test_invalid_requests_are_refused(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ProblemError, match=sentence):
        call()
