"""Tests of interleaved timing."""

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from flashtune.tuner.execution import timing

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
