"""Proves a kernel: launches it on every case of a level and holds the results against the reference.

What decides is gathered on the device and read once at the end, so that a check costs the launches
and little more.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch
from triton.errors import TritonError

from flashtune.compilation import first_line, interpreting
from flashtune.errors import KernelError
from flashtune.kernel import Specialization
from flashtune.launch import Binary, bind, compile_binary
from flashtune.problem import Causal, Dtype, Problem
from flashtune.proof.cases import Case, Level, companions, far_cases, main_cases
from flashtune.proof.gate import worst_ratio
from flashtune.proof.inputs import Guarded, Role, checksum, guarded_flat, poison, stray_writes
from flashtune.proof.prepared import STEPS_PER_SEED, Prepared, forget, next_seed, prepare, prepare_and_keep
from flashtune.record import Verdict
from flashtune.templates.rendering import render

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.config import Config
    from flashtune.kernel import Kernel
    from flashtune.target import Target
    from flashtune.templates.family import Family

INTERPRETER = "interpreter"
# What a verdict says of a result that is not finite; JSON knows no infinity.
NOT_FINITE = 1e9
STRICT_REPEATS = 50


class Finding(NamedTuple):
    """One figure that decides: it must not exceed `limit`, nor be NaN.

    Attributes:
        what: What was compared, in words.
        figure: A scalar on the device.
        limit: 1 for error ratios, 0 for counts.
    """

    what: str
    figure: Tensor
    limit: float

    def holds(self) -> bool:
        """Whether the figure is within its limit; reads it, and so waits for the device."""
        return self.figure.item() <= self.limit


def check_kernel(
    family: Family,
    problem: Problem,
    config: Config,
    specialization: Specialization,
    target: Target,
    device: torch.device,
    level: Level = Level.FULL,
    *,
    seed: int | None = None,
) -> Verdict:
    """Renders the kernel of a config and proves it, on the device or under Triton's interpreter.

    Under the interpreter a 16-bit problem is computed in float32, at reduced sizes, up to the first
    failure. The strict level also checks the binaries with and without the log-sum-exp, and the
    other causal alignment.

    Args:
        family: The kernel's family.
        problem: What it must compute; also the shape that the full level checks it at.
        config: Its config.
        specialization: What it may assume of its tensors.
        target: The GPU that it is compiled for.
        device: Where to run it.
        level: How much to check.
        seed: Seed of all inputs; a fresh one where left out.

    Raises:
        KernelError: It does not compile, load or launch.
    """
    problem = interpretable(problem) if interpreting() else problem
    verdicts = [
        check_rendered(
            render(family, variant, config, specialized), variant, config, target, device, level, seed=seed
        )
        for variant, specialized in _variants(problem, specialization, level)
    ]
    return joined(verdicts)


def check_rendered(
    kernel: Kernel,
    problem: Problem,
    config: Config,
    target: Target,
    device: torch.device,
    level: Level = Level.FULL,
    *,
    seed: int | None = None,
    compiled: Binary | None = None,
) -> Verdict:
    """As `check_kernel`, of a kernel that is rendered already, and compiled where that is at hand.

    Raises:
        KernelError: It does not compile, load or launch.
    """
    seed = next_seed() if seed is None else seed
    binary = None if interpreting() else compiled or compile_binary(kernel, target)
    findings: list[Finding] = []
    planned = tuple(_planned(kernel, problem, config, level, seed))
    with _on(device):
        try:
            for case, case_seed in planned:
                # A self-check leaves nothing behind in a user's memory.
                ready = prepare if level is Level.QUICK else prepare_and_keep
                prepared = ready(case, kernel.specialization.alignment, device, case_seed)
                found = tuple(_findings(kernel, binary, case, prepared, target))
                findings += found
                # On the CPU figures are known at once, and launches are slow: one failure will do.
                if interpreting() and not all(finding.holds() for finding in found):
                    break
            figures = torch.stack([finding.figure.double() for finding in findings]).tolist()
        except (RuntimeError, TritonError) as error:
            forget()
            raise KernelError(first_line(error)) from error
    verdict = _verdict(findings, figures, _device_name(device), seed)
    if not verdict.passed:
        forget()
        return verdict
    return msgspec.structs.replace(verdict, probes=tuple({case.probe.value: None for case, _ in planned}))


def interpretable(problem: Problem) -> Problem:
    """The problem as the interpreter can compute it: its products of 16-bit tiles are garbage."""
    return msgspec.structs.replace(problem, dtype=Dtype.FP32)


def joined(verdicts: list[Verdict]) -> Verdict:
    """Several verdicts on variants of one kernel as one."""
    worst = max(verdicts, key=lambda verdict: (not verdict.passed, verdict.worst_ratio))
    return msgspec.structs.replace(worst, checks=sum(verdict.checks for verdict in verdicts))


def _variants(
    problem: Problem, specialization: Specialization, level: Level
) -> Iterator[tuple[Problem, Specialization]]:
    yield problem, specialization
    if level is not Level.STRICT:
        return
    yield problem, msgspec.structs.replace(specialization, lse=not specialization.lse)
    if problem.causal is not Causal.NONE:
        other = Causal.TOP_LEFT if problem.causal is Causal.BOTTOM_RIGHT else Causal.BOTTOM_RIGHT
        yield msgspec.structs.replace(problem, causal=other), specialization


def _planned(
    kernel: Kernel, problem: Problem, config: Config, level: Level, seed: int
) -> Iterator[tuple[Case, int]]:
    """The cases of a level, each with the seed of its inputs."""
    reduced = interpreting()
    small = companions(problem, config, level, reduced=reduced)
    if level is not Level.QUICK and not reduced:
        yield from ((case, seed) for case in main_cases(problem))
    yield from ((case, seed) for case in small)
    if level is not Level.STRICT or reduced:
        return
    for step in range(1, STEPS_PER_SEED):
        yield from ((case, seed + step) for case in small)
    for case in main_cases(problem):
        yield msgspec.structs.replace(case, repeats=STRICT_REPEATS), seed + 1
    if kernel.specialization.index_bits == 64:
        yield from ((case, seed) for case in far_cases(problem, config))


def _findings(
    kernel: Kernel,
    compiled: Binary | None,
    case: Case,
    prepared: Prepared,
    target: Target,
) -> Iterator[Finding]:
    """Launches a kernel on a case, as often as the case asks, and yields what decides."""
    q, k, v, out = (tensor.view for tensor in (prepared.q, prepared.k, prepared.v, prepared.out))
    lse = prepared.lse.view if kernel.specialization.lse else None
    workspaces: list[Guarded] = []

    def allocate(shape: tuple[int, ...], on: torch.device) -> Tensor:
        workspaces.append(guarded_flat(shape, on, Role.WORKSPACE))
        return workspaces[-1].view

    launch = bind(kernel, target, q, k, v, out, compiled=compiled, allocate=allocate)
    first: Tensor | None = None
    for _ in range(case.repeats):
        poison(prepared.out)
        poison(prepared.lse)
        launch(q, k, v, out, lse, case.scale, prepared.scales)
        if first is None:
            yield from _compare(case, prepared, lse)
            first = out.clone() if case.repeats > 1 else out
        else:
            yield Finding(f"{case.label}: elements unlike an earlier launch's", (out != first).sum(), 0.0)
    for name, tensor in (("out", prepared.out), ("lse", prepared.lse)):
        yield Finding(f"{case.label}: writes around {name}", stray_writes(tensor), 0.0)
    for workspace in workspaces:
        yield Finding(f"{case.label}: writes around a workspace", stray_writes(workspace), 0.0)
    changed = checksum(prepared.inputs) != prepared.checksum
    yield Finding(f"{case.label}: inputs overwritten", changed.sum(), 0.0)


def _compare(case: Case, prepared: Prepared, lse: Tensor | None) -> Iterator[Finding]:
    problem, expected = case.problem, prepared.expected
    batch, head = prepared.chosen.heads // problem.heads, prepared.chosen.heads % problem.heads
    out = prepared.out.view
    rows = out[batch, head][:, prepared.chosen.rows]
    yield Finding(f"{case.label}: row errors", worst_ratio(rows, expected.out, expected.allowed), 1.0)
    yield Finding(f"{case.label}: elements not written or not finite", (~out.isfinite()).sum(), 0.0)
    if lse is not None:
        lse_rows = lse[batch, head][:, prepared.chosen.rows, None]
        ratio = worst_ratio(lse_rows, expected.lse[..., None], expected.lse_allowed)
        yield Finding(f"{case.label}: log-sum-exp errors", ratio, 1.0)


def _verdict(findings: list[Finding], figures: list[float], device: str, seed: int) -> Verdict:
    failed = ""
    worst = 0.0
    for finding, figure in zip(findings, figures, strict=True):
        if finding.limit:
            worst = max(worst, figure if math.isfinite(figure) else NOT_FINITE)
        if not failed and not figure <= finding.limit:
            failed = f"{finding.what} {figure:.4g} of {finding.limit:g} allowed, seed {seed}"
    return Verdict(not failed, min(worst, NOT_FINITE), len(findings), failed, device)


def _device_name(device: torch.device) -> str:
    return INTERPRETER if interpreting() else torch.cuda.get_device_name(device)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
