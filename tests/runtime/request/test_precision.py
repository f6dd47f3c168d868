"""Tests of torch's precision of float32 products: it is part of the problem and of the cache's key."""

from collections.abc import Callable, Iterator

import pytest
import torch

from flashtune.core.problem import Dtype
from flashtune.request.call import dense_call
from flashtune.request.read_call import read_call
from flashtune.runtime.call_key import call_key


@pytest.fixture(autouse=True)
def highest_afterwards() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def allow_by_backend() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def allow_by_flag() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


ALLOWED = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "backend": allow_by_backend,
    "flag": allow_by_flag,
}


@pytest.mark.parametrize("allow", ALLOWED.values(), ids=ALLOWED)
def test_tf32_is_a_type_of_the_problem_where_torch_allows_it(allow: Callable[[], object]) -> None:
    q = torch.randn(1, 2, 16, 64, requires_grad=True)
    call = dense_call(q, q, q)
    precise, key = read_call(call), call_key(call)
    allow()
    request = read_call(call)
    assert (precise.problem.dtype, request.problem.dtype) == (Dtype.FP32, Dtype.TF32)
    assert request.backward.dtype is Dtype.TF32
    assert request.out_dtype is torch.float32
    assert call_key(call) != key
    torch.set_float32_matmul_precision("highest")
    assert call_key(call) == key


def test_the_setting_does_not_concern_other_types() -> None:
    q = torch.randn(1, 2, 16, 64, dtype=torch.bfloat16)
    call = dense_call(q, q, q)
    before = read_call(call).problem, call_key(call)
    torch.set_float32_matmul_precision("high")
    assert (read_call(call).problem, call_key(call)) == before
