"""Right kernels that the proof must not refuse: configs drawn from all spaces, at many problems."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec
from pebble import ProcessPool

from flashtune.proof.prepared import STEPS_PER_SEED
from flashtune.target import Target
from flashtune.templates.registry import families
from flashtune.tuner.sanitizing_points import drawn
from tests.mutants import jobs
from tests.mutants.core import Subject, rendered
from tests.mutants.pools import START_SECONDS, Plan, compiling, ended, on_the_gpu
from tests.mutants.results import Control
from tests.mutants.runner import verify_controls


def sampled_subjects(count: int, seed: int, target: Target) -> list[Subject]:
    """Configs of every family that runs on a GPU, `count` of each, families in turn."""
    points = (itertools.islice(drawn(family, target, seed), count) for family in families())
    turns = itertools.zip_longest(*points)
    return [
        Subject(point.candidate.family, point.problem, point.candidate.config, point.specialization)
        for point in itertools.chain.from_iterable(turns)
        if point is not None
    ]


def verify_right(
    subjects: Sequence[Subject], plan: Plan, report: Callable[[Control], None]
) -> tuple[Control, ...]:
    """Verifies configs as a search does; what is refused is judged again by ten times as many probes.

    Configs that the compiler refuses are passed over: a search never verifies them.

    Args:
        subjects: Which.
        plan: How.
        report: Told of each.
    """
    found = []
    with compiling(map(rendered, subjects), plan) as compiled, on_the_gpu(plan.workers) as pool:
        fitting = (subject for subject in subjects if not compiled.failure(rendered(subject)))
        while not plan.over and (some := list(itertools.islice(fitting, 4 * plan.workers))):
            for subject, control in zip(some, verify_controls(pool, some, compiled, plan), strict=True):
                found.append(control if control.passed else _judged_again(pool, subject, control, plan))
                report(found[-1])
    return tuple(found)


def _judged_again(pool: ProcessPool, subject: Subject, control: Control, plan: Plan) -> Control:
    """A refused kernel, and whether the strict level accepts it."""
    seed = plan.seed + STEPS_PER_SEED
    job = pool.schedule(jobs.confirm, args=(subject, seed), timeout=START_SECONDS)
    return msgspec.structs.replace(control, confirmed=not ended(job) and job.result())
