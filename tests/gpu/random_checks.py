"""Compiles the kernels of random problems on all cores and holds each against the reference on the GPU."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch

from flashtune.errors import KernelError
from flashtune.kernel import Kernel
from flashtune.launch import Binary, compile_binary
from flashtune.proof.findings import Finding, findings_of
from flashtune.proof.prepared import prepare
from flashtune.record import Outcome
from flashtune.target import Target
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import Candidate, Scope
from flashtune.tuner.compile_pool import CompilePool
from flashtune.tuner.processes import usable_cores
from tests.gpu.random_problems import Subject, Trial

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


class Summary(msgspec.Struct, frozen=True):
    """What a run was: counts, the largest error over what is allowed, and times in seconds."""

    problems: int
    kernels: int
    by_family: dict[str, int]
    worst_by_family: dict[str, float]
    unfit: list[str]
    wrong: list[Wrong]
    compile_s: float
    check_s: float


class Report(msgspec.Struct, frozen=True):
    """What was wrong, and the run in figures."""

    wrong: tuple[Wrong, ...]
    summary: Summary


def check_all(trials: Sequence[Trial], target: Target, seed: int, tell: Callable[[str], object]) -> Report:
    """Compiles every kernel once, and checks every trial.

    Args:
        trials: The problems.
        target: The GPU.
        seed: Of their inputs.
        tell: Is given a line for everything that is wrong, at once.

    Raises:
        RuntimeError: A launch failed, and with it the GPU's context; says which trials it was among.
    """
    started = time.monotonic()
    subjects = tuple(dict.fromkeys(trial.subject for trial in trials))
    unfit = _unfit(subjects, target)
    for subject, message in unfit.items():
        tell(f"UNFIT {subject.family} {subject.config.label()} {subject.problem.key}: {message}")
    compiled = time.monotonic()
    wrong: list[Wrong] = []
    worst: dict[str, float] = {}
    for trial, finding, number in _figures(
        trials, [one for one in subjects if one not in unfit], target, seed
    ):
        family = trial.subject.family
        if finding.limit:
            worst[family] = max(worst.get(family, 0.0), number)
        if not number <= finding.limit:
            wrong.append(_wrong(trial, f"{finding.what}: {number:.4g} of {finding.limit:g} allowed"))
            tell(f"WRONG {family} {wrong[-1].problem} {wrong[-1].config}\n      {wrong[-1].what}")
    counts = Counter(trial.subject.family for trial in trials if trial.subject not in unfit)
    return Report(
        tuple(wrong),
        Summary(
            problems=counts.total(),
            kernels=len(subjects) - len(unfit),
            by_family=dict(counts),
            worst_by_family={family: round(ratio, 3) for family, ratio in worst.items()},
            unfit=[f"{subject.family} {subject.problem.key}" for subject in unfit],
            wrong=wrong,
            compile_s=round(compiled - started, 1),
            check_s=round(time.monotonic() - compiled, 1),
        ),
    )


def _figures(
    trials: Sequence[Trial], subjects: Sequence[Subject], target: Target, seed: int
) -> Iterator[tuple[Trial, Finding, float]]:
    """Every figure that decides, kernel by kernel: a binary is loaded once."""
    for subject in subjects:
        kernel = render(find_family(subject.family), subject.problem, subject.config, subject.specialization)
        binary = compile_binary(kernel, target)
        own = [(number, trial) for number, trial in enumerate(trials) if trial.subject == subject]
        for start in range(0, len(own), AT_ONCE):
            some = own[start : start + AT_ONCE]
            try:
                found = [
                    (trial, finding)
                    for number, trial in some
                    for finding in _findings(kernel, binary, trial, target, INPUTS * seed + number)
                ]
                numbers = torch.stack([finding.figure.double() for _, finding in found]).tolist()
            except (KernelError, RuntimeError) as error:
                among = "; ".join(_wrong(trial, trial.case.label).problem for _, trial in some)
                raise RuntimeError(f"{subject.family} {subject.config.label()} among {among}") from error
            yield from ((*one, number) for one, number in zip(found, numbers, strict=True))


def _findings(kernel: Kernel, binary: Binary, trial: Trial, target: Target, seed: int) -> Iterator[Finding]:
    case = trial.case
    prepared = prepare(case, kernel.specialization.alignment, DEVICE, seed)
    return findings_of(kernel, binary, case, prepared, target, 0)


def _wrong(trial: Trial, what: str) -> Wrong:
    subject, case = trial
    specialization = subject.specialization
    lies = (
        f"alignment={specialization.alignment:d} index={specialization.index_bits} lse={specialization.lse}"
    )
    problem = f"{case.problem.key} {lies}"
    return Wrong(subject.family, problem, subject.config.label(), what)


def _unfit(subjects: Sequence[Subject], target: Target) -> dict[Subject, str]:
    """Kernels that do not compile or do not fit the GPU, and why; the others' binaries are in the cache."""
    with CompilePool(usable_cores()) as pool:
        jobs = {
            subject: pool.submit(
                Scope(subject.problem, target, subject.specialization, ()),
                Candidate(subject.family, subject.config),
            )
            for subject in subjects
        }
        results = {subject: job.result() for subject, job in jobs.items()}
    return {
        subject: f"{result.outcome} {result.message}"
        for subject, result in results.items()
        if result.outcome is not Outcome.OK
    }
