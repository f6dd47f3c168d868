"""Interfaces of a search to its clock, its compile workers and its GPU worker.

A replay implements them by a simulation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple, Protocol

from flashtune.tuner.execution.compile_pool import CompilePool, Compiler
from flashtune.tuner.execution.evaluation import Measurer
from flashtune.tuner.execution.gpu_worker import GpuWorker
from flashtune.tuner.execution.predicted_times import Predictor
from flashtune.tuner.execution.processes import usable_cores

# How long to wait for something to finish before the observer hears that time passes, in seconds.
HEARTBEAT = 0.25


class Clock(Protocol):
    """Tells the time and waits for futures."""

    def now(self) -> float:
        """Seconds since some moment in the past."""
        ...

    def wait_for_any(self, pending: Collection[Future[Any]]) -> None:
        """Returns when one of these is done, or some time has passed."""
        ...

    def wait_for_all(self, pending: Collection[Future[Any]]) -> None:
        """Returns when all of these are done."""
        ...


class WallClock:
    """The clock of a search on real equipment."""

    def now(self) -> float:
        """Seconds of the machine's own clock, which never goes back."""
        return time.monotonic()

    def wait_for_any(self, pending: Collection[Future[Any]]) -> None:
        """Returns when one of these is done, at the latest after a heartbeat."""
        wait(pending, timeout=HEARTBEAT, return_when=FIRST_COMPLETED)

    def wait_for_all(self, pending: Collection[Future[Any]]) -> None:
        """Returns when all of these are done."""
        wait(pending, return_when=ALL_COMPLETED)


class Equipment(NamedTuple):
    """What compiles and what measures.

    Attributes:
        compiler: Compiles candidates, several at once.
        measurer: Verifies and times them, or predicts their times.
        width: How many compile at once.
        clock: Tells how long that takes.
    """

    compiler: Compiler
    measurer: Measurer
    width: int = 1
    clock: Clock = WallClock()


@contextlib.contextmanager
def open_equipment(device: int | None, jobs: int | None = None) -> Iterator[Equipment]:
    """Starts the processes of a search, and ends them with it.

    Args:
        device: The GPU to measure on; None predicts in place of measuring.
        jobs: Compiler processes; as many as there are cores where None, less one that feeds the GPU.
    """
    width = compilers_of(device, jobs)
    with contextlib.ExitStack() as stack:
        measurer: Measurer = Predictor() if device is None else stack.enter_context(GpuWorker(device))
        yield Equipment(stack.enter_context(CompilePool(width)), measurer, width)


def compilers_of(device: int | None, jobs: int | None = None) -> int:
    """How many compiler processes a search has: one for each core, less one where a GPU must be fed."""
    return jobs or max(1, usable_cores() - (device is not None))
