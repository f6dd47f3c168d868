"""Tests of calls and plans with features in the interpreter, against float64, and fuzzed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtune
from flashtune.core.errors import ProblemError
from flashtune.dispatch.bound_request import BoundRequest
from flashtune.request.call import Call, dense_call, paged_call
from flashtune.request.request import Result
from flashtune.runtime.kernel_loader import KernelLoader
from flashtune.runtime.prepare import prepare
from flashtune.runtime.session import SESSION, Session
from tests.interpreter.feature_calls import (
    HEADS,
    KV_HEADS,
    WIDTH,
    all_masks,
    check_dense,
    check_paged,
    check_varlen,
    dense,
    packed,
)
from tests.problems.features import KEYS, QUERIES, agrees, expected, paged, starts
from tests.problems.fuzzed_calls import check_fuzzed_calls

pytestmark = pytest.mark.usefixtures("fresh_runtime")


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


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_masked_non_finite_keys_have_no_effect(value: float) -> None:
    q, k, v = dense()
    mask = torch.ones(20, 28, dtype=torch.bool)
    mask[:, 4] = False
    right = flashtune.attention(q, k, v, attn_mask=mask, prefer="generated")
    k[:, :, 4] = value
    assert torch.equal(flashtune.attention(q, k, v, attn_mask=mask, prefer="generated"), right)
    bias = torch.zeros(20, 28).masked_fill(~mask, -torch.inf)
    assert flashtune.attention(q, k, v, attn_bias=bias, prefer="generated").isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(dtype: torch.dtype) -> None:
    q, k, v = (tensor.to(dtype) for tensor in dense())
    bias = torch.randn(20, 28).to(dtype)
    check_dense(q, k, v, 2e-2, causal=True, window=(7, 0), attn_bias=bias, sinks=torch.zeros(HEADS))


def test_packed_sequences() -> None:
    # Dense calls have all masks.
    every_other = list(all_masks(len(QUERIES)))[::2]
    for options in ({}, {"causal": True}, *every_other):
        check_varlen(*packed(), **options)


def test_packed_views_and_other_token_counts() -> None:
    q, k, v, *lengths = packed()
    both = torch.randn(sum(KEYS), 2, KV_HEADS, WIDTH)
    check_varlen(q, both[:, 0], both[:, 1], *lengths, causal=True)
    fewer = starts((3, 2, 1)), starts((3, 5, 7)), 3, 7
    check_varlen(q[:6], k[:15], v[:15], *fewer, causal=True)


def test_decoding() -> None:
    q = torch.randn(len(KEYS), 3, HEADS, WIDTH)
    others = list(all_masks(len(KEYS)))[1::2]
    for options in ({}, *others):
        check_paged(q, *paged(), **options)


@pytest.mark.parametrize("page_size", [1, 4])
def test_decoding_with_small_pages(page_size: int) -> None:
    check_paged(torch.randn(len(KEYS), HEADS, WIDTH), *paged(page_size=page_size))


def test_decoding_of_one_token_with_both_page_layouts() -> None:
    for layout in ("nhd", "hnd"):
        check_paged(torch.randn(len(KEYS), HEADS, WIDTH), *paged(layout=layout), layout=layout)
        check_paged(torch.randn(len(KEYS), 2, HEADS, WIDTH), *paged(layout=layout), layout=layout)


@pytest.mark.parametrize("page_size", [1, 16])
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


@pytest.mark.parametrize("kv_heads", [1, KV_HEADS])
def test_packed_keys_of_8_bits(kv_heads: int) -> None:
    """All sequences have the same scales. Rows of scales that do not exist would be other memory."""
    q, k, v, *lengths = packed()
    k, v = ((tensor[:, :kv_heads] * 20).round().to(torch.int8) for tensor in (k, v))
    for shape in ((1,), (kv_heads,), (1, kv_heads)):
        memory = torch.full((2, 8 * kv_heads), torch.nan)
        scales = memory[:, : len(torch.empty(shape).flatten())]
        scales.copy_(torch.rand(scales.shape) / 20)
        check_varlen(q, k, v, *lengths, k_scale=scales[0].view(shape), v_scale=scales[1].view(shape))


def test_latent_values() -> None:
    cache = paged((40, 17), kv_heads=1, widths=(576, 1))
    q = torch.randn(2, 4, 576)
    result = flashtune.attention_paged(q, cache.k_cache, None, *cache[2:], value_head_dim=512)
    call = paged_call(q, cache.k_cache, None, *cache[2:], value_head_dim=512, return_lse=False)
    torch.testing.assert_close(result.double(), expected(call)[0], atol=2e-5, rtol=2e-5)


def test_empty_queries_or_keys() -> None:
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


@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
def test_random_calls_are_served_or_refused_in_one_sentence(fuzz_count: Callable[[int, int], int]) -> None:
    count = fuzz_count(30, 600)
    served = check_fuzzed_calls(count, (torch.float32, torch.float32, torch.bfloat16))
    assert count / 20 < served < count / 2


PAGE, COLUMNS = 16, 3
PACKAGE = PAGE * COLUMNS
INT = torch.int32


def unchecked(call: Call, needs_grad: bool = False) -> Result:
    server = prepare(BoundRequest.of(call, needs_grad), KernelLoader())
    return server(call.q, call.k, call.v, call.scale, call.side)


def pages(q: torch.Tensor, lengths: list[int], **options: Any) -> Call:
    """A paged call with a part of a wider table. Page 0, behind each row, holds NaN."""
    batch = len(lengths)
    k = torch.randn(batch * COLUMNS + 1, PAGE, KV_HEADS, WIDTH)
    k[0] = torch.nan
    table = torch.zeros(batch, 4 * COLUMNS, dtype=INT)
    table[:, :COLUMNS] = torch.arange(1, batch * COLUMNS + 1).view(batch, COLUMNS)
    seqlens = torch.tensor(lengths, dtype=INT)
    return paged_call(q, k, k.clone(), table[:, :COLUMNS], seqlens, return_lse=True, **options)


@pytest.mark.parametrize(
    "options", [{}, {"window": (7, 0)}, {"causal": False}, {"sink_tokens": 2, "window": (5, 0)}]
)
def test_decoding_does_not_read_past_the_block_table(options: dict[str, Any]) -> None:
    q = torch.randn(4, HEADS, WIDTH)
    check_pages(q, [PACKAGE + 1, PACKAGE + 70, 20, -5], [PACKAGE, PACKAGE, 20, 0], **options)


@pytest.mark.parametrize("options", [{}, {"window": (7, 0)}, {"softcap": 2.0}])
def test_chunked_prefill_does_not_read_past_the_block_table(options: dict[str, Any]) -> None:
    q = torch.randn(sum(QUERIES), HEADS, WIDTH)
    packed = {"cu_seqlens_q": starts(QUERIES), "max_seqlen_q": max(QUERIES)}
    check_pages(
        q,
        [PACKAGE + 5, 17, PACKAGE + 90, PACKAGE + 1, 30],
        [PACKAGE, 17, PACKAGE, PACKAGE, 30],
        **packed,
        **options,
    )


def check_pages(q: torch.Tensor, beyond: list[int], within: list[int], **options: Any) -> None:
    torch.manual_seed(1)
    out, lse = unchecked(pages(q, beyond, **options))
    torch.manual_seed(1)
    right, right_lse = unchecked(pages(q, within, **options))
    assert torch.equal(out, right)
    assert torch.equal(lse, right_lse)
    assert out.isfinite().all()


@pytest.mark.parametrize("seqlen_q", [2, 40])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_dense_lengths_are_clamped_to_the_keys(seqlen_q: int, needs_grad: bool) -> None:
    torch.manual_seed(2)
    q = torch.randn(3, HEADS, seqlen_q, WIDTH, requires_grad=needs_grad)
    wide = torch.full((3, KV_HEADS, 100, WIDTH), torch.nan)
    wide[:, :, :30] = torch.randn(3, KV_HEADS, 30, WIDTH)
    k = wide[:, :, :30].requires_grad_(needs_grad)
    results = []
    for lengths in ([60, 100, -5], [30, 30, 0]):
        call = dense_call(q, k, k, return_lse=True, causal=True, kv_lengths=torch.tensor(lengths, dtype=INT))
        out, lse = unchecked(call, needs_grad)
        grads = torch.autograd.grad(out.sum(), (q, k)) if needs_grad else ()
        results.append((out, lse, *grads))
    for beyond, right in zip(*results, strict=True):
        assert not beyond.isnan().any()
        assert torch.equal(beyond, right)


def test_trees_of_drafts() -> None:
    cache = paged((56, 40, 5))
    tree = torch.rand(3, 7, 7) < 0.5
    q, few = torch.randn(3, 7, HEADS, WIDTH), torch.randn(8, HEADS, WIDTH)
    for options in (
        {},
        {"causal": False},
        {"window": (9, 3), "causal": False},
        {"sinks": torch.randn(HEADS)},
    ):
        check_paged(q, *cache, tree_mask=tree, **options)
        # Shorter sequences read the first rows and columns.
        short: dict[str, Any] = {"cu_seqlens_q": starts((2, 6, 0)), "max_seqlen_q": 7, **options}
        check_paged(few, *cache, tree_mask=tree, **short)
    check_paged(q, *cache, tree_mask=tree[:1].expand(3, -1, -1))
    for wrong in (tree[:, :6], tree[:2], tree[0], tree.int(), tree.mT):
        with pytest.raises(ProblemError, match="tree_mask"):
            flashtune.attention_paged(q, *cache, tree_mask=wrong)
    with pytest.raises(TypeError, match="tree_mask"):
        flashtune.attention(*dense(), tree_mask=tree)  # type: ignore[call-overload]


def test_a_tree_after_a_shared_prefix() -> None:
    k_cache, v_cache, table, lengths = paged((56, 40, 35))
    table[1:, :1] = table[0, :1]
    cache = k_cache, v_cache, table, lengths
    q, tree = torch.randn(3, 7, HEADS, WIDTH), torch.rand(3, 7, 7) < 0.5
    result = flashtune.attention_paged(q, *cache, tree_mask=tree, shared_prefix=16, return_lse=True)
    agrees(paged_call(q, *cache, tree_mask=tree, return_lse=True), result)


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
