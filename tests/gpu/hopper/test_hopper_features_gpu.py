"""Tests of windows and packed sequences of Hopper kernels, in separate processes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.templates.rendering import render
from flashtune.tuner.execution.processes import failure_of, start_pool, stop_pool
from tests.gpu.hopper import hopper_feature_jobs
from tests.gpu.marks import ON_HOPPER
from tests.problems.hopper import FAMILY, a_problem, sampled_configs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    ON_HOPPER,
]

CONFIGS = 2
JOB_SECONDS = 300.0
ROOT = Path(__file__).parents[3]
CHANCE = random.Random(1)
LENGTHS = ((1, 1), (64, 130), (129, 129), (500, 500), (700, 200), (200, 700), (1025, 1025))
EQUAL = tuple((length, length) for length in (128, 1, 0, 700, 192, 65, 0, 1100))
MIXED = tuple((CHANCE.randint(1, 600), CHANCE.randint(0, 600)) for _ in range(9))
SHORT = tuple((length, length) for length in (CHANCE.randint(0, 40) for _ in range(300)))
WINDOWS: tuple[tuple[Causal, dict[str, int]], ...] = (
    (Causal.BOTTOM_RIGHT, {"window_left": 0}),
    (Causal.BOTTOM_RIGHT, {"window_left": 255}),
    (Causal.TOP_LEFT, {"window_left": 100}),
    (Causal.NONE, {"window_left": 300}),
    (Causal.NONE, {"window_right": 70}),
    (Causal.NONE, {"window_left": 129, "window_right": 127}),
)
WIDTHS = ((64, 64), (128, 128), (256, 256), (96, 80))


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    """One process, which finds the jobs where this one does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        made = start_pool(1)
        try:
            yield made
        finally:
            stop_pool(made)


def problems(number: int, causal: Causal, changes: dict[str, int]) -> Iterator[Problem]:
    """Of two widths by turns, with heads that share keys."""
    for place in (number % 4, (number + 1) % 4):
        widths, dtype = WIDTHS[place], (Dtype.BF16, Dtype.FP16)[place // 2]
        problem = a_problem(*widths, dtype=dtype, causal=causal, heads=4, kv_heads=2)
        yield msgspec.structs.replace(problem, **changes)


def wrong(pool: Any, job: Any, problem: Problem, *cases: hopper_feature_jobs.Lengths) -> list[str]:
    """The errors of some configs of a problem."""
    found = []
    for lengths, config in itertools.product(cases, sampled_configs(problem, CONFIGS)):
        kernel = render(FAMILY, problem, config, Specialization(lse=True))
        done = pool.schedule(job, args=(kernel, problem, lengths), timeout=JOB_SECONDS)
        done.exception()  # waits for its end, and raises nothing
        lost = failure_of(done)
        text = lost[1] if lost else done.result()
        if text:
            found.append(f"{problem.key} {config.label()}: {text}")
    return found


@pytest.mark.parametrize("number", range(len(WINDOWS)))
def test_windows(pool: Any, number: int) -> None:
    for problem in problems(number, *WINDOWS[number]):
        assert wrong(pool, hopper_feature_jobs.check_dense, problem, LENGTHS) == []


@pytest.mark.parametrize("causal", list(Causal))
@pytest.mark.parametrize("window", [{}, {"window_left": 200}], ids=["all", "window"])
def test_packed_sequences(pool: Any, causal: Causal, window: dict[str, int]) -> None:
    number = list(Causal).index(causal) + len(window)
    for problem in problems(number, causal, {"packed": 1, "batch": 1, **window}):
        assert wrong(pool, hopper_feature_jobs.check_packed, problem, EQUAL, MIXED, SHORT) == []
