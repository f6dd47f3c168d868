"""Interfaces of a search to its clock, its compile workers and its GPU worker.

A simulation of a search has implementations of its own.
"""

import contextlib
import threading
import time
from collections.abc import Collection, Iterator, Sequence
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


class StoppableClock(WallClock):
    """The clock of a search in a thread. Its waits raise `KeyboardInterrupt` after `stop` was called."""

    def __init__(self, clock: Clock | None = None) -> None:
        """Waits as another clock does, which may be stopped too."""
        self._clock = clock or WallClock()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Ends the waits of all threads."""
        self._stopped.set()

    def now(self) -> float:
        """Returns the seconds of the other clock."""
        return self._clock.now()

    def wait_for_any(self, pending: Collection[Future[Any]]) -> None:
        """Returns when one of the futures is done, at the latest after `HEARTBEAT`."""
        self._clock.wait_for_any(pending)
        self.pause(0)

    def wait_for_all(self, pending: Collection[Future[Any]]) -> None:
        """Returns when all of the futures are done."""
        while waiting := [job for job in pending if not job.done()]:
            self.wait_for_any(waiting)

    def pause(self, seconds: float) -> None:
        """Waits for some seconds."""
        if self._stopped.wait(seconds):
            raise KeyboardInterrupt


class SearchWorkers(NamedTuple):
    """The compiler, measurer and clock of a search."""

    compiler: SearchCompiler  # Compiles candidates, several at once.
    measurer: Measurer  # Verifies and times candidates, or predicts their times.
    clock: Clock = WallClock()


class HostWorkers(NamedTuple):
    """The compile pool of a host, and the measurer of each of its GPUs, or a predictor without one."""

    compiler: CompilePool
    measurers: dict[int | None, Measurer]


@contextlib.contextmanager
def open_host(devices: Sequence[int], jobs: int | None = None) -> Iterator[HostWorkers]:
    """Starts the processes of searches on some GPUs, and stops them when the context ends.

    Without devices, times are predicted. By default there is one compiler process per core, less one for
    each GPU.
    """
    with contextlib.ExitStack() as stack:
        measurers: dict[int | None, Measurer] = {
            device: stack.enter_context(GpuWorker(device)) for device in devices
        }
        compiler = stack.enter_context(CompilePool(compilers_of(devices, jobs)))
        compiler.start()
        yield HostWorkers(compiler, measurers or {None: Predictor()})


@contextlib.contextmanager
def open_workers(device: int | None, jobs: int | None = None) -> Iterator[SearchWorkers]:
    """Starts the processes of searches on one GPU, as `open_host`."""
    with open_host(() if device is None else (device,), jobs) as host:
        yield SearchWorkers(host.compiler, host.measurers[device])


def compilers_of(devices: Sequence[int], jobs: int | None = None) -> int:
    """Returns the number of compiler processes: `jobs`, or one per core, less one for each GPU."""
    return jobs or max(1, available_cpus() - len(devices))
