"""Compiles the kernels of random problems on all cores and holds each against the reference on the GPU.

As before it serves, a kernel passes its self-check first; what that refuses is counted and computes nothing
more. The GPU is used by a process of its own, which another replaces where a kernel breaks its context.
"""

import multiprocessing
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import msgspec
import pebble

from flashtune.core.record import Outcome
from flashtune.core.target import Target
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution.compile_pool import CompilePool
from flashtune.tuner.execution.cpus import available_cpus
from tests.gpu.random.random_problems import Subject, Trial
from tests.gpu.random.random_subject import Result, Wrong, check_subject, refusal, wrong_at

# Limit for all problems of one kernel; a kernel that takes longer counts as hung.
SECONDS = 60


class Summary(msgspec.Struct, frozen=True):
    """The result of a run: counts, times in seconds, and the largest error over the allowed one.

    `worst_by_figure` has that error of each compared result, such as each gradient.
    """

    problems: int
    kernels: int
    refused: list[str]
    unfit: list[str]
    by_family: dict[str, int]
    worst_by_family: dict[str, float]
    worst_by_figure: dict[str, dict[str, float]]
    wrong: list[Wrong]
    compile_s: float
    check_s: float


def check_all(trials: Sequence[Trial], target: Target, seed: int, tell: Callable[[str], object]) -> Summary:
    """Compiles every kernel once, and checks every trial of those that pass their self-check.

    Args:
        trials: The problems.
        target: The GPU.
        seed: Of their inputs.
        tell: Is given a line for everything that is wrong, at once.
    """
    started = time.monotonic()
    own: defaultdict[Subject, list[tuple[int, Trial]]] = defaultdict(list)
    for number, trial in enumerate(trials):
        own[trial.subject].append((number, trial))
    unfit = _unfit(tuple(own), target)
    for subject, message in unfit.items():
        tell(f"UNFIT {_named(subject)}: {message}")
    compiled = time.monotonic()
    results: dict[Subject, Result] = {}
    refused: list[str] = []
    with pebble.ProcessPool(max_workers=1, context=multiprocessing.get_context("spawn")) as pool:
        for subject in (subject for subject in own if subject not in unfit):
            try:
                reason = pool.schedule(refusal, (subject, target), timeout=SECONDS).result()
            except (pebble.ProcessExpired, TimeoutError) as error:
                reason = f"its process ended: {error}"
            if reason:
                refused.append(_named(subject))
                tell(f"REFUSED {_named(subject)}: {reason}")
                continue
            try:
                job = pool.schedule(check_subject, (own[subject], target, seed), timeout=SECONDS)
                results[subject] = job.result()
            except (pebble.ProcessExpired, TimeoutError) as error:
                ended = wrong_at(own[subject][0][1], f"its process ended: {error}")
                results[subject] = Result((ended,), {"ended": float("inf")})
            for wrong in results[subject].wrong:
                tell(f"WRONG {wrong.family} {wrong.problem} {wrong.config}\n      {wrong.what}")
    return _summary(own, results, refused, unfit, compiled - started, time.monotonic() - compiled)


def _summary(
    own: dict[Subject, list[tuple[int, Trial]]],
    results: dict[Subject, Result],
    refused: list[str],
    unfit: dict[Subject, str],
    compile_s: float,
    check_s: float,
) -> Summary:
    counts: Counter[str] = Counter()
    worst: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for subject, result in results.items():
        counts[subject.family] += len(own[subject])
        of_family = worst[subject.family]
        for compared, ratio in result.worst.items():
            of_family[compared] = max(of_family.get(compared, 0.0), round(ratio, 3))
    return Summary(
        problems=counts.total(),
        kernels=len(results),
        refused=refused,
        unfit=[_named(subject) for subject in unfit],
        by_family=dict(counts),
        worst_by_family={family: max(figures.values()) for family, figures in worst.items()},
        worst_by_figure=dict(worst),
        wrong=[wrong for result in results.values() for wrong in result.wrong],
        compile_s=round(compile_s, 1),
        check_s=round(check_s, 1),
    )


def _named(subject: Subject) -> str:
    return f"{subject.family} {subject.problem.key} {subject.config.label()}"


def _unfit(subjects: Sequence[Subject], target: Target) -> dict[Subject, str]:
    """Kernels that do not compile or do not fit the GPU, and why; the others' binaries are in the cache."""
    with CompilePool(available_cpus()) as pool:
        jobs = {
            subject: pool.submit(
                SearchTask(subject.problem, target, subject.specialization, ()),
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
