"""The outcomes of candidates on a GPU, whose checks and times are given here."""

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from flashtune.core.errors import KernelError
from flashtune.core.kernel import Specialization
from flashtune.core.record import Measurement, Outcome, Verdict
from flashtune.core.target import find_target
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.execution import gpu_jobs, timing
from flashtune.tuner.execution.evaluation import Evaluation
from flashtune.verification.cases import Level
from tests.tuner.search.fakes import a_config, a_problem

H200 = find_target("h200")
QUICK = Verdict(True, 0.5, 9, "", "NVIDIA H200")
FULL = Verdict(True, 0.5, 99, "", "NVIDIA H200")
WRONG = Verdict(False, 9.0, 9, "needle", "NVIDIA H200")
TASK = (a_problem(), Candidate("forward_q_outer", a_config()), Specialization(), H200, 0)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_jobs, "prepare", lambda index: None)
    monkeypatch.setattr(gpu_jobs, "_roomy_tensors", lambda *_: None)
    monkeypatch.setattr(gpu_jobs, "kernel_run", lambda *_: None)
    monkeypatch.setattr(gpu_jobs, "clock_probe", lambda index: SimpleNamespace(is_throttled=lambda: False))
    monkeypatch.setattr(gpu_jobs, "leave_if_broken", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def evaluated(
    monkeypatch: pytest.MonkeyPatch, first: float, ms: float, verdicts: dict[Level, Verdict | KernelError]
) -> Evaluation:
    """Evaluates a candidate whose first launch and measurement take these times. 1 ms is the limit."""

    def check(*arguments: object) -> Verdict:
        level = arguments[-1]
        assert isinstance(level, Level)
        verdict = verdicts[level]
        if isinstance(verdict, KernelError):
            raise verdict
        return verdict

    monkeypatch.setattr(gpu_jobs, "once", lambda run, device: first)
    monkeypatch.setattr(gpu_jobs, "measure", lambda *_, **__: Measurement(ms, ms, ms, 21))
    monkeypatch.setattr(gpu_jobs, "check_kernel", check)
    return gpu_jobs.evaluate_candidate(*TASK, drop_above_ms=1.0)


@pytest.mark.parametrize(
    ("first", "ms", "verdicts", "outcome", "verdict"),
    [
        (0.5, 0.5, {Level.FULL: FULL}, Outcome.OK, FULL),
        (0.5, 0.5, {Level.FULL: WRONG}, Outcome.WRONG_RESULT, WRONG),
        (2.0, 2.0, {Level.QUICK: QUICK}, Outcome.OK, None),
        (2.0, 2.0, {Level.QUICK: WRONG}, Outcome.WRONG_RESULT, WRONG),
        (2.0, 0.5, {Level.QUICK: QUICK, Level.FULL: FULL}, Outcome.OK, FULL),
        (2.0, 0.5, {Level.QUICK: QUICK, Level.FULL: WRONG}, Outcome.WRONG_RESULT, WRONG),
        (0.5, 0.5, {Level.FULL: KernelError("out of registers")}, Outcome.LAUNCH_ERROR, None),
    ],
)
def test_only_kernels_that_passed_are_right(
    monkeypatch: pytest.MonkeyPatch,
    first: float,
    ms: float,
    verdicts: dict[Level, Verdict | KernelError],
    outcome: Outcome,
    verdict: Verdict | None,
) -> None:
    evaluation = evaluated(monkeypatch, first, ms, verdicts)
    assert (evaluation.outcome, evaluation.verdict) == (outcome, verdict)
    assert (evaluation.measurement is not None) is (outcome is Outcome.OK)
    assert bool(evaluation.message) is (verdict is not FULL)


@pytest.mark.parametrize(("verdict", "outcome"), [(FULL, Outcome.OK), (WRONG, Outcome.WRONG_RESULT)])
def test_only_kernels_that_passed_with_delays_are_right(
    monkeypatch: pytest.MonkeyPatch, verdict: Verdict, outcome: Outcome
) -> None:
    monkeypatch.setattr(gpu_jobs, "check_delayed", lambda *_: verdict)
    assert gpu_jobs.evaluate_late(*TASK).outcome is outcome


CPU = torch.device("cpu")


class Clock(NamedTuple):
    """A clock that is never throttled."""

    def is_throttled(self) -> bool:
        """Refuses."""
        return False


@pytest.fixture(name="slow_first", autouse=True)
def slow_first_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches in which the first launch takes 1.03 ms and all others take 1 ms."""

    def batch(runs: Sequence[timing.Run], device: torch.device) -> list[float]:
        for run in runs:
            run()
        return [1.03] + [1.0] * (len(runs) - 1)

    monkeypatch.setattr(timing, "_batch", batch)
    monkeypatch.setattr(timing, "clock_probe", lambda index: Clock())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


@pytest.mark.parametrize("launches", [1, 2, 3])
def test_equal_launches_have_equal_times_after_a_pause(launches: int) -> None:
    measurements = timing.measure_interleaved([lambda: None] * launches, CPU, rounds=15)
    assert [measurement.ms for measurement in measurements] == [1.0] * launches


def test_every_launch_is_sampled_once_a_round() -> None:
    measurements = timing.measure_interleaved([lambda: None] * 3, CPU, rounds=15)
    assert [measurement.samples for measurement in measurements] == [15] * 3


def test_sustained_launches_repeat_alone_in_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    monkeypatch.setattr(timing, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    order: list[str] = []
    runs = [lambda: order.append("first"), lambda: order.append("second")]

    def batch(launches: Sequence[timing.Run], _: torch.device) -> list[float]:
        # The clock changes once in a period, after its first half.
        is_early = len(order) % period < period // 2
        for launch in launches:
            launch()
        return [2.0 if is_early else 1.0] * len(launches)

    period = 4 * timing.BATCH
    monkeypatch.setattr(timing, "_batch", batch)
    measurements = timing.measure_sustained(runs, CPU, seconds=4.5)
    # The clock is read once before a period and once before each batch.
    each = [period] * 4
    names = ["first", "second", "second", "first"]
    assert order == [name for name, count in zip(names, each, strict=True) for _ in range(count)]
    assert [(row.samples, row.ms, row.p80) for row in measurements] == [(period, 1.0, 1.0)] * 2
