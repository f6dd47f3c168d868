"""Correct kernels that verification must accept: configs drawn from all spaces, at many problems."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from pebble import ProcessPool

from benchmarks.sanitizer.points import Subject as Point
from benchmarks.sanitizer.points import drawn
from flashtune.core.errors import ProblemError
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.db.table import shipped_table
from flashtune.templates.family import unsupported_reason
from flashtune.templates.registry import families, find_family
from flashtune.tuner.execution.processes import failure_of
from flashtune.verification.inputs.prepared import STEPS_PER_SEED
from flashtune.verification.schedule_fuzzing import delayed
from tests.mutants import jobs
from tests.mutants.core import Subject, rendered
from tests.mutants.portable.pools import Plan, compiling, ended, on_the_gpu, with_late
from tests.mutants.results import Control
from tests.mutants.runner import verify_controls

# Heads, KV heads, batch, queries and keys that a config is verified at as if it had been tuned there.
SHAPES = (
    (8, 8, 2, 512, 512),
    (8, 2, 1, 777, 1300),
    (16, 2, 1, 1, 2048),
    (6, 2, 3, 40, 100),
    (4, 1, 4, 2048, 300),
)
# Small head dims of q and k, and of v, in addition to those of the points. Most are no multiples of 16.
NARROW = ((40, 24), (16, 16), (8, 40))
EVERY_NARROW = 6
# Limits of a full check that runs next to others and shares no references, and of a strict check.
CHECK_SECONDS = 120.0
CONFIRM_SECONDS = 900.0


def sampled_subjects(count: int, seed: int, target: Target) -> list[Subject]:
    """Configs of every family that runs on a GPU, `count` of each, families in turn."""
    points = (itertools.islice(drawn(family, target, seed), count) for family in families())
    turns = itertools.chain.from_iterable(itertools.zip_longest(*points))
    chance = random.Random(seed)
    return [
        Subject(
            point.candidate.family,
            _moved(point, chance, target),
            point.candidate.config,
            point.specialization,
        )
        for point in turns
        if point is not None
    ]


def shipped_subjects(target: Target) -> list[Subject]:
    """Shipped kernels that have barriers of their own, each at the smallest problem that it serves."""
    table = shipped_table(target.name)
    subjects: dict[str, Subject] = {}
    for record in sorted(table.records if table else (), key=lambda record: record.problem.minimal_bytes()):
        if record.config is None:
            continue
        subject = Subject(record.family, record.problem, record.config, record.specialization)
        kernel = rendered(subject)
        if kernel.digest not in subjects and delayed(kernel) is not None:
            subjects[kernel.digest] = subject
    return list(subjects.values())


def _moved(point: Point, chance: random.Random, target: Target) -> Problem:
    """A point's problem at heads, lengths and sometimes widths drawn anew, where its config may serve."""
    problem, family = point.problem, find_family(point.candidate.family)
    heads, kv_heads, batch, seqlen_q, seqlen_kv = chance.choice(SHAPES)
    page = problem.page_size or 1
    fields: dict[str, Any] = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_kv": -(-seqlen_kv // page) * page}
    if problem.packed:
        fields["packed"] = batch * seqlen_q // 2 + 1
    if not problem.mla:
        fields |= {"heads": heads, "kv_heads": kv_heads}
        if not chance.randrange(EVERY_NARROW):
            fields |= dict(zip(("head_dim", "value_head_dim"), chance.choice(NARROW), strict=True))
    try:
        moved = msgspec.structs.replace(problem, **fields)
    except ProblemError:
        return problem
    refused = unsupported_reason(family, moved, target, point.specialization)
    fits = refused is None and family.space(moved, target).contains(point.candidate.config)
    return moved if fits else problem


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
    verified = []
    with compiling(with_late(map(rendered, subjects)), plan) as compiled, on_the_gpu(plan.workers) as pool:
        fitting = (subject for subject in subjects if not compiled.failure(rendered(subject)))
        while not plan.over and (some := list(itertools.islice(fitting, 4 * plan.workers))):
            controls = verify_controls(pool, some, compiled, plan, CHECK_SECONDS)
            for subject, control in zip(some, controls, strict=True):
                judged = control.passed or control.delayed
                verified.append(control if judged else _judged_again(pool, subject, control, plan))
                report(verified[-1])
    return tuple(verified)


def _judged_again(pool: ProcessPool, subject: Subject, control: Control, plan: Plan) -> Control:
    """A refused kernel, and whether the strict level accepts it; None where that did not end."""
    seed = plan.seed + STEPS_PER_SEED
    job = pool.schedule(jobs.confirm, args=(subject, seed), timeout=CONFIRM_SECONDS)
    words = ended(job)
    if not words:
        return msgspec.structs.replace(control, confirmed=job.result())
    lost = failure_of(job)
    died = lost is not None and not lost[0]
    failed = f"{control.failed}; judged again, {words}"
    return msgspec.structs.replace(control, failed=failed, confirmed=False if died else None)
