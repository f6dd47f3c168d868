"""Right kernels that the proof must not refuse: configs drawn from all spaces, at many problems."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import msgspec
from pebble import ProcessPool

from flashtune.config import Config, Space
from flashtune.kernel import Alignment, Specialization
from flashtune.problem import Causal, Dtype, Problem
from flashtune.proof.prepared import STEPS_PER_SEED
from flashtune.target import Target
from flashtune.templates.family import Family
from flashtune.templates.registry import families
from tests.mutants import jobs
from tests.mutants.core import Subject, rendered
from tests.mutants.pools import START_SECONDS, Plan, compiling, ended, on_the_gpu
from tests.mutants.results import Control
from tests.mutants.runner import verify_controls

WIDTHS = ((64, 64), (128, 128), (256, 256), (96, 96), (40, 24), (192, 128), (32, 64), (16, 16))
# Heads, KV heads, batch, queries and keys that a config is verified at as if it had been tuned there.
SHAPES = (
    (8, 8, 2, 512, 512),
    (8, 2, 1, 777, 1300),
    (16, 2, 1, 1, 2048),
    (6, 2, 3, 40, 100),
    (4, 1, 4, 2048, 300),
)
# What the compiler may add to what the model counts.
SPARE_BYTES = 1024
DRAWS = 1000


def sampled_subjects(count: int, seed: int, target: Target) -> list[Subject]:
    """Configs of every family that runs on a GPU, `count` of each; the same ones for the same seed."""
    found: list[Subject] = []
    for family in families():
        chance = random.Random(f"{family.name} {seed}")
        found += itertools.islice(_subjects(family, chance, target), count)
    return found


def _subjects(family: Family, chance: random.Random, target: Target) -> Iterator[Subject]:
    for _ in range(DRAWS):
        problem = msgspec.structs.replace(_problem(chance), direction=family.direction)
        specialization = Specialization(
            chance.choice(tuple(Alignment)), chance.choice((32, 32, 64)), chance.random() < 0.5
        )
        if family.supports(problem, target) is None and family.takes(problem.dtype, specialization):
            config = _config(family.space(problem, target), chance)
            if config and _fits(family, problem, config, target, specialization):
                yield Subject(family.name, problem, config, specialization)


def _problem(chance: random.Random) -> Problem:
    head_dim, value_head_dim = chance.choice(WIDTHS)
    heads, kv_heads, batch, seqlen_q, seqlen_kv = chance.choice(SHAPES)
    return Problem(
        dtype=chance.choice(tuple(Dtype)),
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        heads=heads,
        kv_heads=kv_heads,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        causal=chance.choice(tuple(Causal)),
    )


def _config(space: Space, chance: random.Random) -> Config | None:
    """A point of a space; None where the draw is none."""
    config = space.choose(lambda axis: chance.choice(axis.values))
    return config if space.admits(config) else None


def _fits(
    family: Family, problem: Problem, config: Config, target: Target, specialization: Specialization
) -> bool:
    items = family.sram_items(problem, config, target, specialization)
    return sum(item.bytes for item in items) + SPARE_BYTES <= target.sram_per_block


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
