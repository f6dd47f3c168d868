"""Tests of interleaved timing."""

from __future__ import annotations

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
    found = timing.measure_interleaved([lambda: None] * launches, CPU, rounds=15)
    assert [one.ms for one in found] == [1.0] * launches


def test_every_launch_is_sampled_once_a_round() -> None:
    found = timing.measure_interleaved([lambda: None] * 3, CPU, rounds=15)
    assert [one.samples for one in found] == [15] * 3


def test_sustained_launches_repeat_alone_in_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    monkeypatch.setattr(timing, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    order: list[str] = []
    runs = [lambda: order.append("first"), lambda: order.append("second")]
    found = timing.measure_sustained(runs, CPU, seconds=3.5)
    # The clock is read once before a period and once before each batch.
    batches = 3
    each = [timing.BATCH * batches] * 4
    names = ["first", "second", "second", "first"]
    assert order == [name for name, count in zip(names, each, strict=True) for _ in range(count)]
    # The first half of a period has another clock.
    assert [one.samples for one in found] == [timing.BATCH * batches] * 2
