"""Tests of calls with features on a GPU: masks, misaligned and strided tensors, large pools."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashtune
from flashtune import testing
from tests.gpu.feature_calls import (
    HEADS,
    KEYS,
    KV_HEADS,
    QUERIES,
    TOLERANCE,
    WIDTH,
    cache_of,
    check_dense,
    check_paged,
    check_varlen,
    normal,
    on_gpu,
    packed,
)
from tests.gpu.marks import SERVED
from tests.problems.features import paged, starts

pytestmark = SERVED

MASKS: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": True, "window": (100, 0)},
    {"causal": False, "window": (60, 20), "sink_tokens": 4},
    {"causal": True, "chunk": 128, "softcap": 2.0},
]


def sinks() -> Tensor:
    return torch.linspace(-2.0, 9.0, HEADS, device="cuda")


def slopes() -> Tensor:
    return 2.0 ** -torch.arange(1.0, HEADS + 1, device="cuda")


@pytest.mark.parametrize("options", MASKS)
def test_masks_of_dense_packed_and_paged_calls(options: dict[str, Any]) -> None:
    q, k = normal(2, HEADS, 300, WIDTH), normal(2, KV_HEADS, 400, WIDTH)
    check_dense(q, k, k.clone(), sinks=sinks(), **options)
    check_varlen(*packed(), alibi_slopes=slopes(), **options)
    check_paged(normal(len(KEYS), HEADS, WIDTH), *cache_of(), sinks=sinks(), **options)
    check_paged(normal(len(KEYS), 4, HEADS, WIDTH), *cache_of(page_size=64), **options)
    both = {"cu_seqlens_q": starts(QUERIES).cuda(), "max_seqlen_q": max(QUERIES)}
    check_paged(normal(sum(QUERIES), HEADS, WIDTH), *cache_of(layout="hnd"), layout="hnd", **both, **options)


def test_biases_prefixes_and_lengths() -> None:
    q, k = normal(2, HEADS, 300, WIDTH), normal(2, KV_HEADS, 400, WIDTH)
    check_dense(q, k, k.clone(), attn_bias=normal(1, HEADS, 300, 400), causal=True)
    check_dense(q, k, k.clone(), attn_mask=torch.rand(2, 1, 1, 400, device="cuda") > 0.5)
    check_dense(q, k, k.clone(), prefix_lengths=torch.tensor([150, 0], dtype=torch.int32).cuda(), causal=True)
    lengths = torch.tensor([400, 77], dtype=torch.int32).cuda()
    check_dense(q[:, :, :3], k, k.clone(), kv_lengths=lengths, causal=True)


def test_packed_sequences_match_sdpa_per_sequence() -> None:
    lengths = (512, 0, 77, 1024, 3)
    q, k, v, *rest = packed(lengths, lengths)
    out = flashtune.attention_varlen(q, k, v, *rest, causal=True, prefer="generated")
    borders = rest[0].tolist()
    for start, end in itertools.pairwise(borders):
        if start == end:
            continue
        own_q, own_k, own_v = (tensor[None, start:end].transpose(1, 2) for tensor in (q, k, v))
        alone = scaled_dot_product_attention(own_q, own_k, own_v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(out[start:end], alone[0].transpose(0, 1), atol=TOLERANCE, rtol=TOLERANCE)


def test_misaligned_and_strided_views() -> None:
    k, v, table, lengths = cache_of()
    token = normal(len(KEYS), HEADS, WIDTH)
    odd = torch.empty(token.numel() + 1, dtype=token.dtype, device="cuda")[1:].view(token.shape).copy_(token)
    check_paged(odd, k, v, table, lengths)
    wide = torch.full((*k.shape[:3], WIDTH + 3), torch.nan, dtype=k.dtype, device="cuda")
    check_paged(token, wide[..., :WIDTH].copy_(k), v, table, lengths)
    room = torch.full((len(table), table.shape[1] + 5), 10**8, dtype=torch.int32, device="cuda")
    check_paged(token, k, v, room[:, : table.shape[1]].copy_(table), lengths)
    both = torch.stack([k, v], 1)
    check_paged(token, both[:, 0], both[:, 1], table, lengths)
    q, _, _, *rest = packed()
    keys_and_values = normal(sum(KEYS), 2, KV_HEADS, WIDTH)
    check_varlen(q[:, :, :40], keys_and_values[:, 0, :, :40], keys_and_values[:, 1], *rest, causal=True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_caches_of_8_bits(dtype: torch.dtype) -> None:
    cache = paged(KEYS, kv_heads=KV_HEADS, widths=(WIDTH, WIDTH))
    factor = 20 if dtype is torch.int8 else 1
    k, v = ((pool.nan_to_num() * factor).round(decimals=1).to(dtype).cuda() for pool in cache[:2])
    for shape in ((1,), (KV_HEADS,), (len(k), KV_HEADS)):
        scales = {name: (0.5 + torch.rand(shape)).cuda() / factor for name in ("k_scale", "v_scale")}
        check_paged(normal(len(KEYS), HEADS, WIDTH), k, v, *(tensor.cuda() for tensor in cache[2:]), **scales)


def test_latent_values() -> None:
    cache = on_gpu(paged(KEYS, kv_heads=1, page_size=64, widths=(576, 1)))
    token = normal(len(KEYS), 16, 576)
    check_paged(token, cache.k_cache, None, *cache[2:], value_head_dim=512, scale=192**-0.5)


def test_pool_of_more_than_two_to_the_31_elements() -> None:
    pages = 2**31 // (16 * KV_HEADS * WIDTH) + 9
    pool = torch.empty(pages, 16, KV_HEADS, WIDTH, dtype=torch.bfloat16, device="cuda")
    table = torch.stack([torch.arange(8), torch.arange(pages - 8, pages)]).to(torch.int32).cuda()
    pool[table.flatten().long()] = normal(16, 16, KV_HEADS, WIDTH)
    lengths = torch.tensor([128, 121], dtype=torch.int32).cuda()
    token = normal(2, HEADS, WIDTH)
    out = flashtune.attention_paged(token, pool, pool, table, lengths, prefer="generated")
    few = pool[table.flatten().long()]
    near = torch.arange(16, dtype=torch.int32, device="cuda").view(2, 8)
    testing.close(out, testing.reference(testing.paged_inputs(token, few, few, near, lengths)).out)


@pytest.mark.parametrize("width", [64, 160])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_after_the_last_packed_sequence_are_zero(dtype: torch.dtype, width: int) -> None:
    q, k, v = (torch.randn(3000, 4, width, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    ends = torch.tensor([0, 900, 1417], dtype=torch.int32, device="cuda")
    for _ in range(3):
        # A caching allocator returns this memory.
        filler = [torch.full((3000, 4, width), torch.nan, device="cuda", dtype=dtype) for _ in range(8)]
        del filler
        out, lse = flashtune.attention_varlen(
            q, k, v, ends, ends, 1024, 1024, causal=True, return_lse=True, prefer="generated"
        )
        assert not out[1417:].any()
        assert out[:1417].isfinite().all()
        assert (lse[:, 1417:] == -torch.inf).all()
    for gradient in torch.autograd.grad(out.float().sum(), (q, k, v)):
        assert not gradient[1417:].any()
