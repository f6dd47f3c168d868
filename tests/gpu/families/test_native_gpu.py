"""Tests of a native family on its GPU together with portable families."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flashtune
from flashtune.core.errors import KernelError
from flashtune.core.notices import FlashtuneWarning
from flashtune.core.record import Selection
from flashtune.core.target import Target, device_target
from flashtune.db.eligibility import by_problem
from flashtune.db.store import Store, open_store
from flashtune.dispatch.bound_request import KernelKey
from flashtune.dispatch.tables import Tables
from flashtune.request.call import dense_call
from flashtune.request.read_call import read_call
from flashtune.runtime.kernel_loader import KernelLoader, LoadedKernel
from flashtune.templates.registry import find_family
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.request import Budget, SearchRequest, SearchResult
from tests.gpu.hopper.hopper_calls import NATIVE, assert_right, attention, tensors
from tests.gpu.marks import ON_HOPPER, SERVED
from tests.support.runtime import Tuned, using

pytestmark = [
    *SERVED,
    ON_HOPPER,
]


def family_of(*inputs: Tensor) -> str:
    told = flashtune.explain(*inputs, causal=True, prefer="generated")
    assert told.selection is not None
    return told.selection.record.family


class PortableLoader(KernelLoader):
    """Refuses native kernels."""

    def load(self, selection: Selection, target: Target, key: KernelKey) -> LoadedKernel:
        if selection.record.family == NATIVE:
            raise KernelError("AttributeError: this Triton calls it otherwise")
        return super().load(selection, target, key)


def test_failed_native_kernel_is_replaced_by_a_portable_one() -> None:
    q, k, v = tensors()
    with (
        using(loader=PortableLoader()),
        pytest.warns(FlashtuneWarning, match="calls it otherwise, so a default config serves"),
    ):
        out = attention(q, k, v)
    assert_right(out, q, k, v)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "search.sqlite")) as opened:
        yield opened


def searched(store: Store) -> SearchResult:
    q, k, v = tensors()
    problem = read_call(dense_call(q, k, v, causal=True, prefer="generated")).problem
    request = SearchRequest(problem=problem, target=device_target(), device=0, budget=Budget(16, 60.0, None))
    return run_search(request, store)


@pytest.mark.slow
def test_joint_search_stores_a_fallback_for_other_tensors(store: Store) -> None:
    result = searched(store)
    assert result.best is not None
    if find_family(result.best.family).interpreted:
        assert result.fallback is None
        return
    assert result.best.resources is not None
    assert result.best.resources.warps in (8, 12, 16)
    assert result.fallback is not None
    records = [row.record for row in (*store.selections(), *store.fallbacks())]
    inputs = tensors()
    odd = [torch.nn.functional.pad(tensor, (0, 1))[..., :-1] for tensor in inputs]
    with using(Tuned(Tables(by_problem(records), {}))):
        assert family_of(*inputs) == result.best.family
        assert family_of(*odd) == result.fallback.family
