"""Jobs of separate processes: compile a mutant, verify it, or compare it with the correct kernel."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from flashtune.core.config import Config
from flashtune.core.errors import KernelError
from flashtune.core.kernel import Kernel
from flashtune.core.problem import Problem
from flashtune.core.record import Verdict
from flashtune.core.target import Target, device_target
from flashtune.templates.registry import find_family
from flashtune.tuner.binary.resources import misfit, read_parts
from flashtune.verification.cases import Level
from flashtune.verification.check import check_delayed, check_kernel, check_rendered
from tests.mutants.alike import DEVICE, cases_of, unlike
from tests.mutants.core import Subject

# Launches of a kernel that is wrong by a race: other bits in any of them tell it from the right one.
LAUNCHES = 5
# The exit code of a process whose GPU context is lost.
BROKEN_CONTEXT = 70


class Checked(NamedTuple):
    """The verdict on a kernel or the error of verifying it, and how long it took."""

    verdict: Verdict | None
    error: str
    seconds: float

    @property
    def wrong(self) -> str:
        """The error, or the check that failed; empty if there is neither."""
        return self.error or (self.verdict.failed if self.verdict else "")


def compile_fitting(kernel: Kernel, target: Target) -> str:
    """Leaves a kernel's binary in Triton's cache; why it cannot be launched, or nothing."""
    try:
        parts = read_parts(kernel, target)
    except KernelError as error:
        return str(error)
    return next(filter(None, (misfit(part, target) for part in parts)), "")


def check(kernel: Kernel, problem: Problem, config: Config, level: Level, seed: int) -> Checked:
    """Verifies a kernel as a search does."""
    return _checked(lambda target: check_rendered(kernel, problem, config, target, DEVICE, level, seed=seed))


def check_late(kernel: Kernel, problem: Problem, config: Config, seed: int) -> Checked:
    """Verifies a kernel with warps that fall behind; no verdict of one that leaves waits to the compiler."""
    return _checked(lambda target: check_delayed(kernel, problem, config, target, DEVICE, seed=seed))


def _checked(judge: Callable[[Target], Verdict | None]) -> Checked:
    start = time.perf_counter()
    with context_lost_ends_the_process():
        target = device_target(0)
        try:
            verdict = judge(target)
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
    """The first problem, of all probes and of random ones, where a kernel writes what the right one does not.

    Nothing where there is none.
    """
    with context_lost_ends_the_process():
        target = device_target(0)
        launches = LAUNCHES if racy else 1
        for number, case in enumerate(cases_of(right, target, problem, config, seed)):
            name = unlike(right, broken, target, case, seed + number, launches)
            if name:
                return f"{case.label}: {name}"
    return ""


def warm() -> None:
    """Takes the GPU, and runs what a first check would wait for."""
    with context_lost_ends_the_process():
        small = torch.ones(64, 64, dtype=torch.float64, device=DEVICE)
        (small @ small).sum().item()


@contextlib.contextmanager
def context_lost_ends_the_process() -> Iterator[None]:
    """After an error the process ends where its GPU context is lost: the next job gets another."""
    try:
        yield
    except Exception:
        try:
            torch.cuda.synchronize(DEVICE)
        except RuntimeError:
            os._exit(BROKEN_CONTEXT)
        raise
