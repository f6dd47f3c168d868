"""Tests of a native family on its GPU together with portable families."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashtune
from flashtune.core.errors import KernelError
from flashtune.core.notices import FlashtuneWarning
from flashtune.core.record import Selection
from flashtune.core.target import device_target
from flashtune.db.eligibility import by_problem
from flashtune.db.store import Store, open_store
from flashtune.dispatch import platform
from flashtune.dispatch.tables import Tables
from flashtune.request.call import dense_call
from flashtune.request.read_call import read_call
from flashtune.runtime.kernel_loader import LoadedKernel
from flashtune.runtime.session import SESSION
from flashtune.templates.registry import find_family
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.request import Budget, SearchRequest, SearchResult
from tests.gpu.marks import ON_HOPPER, SERVED

NATIVE, PORTABLE = "forward_hopper", "forward_q_outer"
Triple = tuple[Tensor, Tensor, Tensor]

pytestmark = [
    *SERVED,
    ON_HOPPER,
]


def tensors(kind: str, head_dim: int = 128) -> Triple:
    """Queries, keys and values with the strides of a kind, and equal values for all kinds."""
    generator = torch.Generator("cuda").manual_seed(head_dim)
    plain = [
        torch.randn(2, heads, 700, head_dim, dtype=torch.bfloat16, device="cuda", generator=generator)
        for heads in (8, 2, 2)
    ]
    q, k, v = (placed(tensor, kind) for tensor in plain)
    return q, k, v


def placed(tensor: Tensor, kind: str) -> Tensor:
    batch, heads, length, width = tensor.shape
    if kind == "aligned":
        return tensor
    if kind == "odd rows":
        room = tensor.new_empty(batch, heads, length, width + 1)[..., :width]
    elif kind == "odd start":
        room = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    else:
        assert kind == "packed"
        room = tensor.new_empty(batch, length, heads, width + 8)[..., :width].transpose(1, 2)
    return room.copy_(tensor)


def family_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[str, str]:
    told = flashtune.explain(q, k, v, causal=True, prefer="generated")
    assert told.selection is not None
    return told.selection.record.family, told.reason


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("kind", "family"),
    [("aligned", NATIVE), ("packed", NATIVE), ("odd rows", PORTABLE), ("odd start", PORTABLE)],
)
def test_each_kind_of_tensor_is_served_by_a_supporting_family(kind: str, family: str, head_dim: int) -> None:
    q, k, v = tensors(kind, head_dim)
    served, reason = family_of(q, k, v)
    assert served == family
    assert (f"{NATIVE} would serve but cannot address" in reason) is (family == PORTABLE)
    expected = scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    out = flashtune.attention(q, k, v, causal=True, prefer="generated")
    torch.testing.assert_close(out.double(), expected, atol=1.6e-2, rtol=1.6e-2)
    planned = flashtune.plan(q, k, v, causal=True, prefer="generated")
    assert torch.equal(planned(q, k, v), out)


def test_failed_native_kernel_is_replaced_by_a_portable_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SESSION.loader.load

    def refuse_native(selection: Selection, *rest: object) -> LoadedKernel:
        if selection.record.family == NATIVE:
            raise KernelError("AttributeError: this Triton calls it otherwise")
        return real(selection, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(SESSION.loader, "load", refuse_native)
    q, k, v = tensors("aligned")
    with pytest.warns(FlashtuneWarning, match="calls it otherwise, so a default config serves"):
        out = flashtune.attention(q, k, v, causal=True, prefer="generated")
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected, atol=1.6e-2, rtol=1.6e-2)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "search.sqlite")) as opened:
        yield opened


def searched(store: Store) -> SearchResult:
    q, k, v = tensors("aligned")
    problem = read_call(dense_call(q, k, v, causal=True, prefer="generated")).problem
    request = SearchRequest(problem=problem, target=device_target(), device=0, budget=Budget(16, 60.0, None))
    return run_search(request, store)


@pytest.mark.slow
def test_joint_search_stores_a_fallback_for_other_tensors(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = searched(store)
    assert result.best is not None
    if find_family(result.best.family).interpreted:
        assert result.fallback is None
        return
    assert result.best.resources is not None
    assert result.best.resources.warps in (8, 12, 16)
    assert result.fallback is not None
    records = [row.record for row in (*store.selections(), *store.fallbacks())]
    monkeypatch.setattr(platform, "tuned_records", lambda _: Tables(by_problem(records), {}))
    assert family_of(*tensors("aligned"))[0] == result.best.family
    assert family_of(*tensors("odd rows"))[0] == result.fallback.family
