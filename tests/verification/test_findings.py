"""Tests of the checks of launches: results, determinism, stray writes and inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune import testing
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.target import find_target
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.verification import comparison
from flashtune.verification.cases import Case
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
