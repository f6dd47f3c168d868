"""Calls with features from the API to a kernel and back on the CPU, against plain float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtune
from flashtune.api import dense_call
from flashtune.calls import forget_servers
from flashtune.compilation import interpreting
from flashtune.errors import ProblemError
from flashtune.notices import forget_told
from flashtune.paged import paged_call
from flashtune.varlen import varlen_call
from tests.features import KEYS, QUERIES, agrees, expected, paged, starts

HEADS, KV_HEADS, WIDTH = 4, 2, 32


@pytest.fixture(autouse=True)
def fresh_runtime() -> Iterator[None]:
    assert interpreting()
    forget_servers()
    forget_told()
    torch.manual_seed(0)
    yield
    forget_servers()


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


def check_varlen(*given: Any, **options: Any) -> None:
    result = flashtune.attention_varlen(*given, return_lse=True, **options)
    agrees(varlen_call(*given, return_lse=True, **options), result)


def check_paged(*given: Any, **options: Any) -> None:
    result = flashtune.attention_paged(*given, return_lse=True, **options)
    agrees(paged_call(*given, return_lse=True, **options), result)
    assert torch.equal(flashtune.attention_paged(*given, **options), result[0])


def test_dense_masks() -> None:
    for options in all_masks(2):
        check_dense(*dense(), **options)


def test_layouts_and_lengths() -> None:
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in dense())
    check_dense(q, k, v, layout="bshd", causal=True, window=(5, 0))
    check_dense(*dense(1, 40, 20), causal=True, window=(5, 0), sinks=torch.zeros(HEADS))
    check_dense(*dense(3), causal=True, kv_lengths=torch.tensor([28, 0, 13], dtype=torch.int32))


def test_biases_and_masks_of_any_shape() -> None:
    q, k, v = dense()
    for shape in ((2, HEADS, 20, 28), (1, HEADS, 1, 28), (20, 28), (2, 1, 1, 28)):
        check_dense(q, k, v, attn_bias=torch.randn(shape))
        check_dense(q, k, v, attn_mask=torch.rand(shape) > 0.4, causal=True)
    check_dense(q, k, v, attn_bias=torch.full((20, 28), -torch.inf))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(dtype: torch.dtype) -> None:
    q, k, v = (tensor.to(dtype) for tensor in dense())
    bias = torch.randn(20, 28).to(dtype)
    check_dense(q, k, v, 2e-2, causal=True, window=(7, 0), attn_bias=bias, sinks=torch.zeros(HEADS))


def test_packed_sequences() -> None:
    for options in ({}, {"causal": True}, *all_masks(len(QUERIES))):
        check_varlen(*packed(), **options)


def test_packed_views_and_other_numbers_of_tokens() -> None:
    q, k, v, *lengths = packed()
    both = torch.randn(sum(KEYS), 2, KV_HEADS, WIDTH)
    check_varlen(q, both[:, 0], both[:, 1], *lengths, causal=True)
    fewer = starts((3, 2, 1)), starts((3, 5, 7)), 3, 7
    check_varlen(q[:6], k[:15], v[:15], *fewer, causal=True)


def test_decoding() -> None:
    q = torch.randn(len(KEYS), 3, HEADS, WIDTH)
    for options in ({}, *all_masks(len(KEYS))):
        check_paged(q, *paged(), **options)


def test_decoding_by_one_token_and_pages_of_either_layout() -> None:
    for layout in ("nhd", "hnd"):
        check_paged(torch.randn(len(KEYS), HEADS, WIDTH), *paged(layout=layout), layout=layout)
        check_paged(torch.randn(len(KEYS), 2, HEADS, WIDTH), *paged(layout=layout), layout=layout)


@pytest.mark.parametrize("page_size", [16, 64])
def test_chunked_prefill(page_size: int) -> None:
    cache = paged(page_size=page_size, widths=(WIDTH, 16))
    q = torch.randn(sum(QUERIES), HEADS, WIDTH)
    both = {"cu_seqlens_q": starts(QUERIES), "max_seqlen_q": max(QUERIES)}
    check_paged(q, *cache, **both)
    check_paged(q, *cache, **both, window=(7, 0), softcap=2.0, sinks=torch.randn(HEADS))


def test_caches_of_8_bits() -> None:
    cache = paged((40, 17))
    q = torch.randn(2, HEADS, WIDTH)
    pages = len(cache.k_cache)
    k, v = ((tensor.nan_to_num() * 20).round().to(torch.int8) for tensor in cache[:2])
    for shape in ((1,), (KV_HEADS,), (pages, KV_HEADS)):
        scales = {"k_scale": torch.rand(shape) / 20, "v_scale": torch.rand(shape) / 20}
        check_paged(q, k, v, *cache[2:], **scales)
    dense_q, dense_k, dense_v = dense()
    k, v = ((tensor * 20).round().to(torch.int8) for tensor in (dense_k, dense_v))
    check_dense(dense_q, k, v, k_scale=torch.tensor([0.05]), v_scale=torch.rand(2, KV_HEADS) / 20)


def test_latent_values() -> None:
    cache = paged((40, 17), kv_heads=1, widths=(576, 1))
    q = torch.randn(2, 4, 576)
    result = flashtune.attention_paged(q, cache.k_cache, None, *cache[2:], value_head_dim=512)
    call = paged_call(q, cache.k_cache, None, *cache[2:], value_head_dim=512, return_lse=False)
    torch.testing.assert_close(result.double(), expected(call)[0], atol=2e-5, rtol=2e-5)


def test_nothing_to_attend_with_or_to() -> None:
    sinks = torch.randn(HEADS)
    check_dense(*dense(0), causal=True, sinks=sinks, window=(3, 0))
    check_dense(*dense(2, 0, 5), causal=True, sinks=sinks)
    check_dense(*dense(2, 5, 0), causal=True, sinks=sinks)
    q, k, v, *_ = packed()
    none = starts(())
    check_varlen(q[:0], k[:0], v[:0], none, none, 0, 0)
    empty = starts((0, 0))
    check_varlen(q[:0], k[:5], v[:5], empty, starts((2, 3)), 0, 3)
    check_varlen(q[:5], k[:0], v[:0], starts((2, 3)), empty, 3, 1, sinks=sinks)
    cache = paged((16, 3))
    check_paged(torch.randn(2, HEADS, WIDTH), *cache[:2], cache[2][:, :0], cache[3] * 0, sinks=sinks)
    check_paged(torch.randn(2, HEADS, WIDTH), *cache[:3], cache[3] * 0, sinks=sinks)


def test_a_prefix_that_all_sequences_share() -> None:
    k_cache, v_cache, table, lengths = paged((56, 40, 33))
    table[1:, :2] = table[0, :2]
    cache = k_cache, v_cache, table, lengths
    both = {"cu_seqlens_q": starts((2, 1, 1)), "max_seqlen_q": 2}
    for q, options in (
        (torch.randn(3, HEADS, WIDTH), {}),
        (torch.randn(3, 1, HEADS, WIDTH), {"sinks": torch.randn(HEADS)}),
        (torch.randn(4, HEADS, WIDTH), {**both, "softcap": 3.0}),
    ):
        result = flashtune.attention_paged(q, *cache, shared_prefix=32, return_lse=True, **options)
        agrees(paged_call(q, *cache, return_lse=True, **options), result)
        plan = flashtune.plan_paged(q, *cache, shared_prefix=32, **options)
        tensors = {name: value for name, value in options.items() if isinstance(value, Tensor)}
        assert torch.equal(plan(q, *cache, **tensors), result[0])
    with pytest.raises(ProblemError, match="shared_prefix is 20 and pages hold 16 keys"):
        flashtune.attention_paged(q[:3], *cache, shared_prefix=20)
    with pytest.raises(ProblemError, match="shared_prefix does not go with window"):
        flashtune.attention_paged(q[:3], *cache, shared_prefix=16, window=(40, 0))
    for place in (2, 3):
        listed: list[Any] = list(cache)
        listed[place] = listed[place].tolist()
        with pytest.raises(ProblemError, match="is a list: pass a torch tensor"):
            flashtune.attention_paged(q[:3], *listed, shared_prefix=32)
    none = k_cache, v_cache, table[:0], lengths[:0]
    for q in (torch.randn(0, HEADS, WIDTH), torch.randn(0, 2, HEADS, WIDTH)):
        out, lse = flashtune.attention_paged(q, *none, shared_prefix=32, return_lse=True)
        assert out.shape == q.shape
        assert torch.equal(lse, flashtune.attention_paged(q, *none, return_lse=True)[1])
        assert flashtune.plan_paged(q, *none, shared_prefix=32)(q, *none).shape == q.shape


def test_a_plan_with_a_shared_prefix_keeps_what_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = paged((40, 33))
    cache.block_table[1, :1] = cache.block_table[0, :1]
    q = torch.randn(2, HEADS, WIDTH)
    plan = flashtune.plan_paged(q, *cache, shared_prefix=16, scale=-0.2, return_lse=True)
    out, lse = plan(q, *cache)
    agrees(paged_call(q, *cache, scale=-0.2, return_lse=True), (out, lse))
    forget_servers()
    monkeypatch.delattr("flashtune.feature_calls.prepared")
    assert torch.equal(plan(q, *cache)[0], out)


def test_plans() -> None:
    q, k, v = dense()
    sinks = torch.randn(HEADS)
    plan = flashtune.plan(q, k, v, causal=True, window=(5, 0), sinks=sinks, scale=-0.2)
    call = dense_call(q, k, v, causal=True, window=(5, 0), sinks=sinks, scale=-0.2, return_lse=False)
    torch.testing.assert_close(plan(q, k, v, sinks=sinks).double(), expected(call)[0], atol=2e-5, rtol=2e-5)
    for wrong in ((q, k, v, {}), (q[:1], k[:1], v[:1], {"sinks": sinks}), (q, k, v, {"sinks": sinks[:2]})):
        with pytest.raises(ProblemError, match="differ from the planned ones"):
            plan(*wrong[:3], **wrong[3])
    plain = flashtune.plan(q, k, v)
    with pytest.raises(ProblemError, match="differ from the planned ones"):
        plain(q, k, v, sinks=sinks)
    with pytest.raises(ProblemError, match="differ from the planned ones"):
        plan(q, k, v, sinks=sinks, q_scale=torch.ones(1))
    bias, mask = torch.randn(len(q), 1, 1, k.shape[2]), torch.ones(1, 1, 1, k.shape[2], dtype=torch.bool)
    masked = flashtune.plan(q, k, v, attn_mask=mask)
    with pytest.raises(ProblemError, match="attn_bias and attn_mask are both given"):
        masked(q, k, v, attn_mask=mask, attn_bias=bias)

    given = packed()
    ragged = flashtune.plan_varlen(*given, causal=True)
    q, k, v, begins, ends, *_ = given
    out = ragged(q, k, v, begins, ends)
    assert not torch.equal(ragged(q, k, v, starts((5, 5, 5, 5, 5)), ends), out), "lengths are read anew"
    token = torch.randn(len(KEYS), HEADS, WIDTH)
    cache = paged()
    decoding = flashtune.plan_paged(token, *cache, return_lse=True)
    agrees(paged_call(token, *cache, return_lse=True), decoding(token, *cache))
    shorter = cache._replace(seqlens_k=cache.seqlens_k // 2)
    agrees(paged_call(token, *shorter, return_lse=True), decoding(token, *shorter))
    with pytest.raises(ProblemError, match="v_cache is None where the plan has a tensor"):
        decoding(token, cache.k_cache, None, *cache[2:])
    latent = flashtune.plan_paged(token, cache.k_cache, None, *cache[2:], value_head_dim=WIDTH // 2)
    with pytest.raises(ProblemError, match="or the other way round"):
        latent(token, *cache)


def test_explanations() -> None:
    told = flashtune.explain(*dense(), causal=True, window=(5, 0), softcap=2.0)
    assert told.problem.window_left == 5
    assert "window=5" in told.command
    assert "packed=32" in flashtune.explain_varlen(*packed(), causal=True).command
    token = torch.randn(len(KEYS), HEADS, WIDTH)
    assert "page_size=16" in flashtune.explain_paged(token, *paged()).command


def test_gradients() -> None:
    def gradients(attend: Callable[..., Tensor], **options: Any) -> list[Tensor]:
        torch.manual_seed(1)
        tensors = [tensor.requires_grad_() for tensor in dense(2, 33, 28)]
        sinks = torch.zeros(HEADS, requires_grad=True)
        attend(*tensors, sinks=sinks, causal=True, window=(5, 0), softcap=2.0).square().sum().backward()
        return [tensor.grad for tensor in (*tensors, sinks) if tensor.grad is not None]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", flashtune.FlashtuneWarning)
        found = gradients(flashtune.attention)
        by_operator = gradients(compiled(flashtune.attention))
    assert len(found) == 4
    torch.testing.assert_close(by_operator, found)
    right = gradients(in_float64)
    for gradient, wanted in zip(found, right, strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-4, rtol=1e-4)


def in_float64(q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor, **_: object) -> Tensor:
    """Causal attention with a window of 5, a cap of 2 and sinks, by operators that autograd knows."""
    k, v = k.double().repeat_interleave(2, 1), v.double().repeat_interleave(2, 1)
    scores = 2 * torch.tanh(q.double() @ k.mT * WIDTH**-0.5 / 2)
    place = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    key = torch.arange(k.shape[2])
    scores = scores.masked_fill((key > place) | (key < place - 5), -torch.inf)
    sink = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v


def test_what_has_no_gradient_says_so() -> None:
    q = torch.randn(len(KEYS), HEADS, WIDTH, requires_grad=True)
    with pytest.raises(ProblemError, match="attention of sequences in pages has no backward pass"):
        flashtune.attention_paged(q, *paged())


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def test_compilers_see_one_operator() -> None:
    q, k, v = dense()
    sinks = torch.randn(HEADS)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
        return flashtune.attention(
            q, k, v, causal=True, window=(5, 0), softcap=2.0, sinks=sinks, return_lse=True
        )

    torch.testing.assert_close(compiled(attend)(q, k, v, sinks), attend(q, k, v, sinks))
    given = packed()
    tensors, longest = given[:5], given[5:]

    def ragged(*tensors: Any) -> Any:
        return flashtune.attention_varlen(*tensors, *longest, causal=True)

    torch.testing.assert_close(compiled(ragged)(*tensors), ragged(*tensors))
    token, cache = torch.randn(len(KEYS), HEADS, WIDTH), paged()

    def decode(token: Tensor, *cache: Tensor) -> Any:
        return flashtune.attention_paged(token, *cache, return_lse=True)

    torch.testing.assert_close(compiled(decode)(token, *cache), decode(token, *cache))
