"""The outcomes of candidates on a GPU, whose checks and times are given here."""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from flashtune.core.errors import KernelError, ProblemError
from flashtune.core.kernel import Specialization
from flashtune.core.record import Measurement, Outcome, Verdict
from flashtune.core.target import find_target
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.execution import gpu_jobs, timing
from flashtune.tuner.execution.evaluation import DeviceLostError
from flashtune.verification.cases import Level
from tests.support.fakes import install
from tests.tuner.conftest import GpuMemory
from tests.tuner.search.fakes import a_config, a_problem

H200 = find_target("h200")
QUICK = Verdict(True, 0.5, 9, "", "NVIDIA H200")
FULL = Verdict(True, 0.5, 99, "", "NVIDIA H200")
WRONG = Verdict(False, 9.0, 9, "needle", "NVIDIA H200")
TASK = (a_problem(), Candidate("forward_q_outer", a_config()), Specialization(), H200, 0)


CLOCK = SimpleNamespace(is_throttled=lambda: False)
# Functions of the GPU process that need a GPU.
NEED_GPU = ("prepare", "_roomy_tensors", "kernel_run", "once", "measure", "check_kernel", "check_delayed")


@pytest.fixture
def gpu() -> Iterator[dict[str, mock.Mock]]:
    """Mocks of the functions that need a GPU."""
    mocks: Any = dict.fromkeys(NEED_GPU, mock.DEFAULT)
    mocks["on_gpu"] = lambda measured, device: measured
    with mock.patch.multiple(gpu_jobs, clock_probe=lambda index: CLOCK, **mocks) as functions:
        yield functions


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
    gpu: dict[str, mock.Mock],
    first: float,
    ms: float,
    verdicts: dict[Level, Verdict | KernelError],
    outcome: Outcome,
    verdict: Verdict | None,
) -> None:
    def check(*arguments: Any) -> Verdict:
        verdict = verdicts[arguments[-1]]
        if isinstance(verdict, KernelError):
            raise verdict
        return verdict

    gpu["once"].return_value, gpu["measure"].return_value = first, Measurement(ms, ms, ms, 21)
    gpu["check_kernel"].side_effect = check
    evaluation = gpu_jobs.evaluate_candidate(*TASK, drop_above_ms=1.0)
    assert (evaluation.outcome, evaluation.verdict) == (outcome, verdict)
    assert (evaluation.measurement is not None) is (outcome is Outcome.OK)
    assert bool(evaluation.message) is (verdict is not FULL)


@pytest.mark.parametrize(("verdict", "outcome"), [(FULL, Outcome.OK), (WRONG, Outcome.WRONG_RESULT)])
def test_only_kernels_that_passed_with_delays_are_right(
    gpu: dict[str, mock.Mock], verdict: Verdict, outcome: Outcome
) -> None:
    gpu["check_delayed"].return_value = verdict
    assert gpu_jobs.evaluate_late(*TASK).outcome is outcome


CPU = torch.device("cpu")


class Timer:
    """Batches in which the first launch takes 1.03 ms and all others take 1 ms, or those of `batch`."""

    batch: Callable[[Sequence[timing.Run]], list[float]] | None = None

    def _batch(self, runs: Sequence[timing.Run], device: torch.device) -> list[float]:
        if self.batch is not None:
            return self.batch(runs)
        for run in runs:
            run()
        return [1.03] + [1.0] * (len(runs) - 1)

    def clock_probe(self, index: int) -> object:
        return CLOCK


@pytest.mark.parametrize(("free", "error"), [(0.9, ProblemError), (0.2, DeviceLostError)])
def test_lack_of_memory_is_a_fault_of_the_shape_or_of_other_programs(
    monkeypatch: pytest.MonkeyPatch, gpu_memory: GpuMemory, free: float, error: type[Exception]
) -> None:
    make = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(gpu_jobs, "make_tensors", make)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 2**30, 2**30))
    with pytest.raises(error, match="GPU 0 cannot"):
        gpu_jobs._roomy_tensors(a_problem(), torch.device("cuda", 0), False)
    assert make.call_count == 2


@pytest.fixture(autouse=True)
def timer(monkeypatch: pytest.MonkeyPatch, gpu_memory: GpuMemory) -> Timer:
    fake = Timer()
    install(monkeypatch, fake, timing)
    return fake


@pytest.mark.parametrize("launches", [1, 2, 3])
def test_equal_launches_have_equal_times_after_a_pause(launches: int) -> None:
    measurements = timing.measure_interleaved([lambda: None] * launches, CPU, rounds=15)
    assert [measurement.ms for measurement in measurements] == [1.0] * launches


def test_every_launch_is_sampled_once_a_round() -> None:
    measurements = timing.measure_interleaved([lambda: None] * 3, CPU, rounds=15)
    assert [measurement.samples for measurement in measurements] == [15] * 3


def test_sustained_launches_repeat_alone_in_both_orders(
    monkeypatch: pytest.MonkeyPatch, timer: Timer
) -> None:
    now = iter(range(1000))
    monkeypatch.setattr(timing, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    order: list[str] = []
    runs = [lambda: order.append("first"), lambda: order.append("second")]

    def batch(launches: Sequence[timing.Run]) -> list[float]:
        # The clock changes once in a period, after its first half.
        is_early = len(order) % period < period // 2
        for launch in launches:
            launch()
        return [2.0 if is_early else 1.0] * len(launches)

    period = 4 * timing.BATCH
    timer.batch = batch
    measurements = timing.measure_sustained(runs, CPU, seconds=4.5)
    # The clock is read once before a period and once before each batch.
    each = [period] * 4
    names = ["first", "second", "second", "first"]
    assert order == [name for name, count in zip(names, each, strict=True) for _ in range(count)]
    assert [(row.samples, row.ms, row.p80) for row in measurements] == [(period, 1.0, 1.0)] * 2
