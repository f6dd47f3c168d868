"""Tests of torch's tools around calls: operation counts, meta tensors and `torch.jit.trace`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import flashtune
from flashtune.integrations.flash_attn import flash_attn_2

STARTS = torch.tensor([0, 9, 20], dtype=torch.int32)
QUERIES, KEYS, VALUES = (2, 4, 20, 16), (2, 2, 30, 16), (2, 2, 30, 24)


def drawn(*shapes: tuple[int, ...], requires_grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=requires_grad) for shape in shapes]


def flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"return_lse": True}, {"softcap": 5.0}], ids=str)
def test_operations_are_counted_as_those_of_sdpa(options: dict[str, Any]) -> None:
    tensors = drawn(QUERIES, KEYS, VALUES, requires_grad=True)

    def both() -> None:
        result = flashtune.attention(*tensors, **options)
        (result if isinstance(result, Tensor) else result[0]).sum().backward()

    forward = sdpa_flop_count(QUERIES, KEYS, VALUES)
    out = *QUERIES[:3], VALUES[3]
    with torch.no_grad():
        assert flops(lambda: flashtune.attention(*tensors, **options)) == forward
    assert flops(both) == forward + sdpa_backward_flop_count(out, QUERIES, KEYS, VALUES)


def test_operations_of_packed_and_paged_calls_are_those_of_their_lengths() -> None:
    q, k = drawn((20, 4, 16), (20, 2, 16))
    pages = torch.randn(4, 16, 2, 16)
    table, lengths = torch.arange(4, dtype=torch.int32).view(2, 2), torch.tensor([20, 3], dtype=torch.int32)
    pairs = 9 * 9 + 11 * 11
    assert flops(lambda: flashtune.attention_varlen(q, k, k, STARTS, STARTS, 11, 11)) == 4 * 4 * 16 * pairs
    paged = flops(lambda: flashtune.attention_paged(q[:2], pages, pages, table, lengths))
    assert paged == 4 * 4 * 16 * 23


def test_operations_of_plans_are_counted() -> None:
    tensors = drawn(QUERIES, QUERIES, QUERIES)
    plan = flashtune.plan(*tensors)
    assert flops(lambda: plan(*tensors)) == sdpa_flop_count(QUERIES, QUERIES, QUERIES)


def test_counters_that_are_older_than_the_operators_count() -> None:
    tensors = drawn(QUERIES, QUERIES, QUERIES)
    counter = FlopCounterMode(display=False)
    counter.flop_registry.clear()
    with counter:
        flashtune.attention(*tensors)
    assert counter.get_total_flops() == sdpa_flop_count(QUERIES, QUERIES, QUERIES)


META = torch.device("meta")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"return_lse": True}, {"softcap": 5.0}, {"layout": "bshd", "window": (5, 0), "return_lse": True}],
    ids=str,
)
def test_meta_tensors_give_shapes_and_types(options: dict[str, Any], dtype: torch.dtype) -> None:
    def call(device: str) -> list[Tensor]:
        inputs = [tensor.to(device, dtype).detach() for tensor in drawn(QUERIES, KEYS, VALUES)]
        if "layout" in options:
            inputs = [tensor.transpose(1, 2) for tensor in inputs]
        for tensor in inputs:
            tensor.requires_grad_()
        result = flashtune.attention(*inputs, **options)
        results = list(result) if isinstance(result, tuple) else [result]
        return [*results, *torch.autograd.grad(results[0].sum(), inputs)]

    for result, expected in zip(call("meta"), call("cpu"), strict=True):
        assert (result.device, result.dtype, result.shape) == (META, expected.dtype, expected.shape)


def test_meta_tensors_of_packed_and_paged_calls() -> None:
    with META:
        q, pages = torch.empty(20, 4, 16), torch.empty(4, 16, 2, 16)
        starts, table = torch.empty(3, dtype=torch.int32), torch.empty(2, 2, dtype=torch.int32)
        lengths = torch.empty(2, dtype=torch.int32)
    out, lse = flashtune.attention_varlen(q, q, q, starts, starts, 11, 11, return_lse=True)
    assert (out.shape, lse.shape, out.device) == ((20, 4, 16), (4, 20), META)
    assert flashtune.attention_paged(q[:2], pages, pages, table, lengths).shape == (2, 4, 16)
    cached = flash_attn_2.flash_attn_with_kvcache(
        q[:2, None], pages, pages, q[:2, None, :2], q[:2, None, :2], cache_seqlens=lengths, block_table=table
    )
    assert isinstance(cached, Tensor)
    assert cached.shape == (2, 1, 4, 16)
    dense = [torch.empty(QUERIES, device=META)] * 3
    assert flashtune.plan(*dense)(*dense).is_meta
    assert flashtune.explain(*dense).backend == "none"


def packed(q: Tensor) -> Tensor:
    return flashtune.attention_varlen(q[0], q[0], q[0], STARTS, STARTS, 11, 11, causal=True)


def flash(q: Tensor) -> Tensor:
    out = flash_attn_2.flash_attn_func(q, q, q, causal=True, softcap=5.0)
    assert isinstance(out, Tensor)
    return out


def kv_cache(q: Tensor) -> Tensor:
    lengths = torch.full((1,), 20, dtype=torch.int32)
    out = flash_attn_2.flash_attn_with_kvcache(q[:, :1], q, q, cache_seqlens=lengths)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "call",
    [
        lambda q: flashtune.attention(q, q, q, layout="bshd"),
        lambda q: flashtune.attention(q, q, q, layout="bshd", window=(5, 0)),
        lambda q: flashtune.attention(q, q, q, layout="bshd", return_lse=True)[1],
        packed,
        flash,
        kv_cache,
    ],
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_traced_programs_compute_other_inputs(call: Callable[[Tensor], Tensor], requires_grad: bool) -> None:
    q = drawn((1, 20, 2, 16), requires_grad=requires_grad)[0]
    call(q)  # also with an executor in the cache
    traced = torch.jit.trace(call, (q,))
    other = (q.detach() + torch.randn_like(q)).requires_grad_(requires_grad)
    torch.testing.assert_close(traced(other), call(other))
    if requires_grad and call is not kv_cache:
        gradient, wanted = (torch.autograd.grad(run(other).square().sum(), other) for run in (traced, call))
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traced_plans_compute_other_inputs() -> None:
    q, other = drawn((1, 2, 20, 16), (1, 2, 20, 16))
    plan = flashtune.plan(q, q, q)
    traced = torch.jit.trace(lambda q: plan(q, q, q), (q,))
    torch.testing.assert_close(traced(other), plan(other, other, other))
