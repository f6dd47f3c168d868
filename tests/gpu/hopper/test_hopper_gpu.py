"""Tests of Hopper kernels in separate processes: random problems, repeated launches and large tensors.

`FLASHTUNE_SAMPLES` is the number of configs that are drawn (24), `FLASHTUNE_SEED` the seed (0). As many
launches of a kernel as `FLASHTUNE_REPEATS` says (1,000) must agree bit for bit.
"""

import itertools
import os
import random
from collections.abc import Iterable, Iterator

import click
import msgspec
import pytest

from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.core.target import device_target
from flashtune.db.table import shipped_table
from flashtune.verification.cases import Case, far_cases
from flashtune.verification.lengths import is_ragged
from flashtune.verification.probes import Probe
from tests.gpu.calls import free_memory
from tests.gpu.marks import ON_HOPPER
from tests.gpu.random.random_checks import check_all
from tests.gpu.random.random_problems import Subject, Trial, case_of
from tests.problems.hopper import FAMILY, H200, a_config, a_problem, sampled_configs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.timeout(900),
    ON_HOPPER,
]

SAMPLES = int(os.environ.get("FLASHTUNE_SAMPLES", "24"))
SEED = int(os.environ.get("FLASHTUNE_SEED", "0"))
REPEATS = int(os.environ.get("FLASHTUNE_REPEATS", "1000"))
PROBLEMS = 20
# Tests over which the shipped kernels are divided.
PARTS = 6
MAX_TOKENS = 4096
WIDTHS = (
    *((width, width) for width in (32, 64, 80, 96, 128, 192, 256)),
    *((64, 256), (128, 64), (192, 128)),
)
DTYPES = (Dtype.BF16, Dtype.FP16, Dtype.E4M3)


def samples() -> list[Subject]:
    """Configs over all head dims, types and masks; every other one writes the log-sum-exp."""
    kinds = list(itertools.product(WIDTHS, DTYPES, Causal))
    random.Random(SEED).shuffle(kinds)
    subjects = []
    for number, (widths, dtype, causal) in zip(range(SAMPLES), itertools.cycle(kinds), strict=False):
        # Few queries and shared KV heads: tiles that several heads share are in the space as well.
        few = {"kv_heads": 1, "seqlen_q": 32} if number % 3 == 0 else {}
        problem = a_problem(*widths, dtype=dtype, causal=causal, **few)
        (config,) = sampled_configs(problem, 1, seed=1000 * SEED + number)
        subjects.append(Subject(FAMILY.name, problem, config, Specialization(lse=number % 2 == 0)))
    return subjects


def winners() -> list[Subject]:
    """The shipped kernels."""
    table = shipped_table("nvidia-h200")
    return [
        Subject(record.family, record.problem, record.config, record.specialization)
        for record in (table.records if table else ())
        if record.family == FAMILY.name and record.config is not None
    ]


def assert_correct(trials: Iterable[Trial]) -> None:
    listed = list(trials)
    assert listed, "no trials: the shipped table or the family has no kernels"
    summary = check_all(listed, device_target(0), SEED, click.echo)
    assert not summary.wrong, summary.wrong
    assert not summary.refused
    assert not summary.unfit


def repeated(subject: Subject) -> Trial:
    """Launches at a problem with as many tokens as repeat quickly."""
    problem = subject.problem
    if is_ragged(problem):
        case = case_of(subject, random.Random(SEED), device_target(0))
    else:
        queries, keys = min(problem.seqlen_q, MAX_TOKENS), min(problem.seqlen_kv, MAX_TOKENS)
        batch = max(1, min(problem.batch, MAX_TOKENS // max(queries, keys)))
        small = msgspec.structs.replace(problem, seqlen_q=queries, seqlen_kv=keys, batch=batch)
        case = Case(problem=small, probe=Probe.RANDOM, block=64, scale=problem.head_dim**-0.5)
    return Trial(subject, msgspec.structs.replace(case, repeats=REPEATS))


def random_trials(subjects: Iterable[Subject]) -> Iterator[Trial]:
    chance, target = random.Random(SEED), device_target(0)
    for subject in subjects:
        yield from (Trial(subject, case_of(subject, chance, target)) for _ in range(PROBLEMS))


def test_sampled_configs_are_correct_on_random_problems() -> None:
    assert_correct(random_trials(samples()))


@pytest.mark.parametrize("part", range(PARTS))
def test_shipped_winners_are_correct_on_random_problems(part: int) -> None:
    assert_correct(random_trials(winners()[part::PARTS]))


@pytest.mark.parametrize("part", range(PARTS))
def test_shipped_winners_are_deterministic(part: int) -> None:
    assert_correct(map(repeated, winners()[part::PARTS]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_defaults_are_deterministic(dtype: Dtype) -> None:
    problem = a_problem(128, dtype=dtype, causal=Causal.BOTTOM_RIGHT, kv_heads=2)
    assert_correct([repeated(Subject(FAMILY.name, problem, a_config(problem), Specialization(lse=True)))])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.E4M3])
@pytest.mark.parametrize("tensor", range(4), ids=["q", "k", "v", "out"])
def test_tensors_of_more_than_two_to_the_31_elements(dtype: Dtype, tensor: int) -> None:
    if free_memory() < 20 * 2**30:
        pytest.skip("needs 20 GiB of GPU memory")
    problem: Problem = a_problem(128, dtype=dtype, causal=Causal.BOTTOM_RIGHT)
    config = FAMILY.default(problem, H200)
    subject = Subject(FAMILY.name, problem, config, Specialization(Alignment.SIXTEEN, 64, True))
    assert_correct([Trial(subject, far_cases(problem, config)[tensor])])
