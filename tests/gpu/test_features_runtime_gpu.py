"""Calls with features on a GPU: packed, in pages, captured, misaligned, of many lengths and large pools."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashtune
from flashtune import binaries
from flashtune.api import dense_call
from flashtune.options import Call
from flashtune.paged import paged_call
from flashtune.side import Side
from flashtune.varlen import varlen_call
from tests.features import Paged, expected, paged, starts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("untuned"),
    pytest.mark.filterwarnings("ignore::flashtune.notices.FlashtuneWarning"),
]

HEADS, KV_HEADS, WIDTH = 8, 2, 64
KEYS = (700, 0, 33, 256, 129)
QUERIES = (300, 0, 33, 1, 128)
GENERATED: Any = {"prefer": "generated", "return_lse": True}
TOLERANCE = 2e-2


def on_cpu(call: Call) -> Call:
    """A call whose tensors are on the CPU."""
    q, k, v = (tensor.cpu() for tensor in call[:3])
    beside: list[Any] = [one.cpu() if isinstance(one, torch.Tensor) else one for one in call.side]
    side = Side(*beside)
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


def test_packed_sequences_as_sdpa_has_them_one_by_one() -> None:
    lengths = (512, 0, 77, 1024, 3)
    q, k, v, *rest = packed(lengths, lengths)
    out = flashtune.attention_varlen(q, k, v, *rest, causal=True, prefer="generated")
    borders = rest[0].tolist()
    for start, end in itertools.pairwise(borders):
        if start == end:
            continue
        one_q, one_k, one_v = (tensor[None, start:end].transpose(1, 2) for tensor in (q, k, v))
        alone = scaled_dot_product_attention(one_q, one_k, one_v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(out[start:end], alone[0].transpose(0, 1), atol=TOLERANCE, rtol=TOLERANCE)


def test_new_numbers_of_tokens_compile_nothing() -> None:
    flashtune.attention_varlen(*packed(), causal=True, prefer="generated")
    compiled = binaries._compiled.cache_info().currsize
    for fewer in range(1, 20):
        check_varlen(*packed((QUERIES[0] - fewer, *QUERIES[1:])), causal=True)
    assert binaries._compiled.cache_info().currsize <= compiled + 1, "one more, that writes the log-sum-exp"


def test_a_plan_is_replayed_while_lengths_and_pages_change() -> None:
    cache, other = cache_of(), cache_of((40, 300, 16, 0, 700))
    token = normal(len(KEYS), HEADS, WIDTH)
    k, v = torch.cat([cache[0], other[0]]), torch.cat([cache[1], other[1]])
    table, lengths = cache.block_table.clone(), cache.seqlens_k.clone()
    plan = flashtune.plan_paged(token, k, v, table, lengths, **GENERATED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = plan(token, k, v, table, lengths)
    moved = torch.where(other.block_table < 0, other.block_table, other.block_table + len(cache[0]))
    turns = (moved, other.seqlens_k), (cache.block_table, cache.seqlens_k), (moved, other.seqlens_k // 2)
    for pages, counts in turns:
        table.copy_(pages)
        lengths.copy_(counts)
        token.copy_(torch.randn_like(token))
        graph.replay()
        close(paged_call(token, k, v, table, lengths, **GENERATED), result)


def test_a_packed_plan_is_replayed_while_lengths_change() -> None:
    q, k, v, begins, ends, *longest = packed()
    plan = flashtune.plan_varlen(q, k, v, begins, ends, *longest, causal=True, window=(100, 0), **GENERATED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = plan(q, k, v, begins, ends)
    for queries, keys in ((QUERIES[::-1], KEYS[::-1]), (QUERIES, KEYS)):
        begins.copy_(starts(queries))
        ends.copy_(starts(keys))
        graph.replay()
        call = varlen_call(q, k, v, begins, ends, *longest, causal=True, window=(100, 0), **GENERATED)
        close(call, result)


def test_a_shared_prefix_in_a_graph() -> None:
    k, v, table, lengths = cache_of((700, 600, 555))
    table[1:, :32] = table[0, :32]
    token = normal(3, HEADS, WIDTH)
    plan = flashtune.plan_paged(token, k, v, table, lengths, shared_prefix=512, **GENERATED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = plan(token, k, v, table, lengths)
    lengths.sub_(20)
    graph.replay()
    close(paged_call(token, k, v, table, lengths, **GENERATED), result)


def test_views_that_are_misaligned_or_strided() -> None:
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
    k, v = ((one.nan_to_num() * factor).round(decimals=1).to(dtype).cuda() for one in cache[:2])
    for shape in ((1,), (KV_HEADS,), (len(k), KV_HEADS)):
        scales = {name: (0.5 + torch.rand(shape)).cuda() / factor for name in ("k_scale", "v_scale")}
        check_paged(normal(len(KEYS), HEADS, WIDTH), k, v, *(one.cuda() for one in cache[2:]), **scales)


def test_latent_values() -> None:
    cache = on_gpu(paged(KEYS, kv_heads=1, page_size=64, widths=(576, 1)))
    token = normal(len(KEYS), 16, 576)
    check_paged(token, cache.k_cache, None, *cache[2:], value_head_dim=512, scale=192**-0.5)


def test_a_pool_of_more_than_two_to_the_31_elements() -> None:
    pages = 2**31 // (16 * KV_HEADS * WIDTH) + 9
    pool = torch.empty(pages, 16, KV_HEADS, WIDTH, dtype=torch.bfloat16, device="cuda")
    table = torch.stack([torch.arange(8), torch.arange(pages - 8, pages)]).to(torch.int32).cuda()
    pool[table.flatten().long()] = normal(16, 16, KV_HEADS, WIDTH)
    lengths = torch.tensor([128, 121], dtype=torch.int32).cuda()
    token = normal(2, HEADS, WIDTH)
    out = flashtune.attention_paged(token, pool, pool, table, lengths, prefer="generated")
    few = pool[table.flatten().long()]
    near = torch.arange(16, dtype=torch.int32, device="cuda").view(2, 8)
    right, _ = expected(on_cpu(paged_call(token, few, few, near, lengths, **GENERATED)))
    torch.testing.assert_close(out.double().cpu(), right, atol=TOLERANCE, rtol=TOLERANCE)


def test_compilers_see_one_operator() -> None:
    torch._dynamo.reset()
    token, cache = normal(len(KEYS), HEADS, WIDTH), cache_of()

    def model(token: Tensor, *cache: Tensor) -> Tensor:
        return flashtune.attention_paged(token * 2, *cache, prefer="generated") + 1

    eager = model(token, *cache)
    inductor: Callable[..., Tensor] = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(inductor(token, *cache), eager, atol=TOLERANCE, rtol=TOLERANCE)


def test_calls_of_known_shapes_take_little_of_the_host() -> None:
    token, cache = normal(len(KEYS), HEADS, WIDTH), cache_of()
    plan = flashtune.plan_paged(token, *cache, prefer="generated")
    given = packed()
    q, k, v, begins, ends, *_ = given
    ragged = flashtune.plan_varlen(*given, causal=True, prefer="generated")
    calls: tuple[Callable[[], object], ...] = (
        lambda: plan(token, *cache),
        lambda: flashtune.attention_paged(token, *cache, prefer="generated"),
        lambda: ragged(q, k, v, begins, ends),
        lambda: flashtune.attention_varlen(*given, causal=True, prefer="generated"),
    )
    for call in calls:
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            call()
        assert (time.perf_counter() - start) / 100 < 1e-3, "a millisecond would be a choice or a compilation"
        torch.cuda.synchronize()
