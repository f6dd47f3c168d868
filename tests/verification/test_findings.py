"""Tests of the checks of launches: results, determinism, stray writes, inputs, and torch's thread count."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor

from flashtune import testing
from flashtune.core.errors import KernelError
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Bias, Direction
from flashtune.core.target import find_target
from flashtune.launch.binding import Binary
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.verification import check, comparison
from flashtune.verification.cases import Case, Level
from flashtune.verification.check import one_thread
from flashtune.verification.inputs.prepared import Prepared, prepare
from flashtune.verification.probes import Probe
from tests.verification.launches import launch_by

CPU = torch.device("cpu")
H200 = find_target("h200")
PROBLEM = testing.problem("heads=2,kv_heads=1,seqlen_q=9,seqlen_kv=20,head_dim=16,dtype=fp32")
CASE = Case(problem=PROBLEM, probe=Probe.RANDOM, block=16, scale=0.25, repeats=3)
FAMILY = find_family("forward_q_outer")
KERNEL = render(FAMILY, PROBLEM, FAMILY.default(PROBLEM, H200), Specialization(lse=True))

Spoil = Callable[[int, Tensor, Tensor], object]


def failures(monkeypatch: pytest.MonkeyPatch, spoil: Spoil, allocating: bool = False) -> set[str]:
    """The errors of correct attention after `spoil` changed launch, output and log-sum-exp."""
    prepared: Prepared = prepare(CASE, Alignment.SIXTEEN, CPU, 1)
    launches = 0

    def launch(tensors: tuple[Tensor, ...], _: float, __: object, allocate: Any) -> None:
        q, k, v, out, lse = tensors
        nonlocal launches
        scores = 0.25 * q.double() @ k.double().expand(-1, 2, -1, -1).mT
        out.copy_(scores.softmax(-1) @ v.double().expand(-1, 2, -1, -1))
        lse.copy_(scores.logsumexp(-1))
        spoil(launches, allocate((4,), CPU) if allocating else out, lse)
        launches += 1

    launch_by(monkeypatch, launch)
    pass_ = comparison.forward_pass(KERNEL, CASE, prepared)
    findings = list(comparison.launch_findings(KERNEL, None, CASE, pass_, H200, 0))
    assert launches == CASE.repeats
    return {finding.what.partition(": ")[2] for finding in findings if not finding.holds()}


def outside(tensor: Tensor, steps: int) -> Tensor:
    """The element at a distance before a tensor's first one."""
    return torch.as_strided(tensor, (1,), (1,), tensor.storage_offset() - steps)


def test_correct_launches_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failures(monkeypatch, lambda launch, out, lse: None) == set()


@pytest.mark.parametrize("launch", [1, 2])
@pytest.mark.parametrize("tensor", [0, 1], ids=["out", "lse"])
def test_launches_must_be_bitwise_equal(monkeypatch: pytest.MonkeyPatch, launch: int, tensor: int) -> None:
    def spoil(number: int, *written: Tensor) -> None:
        if number == launch:
            written[tensor][0, 1, 3] += 1e-3

    assert failures(monkeypatch, spoil) == {"elements unlike an earlier launch's"}


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda number, out, lse: out[0, 0, 2].mul_(1.01), {"row errors"}),
        (lambda number, out, lse: lse[0, 0, 2].add_(1e-3), {"log-sum-exp errors"}),
        (lambda number, out, lse: outside(out, 1).fill_(1.0), {"writes around out"}),
        (lambda number, out, lse: outside(lse, 1).fill_(1.0), {"writes around lse"}),
    ],
    ids=["a row", "a log-sum-exp", "before out", "before lse"],
)
def test_errors_are_reported(monkeypatch: pytest.MonkeyPatch, spoil: Spoil, expected: set[str]) -> None:
    assert failures(monkeypatch, spoil) == expected


def test_unwritten_elements_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = failures(monkeypatch, lambda number, out, lse: out[0, 0, 2].fill_(float("nan")))
    assert "elements not written or not finite" in messages


def test_writes_around_a_workspace_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = failures(monkeypatch, lambda number, workspace, _: outside(workspace, 1).fill_(1.0), True)
    assert messages == {"writes around a workspace"}


BF16 = testing.problem("heads=2,kv_heads=1,seqlen_q=9,seqlen_kv=20,head_dim=64,dtype=bf16")


@pytest.fixture
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


@pytest.mark.usefixtures("two_threads")
def test_thread_count_of_other_threads_is_unchanged() -> None:
    with one_thread():
        assert (torch.get_num_threads(), of_a_new_thread()) == (1, 2)
    assert (torch.get_num_threads(), of_a_new_thread()) == (2, 2)


@pytest.mark.usefixtures("two_threads")
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


@pytest.mark.usefixtures("two_threads")
def test_check_uses_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fail(*_: object, **__: object) -> None:
        seen.append(torch.get_num_threads())
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(check, "case_findings", fail)
    config = FAMILY.default(BF16, H200)
    kernel = render(FAMILY, BF16, config, Specialization())
    arguments = (kernel, BF16, config, H200, torch.device("cpu"), Level.QUICK)
    with pytest.raises(KernelError, match="the GPU is gone"):
        check.check_rendered(*arguments, compiled=cast("Binary", object()))
    assert (*seen, torch.get_num_threads()) == (1, 2)


def test_strict_checks_include_backward_kernels_with_and_without_the_gradient_of_a_bias() -> None:
    backward = msgspec.structs.replace(BF16, direction=Direction.BACKWARD, bias=Bias.ADDITIVE)
    for assumed in (Specialization(), Specialization(constant_bias=True)):
        variants = [
            specialization for problem, specialization in check._variants(backward, assumed, Level.STRICT)
        ]
        assert {specialization.constant_bias for specialization in variants} == {msgspec.UNSET, True}
        assert [specialization for _, specialization in check._variants(backward, assumed, Level.FULL)] == [
            assumed
        ]
    forward = msgspec.structs.replace(BF16, bias=Bias.ADDITIVE)
    strict = [
        specialization for _, specialization in check._variants(forward, Specialization(), Level.STRICT)
    ]
    assert {specialization.constant_bias for specialization in strict} == {msgspec.UNSET}
