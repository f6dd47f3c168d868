"""Verifies plain torch instead of a backward kernel, and returns the errors."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from flashtune import testing
from flashtune.core.config import Config, LaunchOptions
from flashtune.core.features.records import ExtraInputs
from flashtune.core.kernel import Alignment, Argument, Kernel, Specialization
from flashtune.core.problem import Problem
from flashtune.core.target import find_target
from flashtune.launch.tensors import BackwardTensors
from flashtune.verification import comparison
from flashtune.verification.cases import Case, Level
from flashtune.verification.comparison import Finding
from flashtune.verification.gradients.cases import companions
from flashtune.verification.gradients.comparison import backward_pass
from flashtune.verification.gradients.inputs import prepare
from tests.verification.gradients.plain_kernel import RIGHT, Hooks, TwoTiles, differentiate
from tests.verification.launches import launch_by

CPU = torch.device("cpu")
H200 = find_target("h200")
SEED = 3
a_problem = functools.partial(
    testing.problem, "heads=4,kv_heads=2,seqlen=100,head_dim=32,value_head_dim=24,dtype=bf16,causal,backward"
)


def a_kernel(dlse: bool) -> Kernel:
    """The attributes of a kernel that the verification reads, without a source."""
    return Kernel(
        "backward_split",
        "backward_split",
        "",
        (Argument("dsinks", "*fp32"),),
        LaunchOptions(num_warps=4, num_stages=1),
        Specialization(alignment=Alignment.EIGHT, lse=dlse),
    )


def of_problem(**fields: object) -> Hooks:
    """A kernel that computes another problem."""
    return Hooks(problem=lambda problem: msgspec.structs.replace(problem, **fields))


def of_gradient(name: str, change: Callable[[Tensor], Tensor]) -> Hooks:
    return Hooks(gradient=lambda gradient, right: change(right) if gradient == name else right)


def unchanged(number: int, tensors: BackwardTensors, allocate: Callable[..., Tensor]) -> None:
    """Leaves the results of a launch."""


def found_at(
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    hooks: Hooks = RIGHT,
    *,
    dlse: bool = False,
    spoil: Callable[[int, BackwardTensors, Callable[..., Tensor]], object] = unchanged,
) -> list[Finding]:
    """All that decides at one problem, after `spoil` changed the results, launch by launch."""
    prepared = prepare(case, Alignment.EIGHT, CPU, SEED, dlse)
    launches = itertools.count()

    def launch(tensors: BackwardTensors, scale: float, side: ExtraInputs, allocate: Any) -> None:
        differentiate(case.problem, tensors, scale, side, hooks)
        spoil(next(launches), tensors, allocate)

    launch_by(monkeypatch, launch)
    kernel = a_kernel(dlse)
    pass_ = backward_pass(kernel, case, prepared)
    findings = list(comparison.launch_findings(kernel, None, case, pass_, H200, 0))
    assert next(launches) == case.repeats
    return findings


def failures(findings: list[Finding]) -> list[str]:
    """The errors, as text."""
    return [f"{finding.what} {finding.figure.item():.3g}" for finding in findings if not finding.holds()]


def refused(
    monkeypatch: pytest.MonkeyPatch,
    problem: Problem,
    hooks: Hooks = RIGHT,
    *,
    level: Level = Level.QUICK,
    config: Config | None = None,
    dlse: bool = False,
) -> list[str]:
    """The errors at the first failing problem of a level."""
    for case in companions(problem, config or TwoTiles(), level, reduced=True):
        wrong = failures(found_at(monkeypatch, case, hooks, dlse=dlse))
        if wrong:
            return wrong
    return []
