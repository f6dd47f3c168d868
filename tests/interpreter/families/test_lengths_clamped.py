"""Tests that kernels read no key past a block table or a tensor for any lengths.

The API refuses such lengths on the CPU, so kernels are prepared here without its checks.
"""

from typing import Any

import pytest
import torch

from flashtune.dispatch.bound_request import BoundRequest
from flashtune.request.call import Call, dense_call, paged_call
from flashtune.request.request import Result
from flashtune.runtime.kernel_loader import KernelLoader
from flashtune.runtime.prepare import prepare
from tests.interpreter.feature_calls import HEADS, KV_HEADS, WIDTH
from tests.problems.features import QUERIES, starts

pytestmark = pytest.mark.usefixtures("fresh_runtime")

PAGE, COLUMNS = 16, 3
PACKAGE = PAGE * COLUMNS
INT = torch.int32


def unchecked(call: Call, needs_grad: bool = False) -> Result:
    server = prepare(BoundRequest.of(call, needs_grad), KernelLoader())
    return server(call.q, call.k, call.v, call.scale, call.side)


def pages(q: torch.Tensor, lengths: list[int], **options: Any) -> Call:
    """A paged call whose table is a part of a wider one: page 0, behind each row, holds NaN."""
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
