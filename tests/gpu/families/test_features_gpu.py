"""Tests of features on a GPU: random problems, and the full verification of defaults.

`FLASHTUNE_SAMPLES` says how many random problems (120), `FLASHTUNE_SEED` which ones (1).
"""

import os
import time
from typing import Any

import click
import msgspec
import pytest
import torch

from flashtune import testing
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Problem
from flashtune.core.target import Target, device_target
from flashtune.launch.binding import compile_binary
from flashtune.templates.family import unsupported_reason
from flashtune.templates.forward_hopper.space import HopperConfig
from flashtune.templates.registry import families, find_family
from flashtune.templates.rendering import render
from flashtune.verification.cases import Level
from flashtune.verification.check import check_rendered
from flashtune.verification.inputs import side_inputs
from flashtune.verification.inputs.prepared import prepare
from flashtune.verification.passes import planned_cases
from flashtune.verification.reference import masks
from tests.gpu.marks import ON_HOPPER
from tests.gpu.random.random_checks import check_all
from tests.gpu.random.random_problems import trials
from tests.problems.kernel_cases import TUNED

pytestmark = pytest.mark.gpu

SAMPLES = int(os.environ.get("FLASHTUNE_SAMPLES", "120"))
SEED = int(os.environ.get("FLASHTUNE_SEED", "1"))
# The most seconds that a self-check may take without compilation, with torch's own kernels loaded.
QUICK_SECONDS = 0.3
BLOCKS = [name for name, shape in TUNED.items() if "block_mask" in shape]
# Changes of the default Hopper config. Programs take tiles in a fixed order, or as they finish. In the last
# one, a tile has queries of several blocks, and each group of the tile has its own list.
SCHEDULES: dict[str, dict[str, Any]] = {
    "static": {"dynamic_schedule": False},
    "dynamic": {"dynamic_schedule": True},
    "own lists": {
        "dynamic_schedule": False,
        "num_consumer_groups": 3,
        "num_stages": 2,
        "block_n": 64,
        "pack_gqa": 1,
    },
}


def tuned(name: str) -> Problem:
    return testing.problem(TUNED[name])


def scheduled(problem: Problem, target: Target, schedule: str) -> HopperConfig:
    """The default Hopper config of a problem with a block mask under one of `SCHEDULES`."""
    default = find_family("forward_hopper").default(problem, target)
    assert isinstance(default, HopperConfig)
    return msgspec.structs.replace(default, **SCHEDULES[schedule])


@pytest.mark.alone
def test_random_problems_are_correct() -> None:
    target = device_target()
    summary = check_all(list(trials(SAMPLES, SEED, target)), target, SEED, click.echo)
    assert not summary.wrong, summary.wrong
    assert summary.problems >= 0.9 * SAMPLES, (summary.refused, summary.unfit)


@pytest.mark.parametrize("name", TUNED)
def test_defaults_pass_full_level(name: str) -> None:
    problem, target, device = tuned(name), device_target(), torch.device("cuda", 0)
    specialization = Specialization(lse=True)
    able = [
        family for family in families() if unsupported_reason(family, problem, target, specialization) is None
    ]
    assert able
    for family in able:
        config = family.default(problem, target)
        kernel = render(family, problem, config, specialization)
        verdict = check_rendered(kernel, problem, config, target, device, Level.FULL)
        assert verdict.passed, f"{family.name}: {verdict.failed}"


@ON_HOPPER
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", BLOCKS)
def test_schedules_of_block_masks_pass_full_level(name: str, schedule: str) -> None:
    problem, target, device = tuned(name), device_target(), torch.device("cuda", 0)
    config = scheduled(problem, target, schedule)
    kernel = render(find_family("forward_hopper"), problem, config, Specialization(lse=True))
    verdict = check_rendered(kernel, problem, config, target, device, Level.FULL)
    assert verdict.passed, verdict.failed


@ON_HOPPER
@pytest.mark.parametrize("share", [0.9, 1.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", BLOCKS)
def test_block_masks_with_empty_lists_are_correct(
    name: str, schedule: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The quick level draws new inputs in each check, of which this share of the lists is empty.
    monkeypatch.setattr(side_inputs, "EMPTY_LISTS", share)
    problem, target, device = tuned(name), device_target(), torch.device("cuda", 0)
    config = scheduled(problem, target, schedule)
    kernel = render(find_family("forward_hopper"), problem, config, Specialization(lse=True))
    verdict = check_rendered(kernel, problem, config, target, device, Level.QUICK)
    assert verdict.passed, verdict.failed


@pytest.mark.parametrize("name", TUNED)
def test_masks_are_equal_on_cpu_and_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, target, device = tuned(name), device_target(), torch.device("cuda", 0)
    family = next(
        family
        for family in families()
        if unsupported_reason(family, problem, target, Specialization()) is None
    )
    config = family.default(problem, target)
    kernel = render(family, problem, config, Specialization())
    for case, seed in planned_cases(kernel, problem, config, Level.QUICK, 1):
        made = []
        for most in (0, 2**40):
            monkeypatch.setattr(masks, "FEW_COMPARISONS", most)
            made.append(prepare(case, Alignment.SIXTEEN, device, seed))
        by_host, by_gpu = made
        assert torch.equal(by_host.memory.q.bits, by_gpu.memory.q.bits), case.label
        assert torch.equal(by_host.memory.k.bits, by_gpu.memory.k.bits), case.label
        assert torch.equal(by_host.expected.out, by_gpu.expected.out), case.label
        assert torch.equal(by_host.expected.allowed, by_gpu.expected.allowed), case.label


@pytest.mark.alone
@pytest.mark.parametrize("name", TUNED)
def test_self_checks_are_short(name: str) -> None:
    problem, target, device = tuned(name), device_target(), torch.device("cuda", 0)
    specialization = Specialization(lse=True)
    able = [
        family for family in families() if unsupported_reason(family, problem, target, specialization) is None
    ]
    assert able
    for family in able:
        config = family.default(problem, target)
        kernel = render(family, problem, config, specialization)
        binary = compile_binary(kernel, target)
        arguments = (kernel, problem, config, target, device)
        check_rendered(*arguments, Level.QUICK, compiled=binary)
        start = time.perf_counter()
        assert check_rendered(*arguments, Level.QUICK, compiled=binary).passed
        seconds = time.perf_counter() - start
        assert seconds < QUICK_SECONDS, f"{family.name}: its self-check took {seconds:.2f} s"
