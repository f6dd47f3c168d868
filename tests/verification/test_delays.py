"""Tests of kernels with delays: sleeps at every synchronisation point."""

import re

import pytest
import torch

from flashtune.core.config import Config
from flashtune.core.kernel import Kernel
from flashtune.core.problem import Problem
from flashtune.core.record import Verdict
from flashtune.core.target import Target, find_target
from flashtune.templates.registry import find_family
from flashtune.verification import check
from flashtune.verification.cases import Level
from flashtune.verification.schedule_fuzzing import delayed
from tests.mutants.catalogue import gpu_mutants
from tests.mutants.core import Subject, broken, rendered

H200 = find_target("h200")
SUBJECTS = list(dict.fromkeys(mutant.subject for mutant in gpu_mutants()))
WITH_BARRIERS = [subject for subject in SUBJECTS if not find_family(subject.family).interpreted]
SLEEP = "fall_behind()"
# Calls, anywhere in a line, that order a kernel's accesses or access data that its warps share.
ORDERS = re.compile(
    r"mbarrier\.(wait|arrive)\(|\bcopy_(in|out)\(|\bwarpgroup_mma(_wait)?\(|\btma\.store_wait\(|_turn\("
    r"|\bfence_async_shared\(|(?<!gl\.)\batomic_add\(|\bbroadcast_row\(|\.index\(.*\.(load|store)\("
    r"|\broom\..*\.store\("
)
CPU = torch.device("cpu")


def late(subject: Subject) -> Kernel:
    kernel = delayed(rendered(subject))
    assert kernel is not None
    return kernel


def test_only_families_with_explicit_barriers_are_delayed() -> None:
    native = {subject.family for subject in WITH_BARRIERS}
    assert native == {"forward_hopper", "backward_hopper", "decode_latent_hopper"}
    for subject in {subject.family: subject for subject in SUBJECTS}.values():
        assert (delayed(rendered(subject)) is None) == (subject.family not in native)


@pytest.mark.slow
@pytest.mark.parametrize("subject", WITH_BARRIERS, ids=str)
def test_only_sleeps_are_added_and_precede_every_synchronisation(subject: Subject) -> None:
    kernel, original = late(subject), rendered(subject)
    assert kernel.digest != original.digest
    head, _, _ = kernel.source.partition("\n\n\n@gluon.jit\ndef fall_behind")
    kept = [line for line in head.splitlines() if line.strip() != SLEEP]
    assert kept == original.source.splitlines()
    lines = kernel.source.splitlines()
    places = [
        number
        for number, line in enumerate(lines)
        if ORDERS.search(line) and line.startswith(" ") and not line.strip().startswith(("#", '"""'))
    ]
    # Methods of the pipelines hold the waits of several call sites.
    assert len(places) > 10
    assert [lines[number] for number in places if lines[number - 1].strip() != SLEEP] == []


def test_mutants_are_delayed_as_well() -> None:
    mutant = next(mutant for mutant in gpu_mutants() if mutant.id == "forward_hopper: values not waited for")
    kernel = delayed(broken(mutant))
    assert kernel is not None
    assert kernel.source.count(SLEEP) >= broken(mutant).source.count("mbarrier.wait(") > 0
    assert kernel.digest != late(mutant.subject).digest


@pytest.mark.parametrize("subject", [WITH_BARRIERS[0], SUBJECTS[0]], ids=str)
@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize(("plain", "late"), [(True, True), (True, False), (False, True)])
def test_strict_level_delays_kernels_with_barriers(
    subject: Subject, level: Level, plain: bool, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []

    def judge(
        kernel: Kernel,
        problem: Problem,
        config: Config,
        target: Target,
        device: torch.device,
        level: Level = Level.FULL,
        *,
        seed: int | None,
    ) -> Verdict:
        asleep = SLEEP in kernel.source
        checked.append((asleep, problem, config, level, seed))
        passed = late if asleep else plain
        return Verdict(passed, 0.5, 70, "" if passed else "random q=1", "a GPU")

    monkeypatch.setattr(check, "check_rendered", judge)
    family, problem, config, specialization = subject
    verdict = check.check_kernel(
        find_family(family), problem, config, specialization, H200, CPU, level, seed=8
    )
    delays = level is Level.STRICT and subject in WITH_BARRIERS and plain
    assert verdict.passed == (plain and (late or not delays))
    assert verdict.failed == ("" if verdict.passed else "delayed random q=1" if plain else "random q=1")
    awake = [run[1:] for run in checked if not run[0]]
    assert all(run[1:] == (config, level, 8) for run in awake)
    assert [run[1:] for run in checked if run[0]] == [
        (problem, config, Level.FULL, 8) for problem, *_ in awake if delays
    ]
