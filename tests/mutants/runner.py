"""Runs mutants on a GPU: compiled on all cores, verified in processes that may hang or die.

Mutants that neither race nor hang are verified by several processes at once, since a check is mostly
launches. Then the rest follows, one at a time and alone on the GPU.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future

import msgspec
from pebble import ProcessPool

from flashtune.tuner.execution.processes import failure_of
from tests.mutants import jobs
from tests.mutants.core import Mutant, Subject, broken, rendered
from tests.mutants.portable.pools import (
    SHARED_SECONDS,
    START_SECONDS,
    Compiling,
    Plan,
    checking,
    checking_late,
    compiling,
    ended,
    on_the_gpu,
    take_gpu,
    with_late,
)
from tests.mutants.results import Control, Fate, Found, found_of

# Alone on the GPU, a kernel that takes this many times as long as a correct one with others is stopped.
TIME_LIMIT_FACTOR = 2.0
MIN_SECONDS = 6.0
# Checks of a kernel that is wrong by a race, each with inputs of its own.
RACY_CHECKS = 5

Report = Callable[[Found], None]


def run_mutants(
    mutants: Sequence[Mutant], plan: Plan, report: Report
) -> tuple[tuple[Control, ...], tuple[Found, ...]]:
    """Verifies mutants, and before them the kernels that they were made of.

    Args:
        mutants: Which.
        plan: How.
        report: Told of each as soon as its fate is known.

    Raises:
        RuntimeError: The GPU cannot be reached.
    """
    subjects = list(dict.fromkeys(mutant.subject for mutant in mutants))
    kernels = [*with_late(map(rendered, subjects)), *map(broken, mutants)]
    steady = [mutant for mutant in mutants if not (mutant.racy or mutant.hangs)]
    fates: dict[str, Found] = {}
    with compiling(kernels, plan) as compiled:
        with on_the_gpu(plan.workers) as pool:
            controls = verify_controls(pool, subjects, compiled, plan)
            for mutant, result in _shared(pool, steady, compiled, plan):
                # A mutant that did not end next to others may end alone.
                if result.fate is not Fate.HUNG:
                    fates[mutant.id] = result
                    report(result)
        limits = _limits(subjects, controls)
        rest = [mutant for mutant in mutants if mutant.id not in fates]
        for mutant, result in _alone(rest, compiled, plan, limits):
            fates[mutant.id] = result
            report(result)
    return controls, tuple(fates[mutant.id] for mutant in mutants)


def _limits(subjects: Iterable[Subject], controls: Iterable[Control]) -> dict[str, float]:
    """Seconds that a check may take, by family: a process that has to make references takes the longest."""
    limits: dict[str, float] = {}
    for subject, control in zip(subjects, controls, strict=True):
        limit = limits.get(subject.family, MIN_SECONDS)
        limits[subject.family] = max(limit, TIME_LIMIT_FACTOR * control.seconds)
    return limits


def verify_controls(
    pool: ProcessPool,
    subjects: Iterable[Subject],
    compiled: Compiling,
    plan: Plan,
    seconds: float = SHARED_SECONDS,
) -> tuple[Control, ...]:
    """Verifies unmodified kernels in order, each within so many seconds, and then with delays."""
    started: list[tuple[Subject, str, Future[jobs.Checked] | None]] = []
    for subject in subjects:
        why = compiled.failure(rendered(subject))
        job = None if why else checking(pool, subject, rendered(subject), plan.seed, seconds)
        started.append((subject, why, job))
    controls = [_control(*check) for check in started]
    late = [
        checking_late(pool, subject, rendered(subject), plan.seed) if control.passed else None
        for (subject, _, _), control in zip(started, controls, strict=True)
    ]
    return tuple(map(_late_control, controls, late))


def _late_control(control: Control, job: Future[jobs.Checked] | None) -> Control:
    wrong = "" if job is None else ended(job) or job.result().wrong
    return msgspec.structs.replace(control, passed=False, delayed=True, failed=wrong) if wrong else control


def _control(subject: Subject, why: str, job: Future[jobs.Checked] | None) -> Control:
    if job is None:
        return Control(subject.label, False, why)
    control = Control(subject.label, False, kernel=rendered(subject).digest)
    lost = ended(job)
    if lost:
        return msgspec.structs.replace(control, failed=lost)
    verdict, error, seconds = job.result()
    control = msgspec.structs.replace(control, seconds=round(seconds, 2))
    if verdict is None:
        return msgspec.structs.replace(control, failed=error)
    return msgspec.structs.replace(
        control,
        passed=verdict.passed,
        failed=verdict.failed,
        worst_ratio=round(verdict.worst_ratio, 3),
        checks=verdict.checks,
    )


def _not_started(mutant: Mutant, compiled: Compiling, plan: Plan) -> Found | None:
    """Why a mutant cannot be verified, if it cannot."""
    why = compiled.failure(broken(mutant))
    if why:
        return found_of(mutant, Fate.NOT_COMPILED, why)
    return found_of(mutant, Fate.NOT_RUN) if plan.over else None


def _shared(
    pool: ProcessPool, mutants: Sequence[Mutant], compiled: Compiling, plan: Plan
) -> Iterator[tuple[Mutant, Found]]:
    """Verifies mutants in several processes at once."""
    started = []
    for mutant in mutants:
        missing = _not_started(mutant, compiled, plan)
        if missing:
            yield mutant, missing
        else:
            started.append((mutant, checking(pool, mutant.subject, broken(mutant), plan.seed)))
    for mutant, job in started:
        if plan.over and not job.done():
            job.cancel()
            yield mutant, found_of(mutant, Fate.NOT_RUN)
            continue
        yield mutant, _caught(mutant, job) or _accepted(pool, mutant, plan, job.result().seconds)


def _alone(
    mutants: Iterable[Mutant], compiled: Compiling, plan: Plan, limits: dict[str, float]
) -> Iterator[tuple[Mutant, Found]]:
    """Verifies mutants one by one; after a hang or a death the next process starts first."""
    with on_the_gpu(1) as pool:
        for mutant in mutants:
            yield mutant, _not_started(mutant, compiled, plan) or _repeatedly(pool, mutant, plan, limits)
            take_gpu(pool)


def _repeatedly(pool: ProcessPool, mutant: Mutant, plan: Plan, limits: dict[str, float]) -> Found:
    """Verifies a mutant until it is caught: several times where it is wrong by a race."""
    seconds = 0.0
    for seed in range(plan.seed, plan.seed + (RACY_CHECKS if mutant.racy else 1)):
        job = checking(pool, mutant.subject, broken(mutant), seed, limits[mutant.subject.family])
        caught = _caught(mutant, job)
        if caught:
            return caught
        seconds += job.result().seconds
    return _accepted(pool, mutant, plan, seconds)


def _caught(mutant: Mutant, job: Future[jobs.Checked]) -> Found | None:
    """How a mutant was caught, or why it was not judged; None where it was accepted."""
    words = ended(job)
    if words:
        lost = failure_of(job)
        # An exception is a fault of the check, and does not count as a refusal.
        fate = Fate.NOT_RUN if lost is None else Fate.HUNG if lost[0] else Fate.DIED
        return found_of(mutant, fate, words)
    checked = job.result()
    return found_of(mutant, Fate.REFUSED, checked.wrong, checked.seconds) if checked.wrong else None


def _accepted(pool: ProcessPool, mutant: Mutant, plan: Plan, seconds: float) -> Found:
    """Holds what was accepted against the right kernel; where they are alike, lets its warps fall behind."""
    problem, config = mutant.subject.problem, mutant.subject.config
    arguments = (rendered(mutant.subject), broken(mutant), problem, config, plan.seed, mutant.racy)
    job = pool.schedule(jobs.differ, args=arguments, timeout=START_SECONDS)
    where = ended(job) or job.result()
    if where:
        return found_of(mutant, Fate.SURVIVED, where, seconds)
    late = _caught(mutant, checking_late(pool, mutant.subject, broken(mutant), plan.seed))
    if late is None:
        return found_of(mutant, Fate.EQUIVALENT, seconds=seconds)
    return late if late.fate is Fate.NOT_RUN else msgspec.structs.replace(late, fate=Fate.DELAYED)
