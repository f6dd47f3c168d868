"""Interfaces of a search to its clock, its compile workers and its GPU worker.

A simulation of a search has implementations of its own.
"""

import contextlib
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple, Protocol

from flashtune.tuner.execution.compile_pool import CompilePool, SearchCompiler
from flashtune.tuner.execution.cpus import available_cpus
from flashtune.tuner.execution.evaluation import Measurer, Predictor
from flashtune.tuner.execution.gpu_worker import GpuWorker

# Longest wait for a job before the observer gets the progress again, in seconds.
HEARTBEAT = 0.25


class Clock(Protocol):
    """Measures time and waits for futures."""

    def now(self) -> float:
        """Returns seconds since a fixed moment in the past."""
        ...

    def wait_for_any(self, pending: Collection[Future[Any]]) -> None:
        """Returns when one of the futures is done, or after a short time."""
        ...

    def wait_for_all(self, pending: Collection[Future[Any]]) -> None:
        """Returns when all of the futures are done."""
        ...


class WallClock:
    """The clock of a search that compiles and measures."""

    def now(self) -> float:
        """Returns seconds of the machine's monotonic clock."""
        return time.monotonic()

    def wait_for_any(self, pending: Collection[Future[Any]]) -> None:
        """Returns when one of the futures is done, at the latest after `HEARTBEAT`."""
        wait(pending, timeout=HEARTBEAT, return_when=FIRST_COMPLETED)

    def wait_for_all(self, pending: Collection[Future[Any]]) -> None:
        """Returns when all of the futures are done."""
        wait(pending, return_when=ALL_COMPLETED)


class SearchWorkers(NamedTuple):
    """The compiler, measurer and clock of a search."""

    compiler: SearchCompiler  # Compiles candidates, several at once.
    measurer: Measurer  # Verifies and times candidates, or predicts their times.
    width: int = 1  # Number of candidates that compile at once.
    clock: Clock = WallClock()


@contextlib.contextmanager
def open_workers(device: int | None, jobs: int | None = None) -> Iterator[SearchWorkers]:
    """Starts the processes of a search, and stops them when the context ends.

    Without a device, times are predicted. By default there is one compiler process per core, less one if a
    GPU is used.
    """
    width = compilers_of(device, jobs)
    with contextlib.ExitStack() as stack:
        measurer: Measurer = Predictor() if device is None else stack.enter_context(GpuWorker(device))
        compiler = stack.enter_context(CompilePool(width))
        compiler.start()
        yield SearchWorkers(compiler, measurer, width)


def compilers_of(device: int | None, jobs: int | None = None) -> int:
    """Returns the number of compiler processes: `jobs`, or one per core, less one if a GPU is used."""
    return jobs or max(1, available_cpus() - (device is not None))
