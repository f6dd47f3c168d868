"""Tests of Hopper kernels on their GPU: sampled configs and shipped winners on random problems.

`FLASHTUNE_SAMPLES` says how many configs (24), `FLASHTUNE_SEED` which ones, `FLASHTUNE_REPEATS` how many
launches of a winner must agree bit for bit (1,000).
"""

from __future__ import annotations

import functools
import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from pebble import ProcessPool

from flashtune.core.kernel import Alignment, Kernel, Specialization
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.core.record import Record
from flashtune.core.target import device_target
from flashtune.db.table import shipped_table
from flashtune.templates.forward_hopper.space import HopperConfig
from flashtune.templates.rendering import render
from flashtune.tuner.execution.cpus import available_cpus
from flashtune.tuner.execution.processes import failure_of, start_pool, stop_pool
from flashtune.verification.cases import Case, far_cases
from flashtune.verification.probes import Probe
from tests.gpu.hopper import hopper_jobs
from tests.gpu.marks import ON_HOPPER
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
COMPILE_SECONDS = 120.0
JOB_SECONDS = 120.0
MAX_TOKENS = 4096
ROOT = Path(__file__).parents[3]
WIDTHS = (
    *((width, width) for width in (32, 64, 80, 96, 128, 192, 256)),
    *((64, 256), (128, 64), (192, 128)),
)
DTYPES = (Dtype.BF16, Dtype.FP16, Dtype.E4M3)


class Sample(NamedTuple):
    """A config and its kernel."""

    problem: Problem
    config: HopperConfig
    kernel: Kernel


@functools.cache
def samples() -> list[Sample]:
    """Configs over all head dims, types and masks; every other one writes the log-sum-exp."""
    kinds = list(itertools.product(WIDTHS, DTYPES, Causal))
    random.Random(SEED).shuffle(kinds)
    found = []
    for number, (widths, dtype, causal) in zip(range(SAMPLES), itertools.cycle(kinds), strict=False):
        # Few queries and shared KV heads: tiles that several heads share are in the space as well.
        few = {"kv_heads": 1, "seqlen_q": 32} if number % 3 == 0 else {}
        problem = a_problem(*widths, dtype=dtype, causal=causal, **few)
        (config,) = sampled_configs(problem, 1, seed=1000 * SEED + number)
        kernel = render(FAMILY, problem, config, Specialization(lse=number % 2 == 0))
        found.append(Sample(problem, config, kernel))
    return found


def winners() -> list[Record]:
    table = shipped_table("nvidia-h200")
    return [record for record in table.records if record.family == FAMILY.name] if table else []


def kernel_of(record: Record) -> Kernel:
    assert record.config is not None
    return render(FAMILY, record.problem, record.config, record.specialization)


def compiled(record: Record, refused: dict[str, str]) -> Kernel:
    kernel = kernel_of(record)
    assert kernel.digest not in refused, refused[kernel.digest]
    return kernel


Run = Callable[..., str]


def result_of(job: Any) -> str:
    """The errors of a job, with the end of its process."""
    lost = failure_of(job)
    return lost[1] if lost else str(job.result())


@pytest.fixture(scope="module")
def workers() -> Iterator[None]:
    """Processes find the jobs where this one does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield


@pytest.fixture(scope="module")
def refused(workers: None, kernel_cache: Path) -> dict[str, str]:
    """All binaries are made first, on all cores: why which kernels did not compile, by digest."""
    kernels = [sample.kernel for sample in samples()] + [kernel_of(record) for record in winners()]
    pool = start_pool(available_cpus())
    try:
        jobs = {
            kernel.digest: pool.schedule(
                hopper_jobs.compile_one, args=(kernel, device_target(0)), timeout=COMPILE_SECONDS
            )
            for kernel in kernels
        }
        return {digest: why for digest, job in jobs.items() if (why := _settled(job))}
    finally:
        stop_pool(pool)


def _settled(job: Any) -> str:
    job.exception()  # waits for its end, and raises nothing
    return result_of(job)


@pytest.fixture(scope="module")
def run(workers: None, kernel_cache: Path) -> Iterator[Run]:
    """Runs a job in the process that has the GPU, which is replaced after a hang or a lost context."""
    pool: ProcessPool = start_pool(1)

    def run_one(function: Callable[..., str], *arguments: Any) -> str:
        return _settled(pool.schedule(function, args=arguments, timeout=JOB_SECONDS))

    yield run_one
    stop_pool(pool)


@pytest.mark.parametrize("number", range(SAMPLES))
def test_sampled_config_is_correct_on_random_problems(number: int, run: Run, refused: dict[str, str]) -> None:
    sample = samples()[number]
    label = f"{sample.problem.key}, {sample.config.label()}"
    assert sample.kernel.digest not in refused, f"{label}: {refused[sample.kernel.digest]}"
    wrong = run(
        hopper_jobs.check_random, sample.kernel, sample.problem, sample.config, PROBLEMS, 1000 * SEED + number
    )
    assert not wrong, f"{label}: {wrong}"


@pytest.mark.parametrize("record", winners(), ids=lambda record: record.problem.key)
def test_shipped_winner_is_correct_on_random_problems(
    record: Record, run: Run, refused: dict[str, str]
) -> None:
    given = (compiled(record, refused), record.problem, record.config)
    wrong = run(hopper_jobs.check_random, *given, PROBLEMS, SEED)
    assert not wrong, wrong


def shrunk(problem: Problem) -> Problem:
    """The problem with as many tokens as repeat quickly."""
    queries, keys = min(problem.seqlen_q, MAX_TOKENS), min(problem.seqlen_kv, MAX_TOKENS)
    batch = max(1, min(problem.batch, MAX_TOKENS // max(queries, keys)))
    return msgspec.structs.replace(problem, seqlen_q=queries, seqlen_kv=keys, batch=batch)


@pytest.mark.parametrize("record", winners(), ids=lambda record: record.problem.key)
def test_shipped_winner_is_deterministic(record: Record, run: Run, refused: dict[str, str]) -> None:
    problem = shrunk(record.problem)
    case = Case(problem=problem, probe=Probe.RANDOM, block=64, scale=problem.head_dim**-0.5)
    wrong = run(hopper_jobs.repeat, compiled(record, refused), case, REPEATS)
    assert not wrong, wrong


@pytest.mark.parametrize("dtype", DTYPES)
def test_defaults_are_deterministic(dtype: Dtype, run: Run) -> None:
    problem = a_problem(128, dtype=dtype, causal=Causal.BOTTOM_RIGHT, kv_heads=2)
    kernel = render(FAMILY, problem, a_config(problem), Specialization(lse=True))
    case = Case(problem=problem, probe=Probe.RANDOM, block=64, scale=problem.head_dim**-0.5)
    wrong = run(hopper_jobs.repeat, kernel, case, REPEATS)
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.E4M3])
@pytest.mark.parametrize("tensor", range(4), ids=["q", "k", "v", "out"])
def test_tensors_of_more_than_two_to_the_31_elements(dtype: Dtype, tensor: int, run: Run) -> None:
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of GPU memory")
    problem = a_problem(128, dtype=dtype, causal=Causal.BOTTOM_RIGHT)
    config = FAMILY.default(problem, H200)
    kernel = render(FAMILY, problem, config, Specialization(Alignment.SIXTEEN, 64, True))
    wrong = run(hopper_jobs.check_far, kernel, far_cases(problem, config)[tensor])
    assert not wrong, wrong
