"""The job of the GPU process: the self-check of one kernel, and then random problems."""

from collections.abc import Iterator, Sequence

import msgspec
import torch

from flashtune.core.errors import KernelError
from flashtune.core.kernel import Kernel
from flashtune.core.target import Target
from flashtune.launch.binding import Binary, compile_binary
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.execution.gpu_jobs import leave_if_broken
from flashtune.verification.cases import Level
from flashtune.verification.check import check_rendered
from flashtune.verification.comparison import Finding
from flashtune.verification.passes import case_findings
from tests.gpu.random.random_problems import Subject, Trial

DEVICE = torch.device("cuda", 0)
# Figures are read so many problems at a time: each reading waits for the device.
AT_ONCE = 16
# Seeds of the inputs of one run.
INPUTS = 100_000


class Wrong(msgspec.Struct, frozen=True):
    """A problem at which a kernel is wrong."""

    family: str
    problem: str
    config: str
    what: str


class Result(msgspec.Struct, frozen=True):
    """The errors of a kernel on its problems, and the largest share of an allowed error."""

    wrong: tuple[Wrong, ...]  # All that was wrong.
    # The largest share of each kind of comparison: rows, log-sum-exps, or rows of one gradient.
    worst: dict[str, float]


def refusal(subject: Subject, target: Target) -> str:
    """Why a kernel's self-check refuses it; nothing where it may serve. Ends a process whose GPU it broke."""
    kernel, binary = _loaded(subject, target)
    try:
        arguments = (kernel, subject.problem, subject.config, target, DEVICE, Level.QUICK)
        return check_rendered(*arguments, compiled=binary).failed
    except (KernelError, RuntimeError) as error:
        leave_if_broken(DEVICE, error)
        return str(error)


def check_subject(some: Sequence[tuple[int, Trial]], target: Target, seed: int) -> Result:
    """Checks the problems of one kernel, numbered. Ends a process whose GPU it broke."""
    kernel, binary = _loaded(some[0][1].subject, target)
    wrong: list[Wrong] = []
    worst: dict[str, float] = {}
    for start in range(0, len(some), AT_ONCE):
        try:
            findings = [
                (trial, finding)
                for number, trial in some[start : start + AT_ONCE]
                for finding in _findings(kernel, binary, trial, target, INPUTS * seed + number)
            ]
            numbers = torch.stack([finding.figure.double() for _, finding in findings]).tolist()
        except RuntimeError as error:
            leave_if_broken(DEVICE, error)
            raise
        for (trial, finding), number in zip(findings, numbers, strict=True):
            if finding.limit:
                compared = finding.what.partition(": ")[2]
                worst[compared] = max(worst.get(compared, 0.0), number)
            if not number <= finding.limit:
                wrong.append(wrong_at(trial, f"{finding.what}: {number:.4g} of {finding.limit:g} allowed"))
    return Result(tuple(wrong), worst)


def _loaded(subject: Subject, target: Target) -> tuple[Kernel, Binary]:
    kernel = render(find_family(subject.family), subject.problem, subject.config, subject.specialization)
    return kernel, compile_binary(kernel, target)


def _findings(kernel: Kernel, binary: Binary, trial: Trial, target: Target, seed: int) -> Iterator[Finding]:
    return case_findings(kernel, binary, trial.case, seed, target, DEVICE, keep=False)


def wrong_at(trial: Trial, what: str) -> Wrong:
    """The record of the errors at a trial."""
    subject, case = trial
    specialization = subject.specialization
    lies = (
        f"alignment={specialization.alignment:d} index={specialization.index_bits} lse={specialization.lse}"
    )
    problem = f"{case.problem.key} {lies}"
    return Wrong(subject.family, problem, subject.config.label(), what)
