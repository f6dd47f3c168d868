"""Tests of plans, shared prefixes, gradients and compiled calls with features, on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtune
from flashtune.core.errors import ProblemError
from flashtune.request.call import dense_call, paged_call
from flashtune.runtime.session import SESSION, Session
from tests.interpreter.feature_calls import HEADS, WIDTH, dense, packed
from tests.problems.features import KEYS, agrees, expected, paged, starts

pytestmark = pytest.mark.usefixtures("fresh_runtime")


def test_shared_prefix() -> None:
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
    for index in (2, 3):
        listed: list[Any] = list(cache)
        listed[index] = listed[index].tolist()
        with pytest.raises(ProblemError, match="is a list: pass a torch tensor"):
            flashtune.attention_paged(q[:3], *listed, shared_prefix=32)
    none = k_cache, v_cache, table[:0], lengths[:0]
    for q in (torch.randn(0, HEADS, WIDTH), torch.randn(0, 2, HEADS, WIDTH)):
        out, lse = flashtune.attention_paged(q, *none, shared_prefix=32, return_lse=True)
        assert out.shape == q.shape
        assert torch.equal(lse, flashtune.attention_paged(q, *none, return_lse=True)[1])
        assert flashtune.plan_paged(q, *none, shared_prefix=32)(q, *none).shape == q.shape


def test_plan_with_a_shared_prefix_caches_its_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = paged((40, 33))
    cache.block_table[1, :1] = cache.block_table[0, :1]
    q = torch.randn(2, HEADS, WIDTH)
    plan = flashtune.plan_paged(q, *cache, shared_prefix=16, scale=-0.2, return_lse=True)
    out, lse = plan(q, *cache)
    agrees(paged_call(q, *cache, scale=-0.2, return_lse=True), (out, lse))
    SESSION.forget()
    monkeypatch.delattr(Session, "prepared")
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

    arguments = packed()
    ragged = flashtune.plan_varlen(*arguments, causal=True)
    q, k, v, begins, ends, *_ = arguments
    out = ragged(q, k, v, begins, ends)
    assert not torch.equal(ragged(q, k, v, starts((5, 5, 5, 5, 5)), ends), out), "lengths are read anew"
    token = torch.randn(len(KEYS), HEADS, WIDTH)
    cache = paged()
    decoding = flashtune.plan_paged(token, *cache, return_lse=True)
    agrees(paged_call(token, *cache, return_lse=True), decoding(token, *cache))
    shorter = cache._replace(seqlens_k=cache.seqlens_k // 2)
    agrees(paged_call(token, *shorter, return_lse=True), decoding(token, *shorter))
    with pytest.raises(ProblemError, match="pass one of v_cache and value_head_dim"):
        decoding(token, cache.k_cache, None, *cache[2:])
    latent = flashtune.plan_paged(token, cache.k_cache, None, *cache[2:], value_head_dim=WIDTH // 2)
    with pytest.raises(ProblemError, match="pass one of v_cache and value_head_dim"):
        latent(token, *cache)


def test_explanations() -> None:
    told = flashtune.explain(*dense(), causal=True, window=(5, 0), softcap=2.0)
    assert told.problem.window_left == 5
    assert "window=5" in told.command
    assert "packed=32" in flashtune.explain_varlen(*packed(), causal=True).command
    token = torch.randn(len(KEYS), HEADS, WIDTH)
    assert "page_size=16" in flashtune.explain_paged(token, *paged()).command


def test_unsupported_gradients_raise() -> None:
    q = torch.randn(len(KEYS), HEADS, WIDTH, requires_grad=True)
    with pytest.raises(ProblemError, match="attention of sequences in pages has no backward pass"):
        flashtune.attention_paged(q, *paged())


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def test_compile_traces_one_operator() -> None:
    q, k, v = dense()
    sinks = torch.randn(HEADS)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
        return flashtune.attention(
            q, k, v, causal=True, window=(5, 0), softcap=2.0, sinks=sinks, return_lse=True
        )

    torch.testing.assert_close(compiled(attend)(q, k, v, sinks), attend(q, k, v, sinks))
    arguments = packed()
    tensors, longest = arguments[:5], arguments[5:]

    def ragged(*tensors: Any) -> Any:
        return flashtune.attention_varlen(*tensors, *longest, causal=True)

    torch.testing.assert_close(compiled(ragged)(*tensors), ragged(*tensors))
    token, cache = torch.randn(len(KEYS), HEADS, WIDTH), paged()

    def decode(token: Tensor, *cache: Tensor) -> Any:
        return flashtune.attention_paged(token, *cache, return_lse=True)

    torch.testing.assert_close(compiled(decode)(token, *cache), decode(token, *cache))
