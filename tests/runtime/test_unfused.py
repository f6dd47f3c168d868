"""Tests of unfused attention against float64, also with features, and of merging two parts."""

import itertools
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from flashtune import merge_attention
from flashtune.core.errors import ProblemError
from flashtune.core.features.records import ExtraInputs
from flashtune.core.problem import Causal
from flashtune.dispatch.decision import Backend
from flashtune.request.call import Call, dense_call, paged_call, varlen_call
from flashtune.request.read_call import read_call
from flashtune.runtime.executors import baseline_executor
from flashtune.runtime.unfused import unfused_attention
from flashtune.tuner.workloads.shapes import parse_shape
from flashtune.verification.reference.forward import expect, sample
from flashtune.verification.tolerance import worst_ratio
from tests.problems.features import KEYS, QUERIES, agrees, paged, starts
from tests.support.unfused import problem_of, unfused

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = [(1, 1), (1, 9), (9, 1), (12, 12), (7, 19), (19, 7)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensors(
    lengths: tuple[int, int], heads: tuple[int, int], dtype: torch.dtype, layout: str, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with head dims 24, 24, 16 and a batch of 2."""
    shapes = ((heads[0], lengths[0], 24), (heads[1], lengths[1], 24), (heads[1], lengths[1], 16))
    made = []
    for head, seqlen, width in shapes:
        if layout == "bhsd":
            tensor = torch.randn(2, head, seqlen, width, device=device)
        else:
            tensor = torch.randn(2, seqlen, head, width + 1, device=device)[..., 1:].transpose(1, 2)
        made.append(
            tensor.to(dtype) if layout == "bhsd" else tensor.to(dtype, memory_format=torch.preserve_format)
        )
    return made[0], made[1], made[2]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", list(Causal))
def test_unfused_attention_is_within_kernel_tolerances(
    causal: Causal, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    choices = itertools.product(LENGTHS, [(2, 2), (4, 2), (3, 1)], ["bhsd", "bshd"], [0.2, -0.7, 0.0, 3.0])
    for lengths, heads, layout, scale in choices:
        q, k, v = tensors(lengths, heads, dtype, layout, device)
        problem = problem_of(q, k, v, causal)
        out, lse = unfused(q, k, v, scale=scale, causal=causal, return_lse=True)
        assert lse is not None
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        everything = sample(problem, torch.Generator(device).manual_seed(0))
        # The reference, as kernels do, takes the sign of a scale with the queries.
        expected = expect(problem, -q if scale < 0 else q, k, v, abs(scale), everything)
        assert worst_ratio(out.flatten(0, 1), expected.out, expected.allowed) <= 1
        lse_ratio = worst_ratio(lse.flatten(0, 1)[..., None], expected.lse[..., None], expected.lse_allowed)
        assert lse_ratio <= 1


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv", "batch"), [(0, 5, 2), (5, 0, 2), (0, 0, 2), (5, 6, 0)])
def test_empty_problems(seqlen_q: int, seqlen_kv: int, batch: int) -> None:
    q, k, v = tensors((seqlen_q, seqlen_kv), (4, 2), torch.bfloat16, "bhsd", "cpu")
    out, lse = unfused(q[:batch], k[:batch], v[:batch], scale=0.2, return_lse=True)
    assert torch.equal(out, torch.zeros(batch, 4, seqlen_q, 16, dtype=torch.bfloat16))
    assert lse is not None
    assert torch.equal(lse, torch.full((batch, 4, seqlen_q), -torch.inf))


def test_large_scores_of_float16_do_not_overflow() -> None:
    q, k, v = (tensor * 100 for tensor in tensors((6, 6), (1, 1), torch.float16, "bhsd", "cpu"))
    out, lse = unfused(q, k, v, scale=1.0, return_lse=True)
    assert lse is not None
    assert torch.isfinite(out).all()
    assert lse.max() > torch.finfo(torch.float16).max


@pytest.mark.parametrize("lengths", [(5, 7), (7, 5)])
@pytest.mark.parametrize("causal", list(Causal))
def test_inputs_are_not_modified_and_get_gradients(lengths: tuple[int, int], causal: Causal) -> None:
    torch.manual_seed(0)
    inputs = [tensor.requires_grad_() for tensor in tensors(lengths, (4, 2), torch.float32, "bhsd", "cpu")]
    copies = [tensor.detach().clone() for tensor in inputs]
    q, k, v = inputs
    out, lse = unfused(q, k, v, scale=0.2, causal=causal, return_lse=True)
    assert lse is not None
    (out.square().sum() + lse[lse.isfinite()].sum()).backward()
    for tensor, copy in zip(inputs, copies, strict=True):
        assert torch.equal(tensor.detach(), copy)
        assert tensor.grad is not None
        assert torch.isfinite(tensor.grad).all()
        assert tensor.grad.abs().sum() > 0


HEADS = 4
INT = torch.int32
MASKS: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": "top_left", "window": (6, 0)},
    {"window": (4, 2), "sink_tokens": 3},
    {"causal": True, "chunk": 8, "softcap": 0.7},
    {"chunk": 8, "scale": 0.0},
    {"causal": True, "sinks": torch.linspace(-2, 9, HEADS)},
    {"causal": True, "alibi_slopes": torch.linspace(0, 1, HEADS), "window": (9, 0)},
]


def check(call: Call) -> None:
    request = read_call(call)
    assert request.problem.features
    serve = baseline_executor(Backend.UNFUSED, request)
    agrees(call, serve(call.q, call.k, call.v, call.scale, call.side))


def dense(seqlen_q: int, seqlen_kv: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seqlen_q)
    k, v = torch.randn(2, 2, seqlen_kv, 32), torch.randn(2, 2, seqlen_kv, 16)
    return torch.randn(2, HEADS, seqlen_q, 32), k, v


@pytest.mark.parametrize("lengths", [(20, 28), (40, 20)])
def test_dense(lengths: tuple[int, int]) -> None:
    prefix = torch.tensor([0, 11], dtype=INT)
    bias, seen = torch.randn(lengths), torch.rand(2, 1, *lengths) > 0.8
    for options in (*MASKS[1:], {"prefix_lengths": prefix, "causal": True}, {"attn_bias": bias}):
        check(dense_call(*dense(*lengths), return_lse=True, **options))
    check(dense_call(*dense(*lengths), return_lse=True, attn_mask=seen, causal=True))


def test_cache_with_invalid_rows_after_its_length() -> None:
    q, k, v = dense(3, 28)
    k[1, :, 13:] = v[1, :, 13:] = torch.nan
    lengths = torch.tensor([28, 13], dtype=INT)
    check(dense_call(q, k, v, return_lse=True, causal=True, kv_lengths=lengths))


@pytest.mark.parametrize("options", MASKS)
def test_packed(options: dict[str, Any]) -> None:
    q, k = torch.randn(sum(QUERIES), HEADS, 32), torch.randn(sum(KEYS), 2, 32)
    lengths = starts(QUERIES), starts(KEYS), max(QUERIES), max(KEYS)
    check(varlen_call(q, k, k.clone(), *lengths, return_lse=True, **options))


@pytest.mark.parametrize("options", MASKS)
def test_pages(options: dict[str, Any]) -> None:
    check(paged_call(torch.randn(len(KEYS), 2, HEADS, 32), *paged(), return_lse=True, **options))
    q = torch.randn(sum(QUERIES), HEADS, 32)
    both = options | {"cu_seqlens_q": starts(QUERIES), "max_seqlen_q": max(QUERIES), "layout": "hnd"}
    check(paged_call(q, *paged(layout="hnd"), return_lse=True, **both))


def test_bias_of_paged_keys_belongs_to_its_sequence() -> None:
    (problem,) = parse_shape(
        "heads=4,kv_heads=2,seqlen_q=3,seqlen_kv=32,head_dim=16,batch=2,dtype=fp32,bias=additive"
    )
    q, bias = torch.randn(2, 4, 3, 16), torch.randn(2, 4, 3, 32)
    pages = torch.randn(4, 2, 16, 16)
    table = torch.tensor([[2, 0], [1, 3]], dtype=INT)
    k = pages[table.long()].transpose(1, 2).flatten(2, 3)
    side = ExtraInputs(bias=bias)
    expected, _ = unfused_attention(problem, q, k, k, side, scale=0.3)
    paged_problem = msgspec.structs.replace(problem, page_size=16)
    side = side._replace(block_table=table, seqlens_kv=torch.tensor([32, 32], dtype=INT))
    out, _ = unfused_attention(paged_problem, q, pages, pages, side, scale=0.3)
    torch.testing.assert_close(out, expected)


def test_pages_of_8_bits_and_latent_values() -> None:
    cache = paged()
    k, v = ((tensor.nan_to_num() * 20).round().to(torch.int8) for tensor in cache[:2])
    q = torch.randn(len(KEYS), HEADS, 32)
    for shape in ((1,), (2,), (len(k), 2)):
        scales: dict[str, Any] = {"k_scale": torch.rand(shape) / 20, "v_scale": torch.rand(shape) / 20}
        check(paged_call(q, k, v, *cache[2:], return_lse=True, **scales))


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd", "bhd"])
def test_merge_of_two_parts(layout: str) -> None:
    torch.manual_seed(3)
    scores, values = (
        torch.randn(2, 4, 5, 9, dtype=torch.float64),
        torch.randn(2, 4, 9, 8, dtype=torch.float64),
    )
    scores[0, 1, 2, :4] = scores[1, 3, 4] = -torch.inf
    first, other, both = (
        _part(scores[..., keys], values[:, :, keys], layout) for keys in (slice(4), slice(4, 9), slice(9))
    )
    out, lse = merge_attention(*first, *other, layout=layout)
    torch.testing.assert_close(out, both[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse, both[1], atol=1e-6, rtol=1e-6)
    with pytest.raises(ProblemError, match="pass two parts of one call"):
        merge_attention(*first, other[0][..., :3], other[1], layout=layout)


def test_merged_rows_without_keys_have_zero_gradients() -> None:
    lse = [torch.tensor([[[0.5, -torch.inf]]], requires_grad=True) for _ in range(2)]
    out = [torch.ones(1, 1, 2, 4, requires_grad=True) for _ in range(2)]
    merged, both = merge_attention(out[0], lse[0], out[1], lse[1])
    assert both[0, 0, 1] == -torch.inf
    (merged.sum() + both[0, 0, 0]).backward()
    for part in lse:
        torch.testing.assert_close(part.grad, torch.tensor([[[0.5, 0.0]]]))
    for values in out:
        torch.testing.assert_close(
            values.grad, torch.tensor([0.5, 0.0])[None, None, :, None].expand(1, 1, 2, 4)
        )


def _part(scores: Tensor, values: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    out, lse = scores.softmax(-1).nan_to_num() @ values, scores.logsumexp(-1)
    out, lse = out.float(), lse.float()
    if layout == "bshd":
        return out.transpose(1, 2), lse
    if layout == "thd":
        return out[0].transpose(0, 1), lse[0]
    return (out[:, :, 0], lse[:, :, 0]) if layout == "bhd" else (out, lse)
