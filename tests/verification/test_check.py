"""Tests that a check restores torch's thread count."""

import threading
from collections.abc import Iterator
from typing import cast

import msgspec
import pytest
import torch

from flashtune import testing
from flashtune.core.errors import KernelError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Bias, Direction
from flashtune.core.target import find_target
from flashtune.launch.binding import Binary
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.verification import check
from flashtune.verification.cases import Level
from flashtune.verification.check import one_thread

H200 = find_target("h200")
FAMILY = find_family("forward_q_outer")
PROBLEM = testing.problem("heads=2,kv_heads=1,seqlen_q=9,seqlen_kv=20,head_dim=64,dtype=bf16")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def of_a_new_thread() -> int:
    """The count that a thread has which uses torch for the first time now."""
    counts: list[int] = []
    thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return counts[0]


def test_thread_count_of_other_threads_is_unchanged() -> None:
    with one_thread():
        assert (torch.get_num_threads(), of_a_new_thread()) == (1, 2)
    assert (torch.get_num_threads(), of_a_new_thread()) == (2, 2)


def test_thread_counts_are_per_thread() -> None:
    counts: list[tuple[int, int]] = []

    def check_something() -> None:
        torch.set_num_threads(1)
        # A count is a thread's own from its first use on.
        assert torch.get_num_threads() == 1
        other = threading.Thread(target=lambda: torch.set_num_threads(2))
        other.start()
        other.join()
        with one_thread():
            pass
        counts.append((torch.get_num_threads(), of_a_new_thread()))

    thread = threading.Thread(target=check_something)
    thread.start()
    thread.join()
    assert counts == [(1, 2)]


def test_check_uses_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fail(*_: object, **__: object) -> None:
        seen.append(torch.get_num_threads())
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(check, "case_findings", fail)
    config = FAMILY.default(PROBLEM, H200)
    kernel = render(FAMILY, PROBLEM, config, Specialization())
    arguments = (kernel, PROBLEM, config, H200, torch.device("cpu"), Level.QUICK)
    with pytest.raises(KernelError, match="the GPU is gone"):
        check.check_rendered(*arguments, compiled=cast("Binary", object()))
    assert (*seen, torch.get_num_threads()) == (1, 2)


def test_strict_checks_include_backward_kernels_with_and_without_the_gradient_of_a_bias() -> None:
    backward = msgspec.structs.replace(PROBLEM, direction=Direction.BACKWARD, bias=Bias.ADDITIVE)
    for assumed in (Specialization(), Specialization(constant_bias=True)):
        variants = [
            specialization for problem, specialization in check._variants(backward, assumed, Level.STRICT)
        ]
        assert {specialization.constant_bias for specialization in variants} == {msgspec.UNSET, True}
        assert [specialization for _, specialization in check._variants(backward, assumed, Level.FULL)] == [
            assumed
        ]
    forward = msgspec.structs.replace(PROBLEM, bias=Bias.ADDITIVE)
    strict = [
        specialization for _, specialization in check._variants(forward, Specialization(), Level.STRICT)
    ]
    assert {specialization.constant_bias for specialization in strict} == {msgspec.UNSET}
