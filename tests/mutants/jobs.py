"""What processes of their own do with mutants: compile one, verify one, hold one against the right kernel."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.backward import bind_backward
from flashtune.config import Config
from flashtune.errors import KernelError
from flashtune.kernel import Kernel
from flashtune.launch import bind, compile_binary
from flashtune.problem import Problem
from flashtune.proof import cases
from flashtune.proof.cases import Case, Level
from flashtune.proof.check import check_kernel, check_rendered
from flashtune.proof.gradients import cases as gradient_cases
from flashtune.proof.gradients import prepared as gradients
from flashtune.proof.inputs import poison
from flashtune.proof.prepared import prepare
from flashtune.record import Verdict
from flashtune.target import Target, device_target
from flashtune.templates.registry import find_family
from flashtune.tuner.resources import occupancy, overflow, read_resources
from tests.gpu.hopper_jobs import DEVICE, bits, context_lost_ends_the_process, random_trial
from tests.mutants.core import Subject

RANDOM_PROBLEMS = 20
# Launches of a kernel that is wrong by a race: other bits in any of them tell it from the right one.
LAUNCHES = 5


class Checked(NamedTuple):
    """What verifying a kernel gave, and how long it took."""

    verdict: Verdict | None
    error: str
    seconds: float

    @property
    def wrong(self) -> str:
        """What is wrong with it, or nothing."""
        return self.error or (self.verdict.failed if self.verdict else "")


def compile_fitting(kernel: Kernel, target: Target) -> str:
    """Leaves a kernel's binary in Triton's cache; why it cannot be launched, or nothing."""
    try:
        resources = read_resources(kernel, target)
    except KernelError as error:
        return str(error)
    fits = occupancy(resources, kernel.options, target).blocks > 0
    return overflow(resources, target) or ("" if fits else "not one block fits a multiprocessor")


def check(kernel: Kernel, problem: Problem, config: Config, level: Level, seed: int) -> Checked:
    """Verifies a kernel as a search does."""
    start = time.perf_counter()
    with context_lost_ends_the_process():
        target = device_target(0)
        try:
            verdict = check_rendered(kernel, problem, config, target, DEVICE, level, seed=seed)
        except KernelError as error:
            # The process ends where the context is lost; other errors are of this launch alone.
            torch.cuda.synchronize(DEVICE)
            return Checked(None, f"launch: {error}", time.perf_counter() - start)
    return Checked(verdict, "", time.perf_counter() - start)


def confirm(subject: Subject, seed: int) -> bool:
    """Whether ten times as many probes accept a kernel and its variants."""
    family, problem, config, specialization = subject
    with context_lost_ends_the_process():
        target = device_target(0)
        verdict = check_kernel(
            find_family(family), problem, config, specialization, target, DEVICE, Level.STRICT, seed=seed
        )
    return verdict.passed


def differ(right: Kernel, broken: Kernel, problem: Problem, config: Config, seed: int, racy: bool) -> str:
    """The first problem, of all probes and of random ones, where a kernel's bits are not the right kernel's.

    Nothing where there is none.
    """
    with context_lost_ends_the_process():
        target = device_target(0)
        launches = LAUNCHES if racy else 1
        for number, case in enumerate(_cases(problem, config, seed)):
            (expected,) = _launched(right, target, case, seed + number, 1)
            for written in _launched(broken, target, case, seed + number, launches):
                if not all(torch.equal(*pair) for pair in zip(expected, written, strict=True)):
                    return case.label
    return ""


def _cases(problem: Problem, config: Config, seed: int) -> Iterator[Case]:
    own = gradient_cases if problem.is_backward else cases
    yield from own.main_cases(problem)
    yield from own.companions(problem, config, Level.FULL, reduced=False)
    chance = random.Random(seed)
    for _ in range(RANDOM_PROBLEMS):
        trial = random_trial(chance, problem, config)
        yield trial.case


def _launched(kernel: Kernel, target: Target, case: Case, seed: int, launches: int) -> Iterator[list[Tensor]]:
    if case.problem.is_backward:
        yield from _launched_back(kernel, target, case, seed, launches)
        return
    prepared = prepare(case, kernel.specialization.alignment, DEVICE, seed)
    q, k, v, out = (tensor.view for tensor in (prepared.q, prepared.k, prepared.v, prepared.out))
    lse = prepared.lse.view if kernel.specialization.lse else None
    launch = bind(kernel, target, q, k, v, out, compiled=compile_binary(kernel, target))
    for _ in range(launches):
        poison(prepared.out)
        poison(prepared.lse)
        launch(q, k, v, out, lse, case.scale, prepared.side)
        yield bits(prepared, lse)


def _launched_back(
    kernel: Kernel, target: Target, case: Case, seed: int, launches: int
) -> Iterator[list[Tensor]]:
    alignment, dlse = kernel.specialization.alignment, kernel.specialization.lse
    prepared = gradients.prepare(case, alignment, DEVICE, seed, dlse)
    tensors, side = prepared.tensors, prepared.side
    launch = bind_backward(kernel, target, tensors, side, compiled=compile_binary(kernel, target))
    for _ in range(launches):
        for one in prepared.written.values():
            poison(one)
        launch(tensors, case.scale, side)
        yield [one.view.clone().view(torch.int16) for one in prepared.written.values()]


def warm() -> None:
    """Takes the GPU, and runs what a first check would wait for."""
    with context_lost_ends_the_process():
        small = torch.ones(64, 64, dtype=torch.float64, device=DEVICE)
        (small @ small).sum().item()
