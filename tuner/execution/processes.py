"""Worker processes: how they start, and what becomes of a job whose process crashed or hung.

Workers are forked from a server that has imported what they need and touched no GPU: a replacement
is there in milliseconds, and no process ever inherits a CUDA context. Beside each worker runs a guard, a
process that kills the worker's process group when the worker or the program that started it ends.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from typing import Any, NamedTuple, TypeVar

from pebble import ProcessExpired, ProcessPool

from flashtune.core.errors import MachineError
from flashtune.core.machine import FREE_MEMORY, machine_fault
from flashtune.launch.compilation import first_line

# Nothing of this may touch a GPU when it is imported.
PRELOADED = (
    "triton.compiler",
    "flashtune.tuner.execution.compile_pool",
    "flashtune.tuner.execution.gpu_jobs",
)

Result = TypeVar("Result")


def start_pool(workers: int) -> ProcessPool:
    """A pool whose jobs have time limits and whose workers die with this process."""
    return ProcessPool(max_workers=workers, context=_context(), initializer=_become_worker)


def stop_pool(pool: ProcessPool) -> None:
    """Ends a pool at once, with whatever its workers are doing."""
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()


class Workers:
    """A pool of worker processes that is replaced by another if all of them died at once.

    Attributes:
        stopped: Whether it was stopped: what becomes of its jobs then says nothing.
    """

    def __init__(self, count: int) -> None:
        """Makes the pool.

        Raises:
            MachineError: No process can be started.
        """
        self._count = count
        self.stopped = False
        with _starting():
            self._pool = start_pool(count)

    def schedule(
        self, function: Callable[..., Result], arguments: tuple[Any, ...], seconds: float
    ) -> Future[Result]:
        """Schedules a job with a time limit; the first one starts the processes.

        Raises:
            MachineError: No process can be started.
        """
        with _starting():
            if not self._pool.active and not self.stopped:
                self._stop_soon()
                self._pool = start_pool(self._count)
            job: Future[Result] = self._pool.schedule(function, args=arguments, timeout=seconds)
        return job

    def stop(self) -> None:
        """Ends the processes at once, with whatever they are doing."""
        self.stopped = True
        stop_pool(self._pool)

    def stop_soon(self) -> None:
        """Ends the processes without waiting: a job's callback runs in a thread of the pool itself."""
        self.stopped = True
        self._stop_soon()

    def _stop_soon(self) -> None:
        threading.Thread(target=stop_pool, args=(self._pool,), daemon=True).start()


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Turns errors of starting processes into `MachineError`."""
    try:
        yield
    except (OSError, EOFError, RuntimeError, MemoryError) as error:
        # A pool that is broken raises a RuntimeError, and its cause is the reason.
        cause = error.__cause__ or error
        reason = machine_fault(cause) or f"{first_line(cause)}: {FREE_MEMORY}"
        raise MachineError(f"worker processes cannot be started: {reason}") from error


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    # Signals to the process group reach the server too: Ctrl-C would print a traceback while it imports, and
    # SIGTERM would end it before the program has stopped its pools. It inherits the mask.
    # The resource tracker, which starts first, unblocks the signals here.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _become_worker() -> None:
    # Ctrl-C is for the search to handle: in the terminal's own group it would reach ptxas too, and
    # look like a failed compilation.
    os.setpgid(0, 0)
    # Triton prints whole programs when a compilation fails; what matters of it is in the error.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    # Imported where workers are forked from, and nothing that whoever starts them has to wait for.
    import torch

    # Other workers keep the cores busy, and what threads share waits for those that have none.
    torch.set_num_threads(1)
    # A worker has nothing to tidy up, and a handler would wait for the compiler to come back.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _start_guard()


def _start_guard() -> None:
    """Forks the process that kills this one's group when this one, or the program that uses it, ends.

    A thread could not: it waits for a compiler that holds the interpreter's lock. Nor could a signal at a
    parent's death: the parent is the server that workers are forked from, and a signal to the worker would
    not reach ptxas.
    """
    program = multiprocessing.parent_process()
    assert program is not None
    assert program.pid is not None
    group, server = os.getpgid(0), os.getppid()
    reading, writing = os.pipe()
    if os.fork():
        # Held open, never written: the guard reads its end of file when this process ended.
        os.close(reading)
        return
    os.setpgid(0, 0)
    os.close(writing)
    ended = _wait_for_end(program.pid, reading)
    # The group is gone if nothing else ran in it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    if ended:
        # The server ends by itself, but unloads torch first, which takes seconds.
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)
    os._exit(0)


def _wait_for_end(program: int, pipe: int) -> bool:
    """Waits until a process ends or a pipe is closed; whether it was the process."""
    try:
        watched = os.pidfd_open(program)
    except ProcessLookupError:
        return True
    return watched in select.select([pipe, watched], [], [])[0]


class Lost(NamedTuple):
    """How a job's process was lost.

    Attributes:
        timed_out: Whether it met its time limit.
        words: How it was lost, for a sentence.
        signal: The signal that ended its process, 0 if none is known.
        taken: Whether a process had taken the job.
    """

    timed_out: bool
    words: str
    signal: int = 0
    taken: bool = True


def lacked_memory(message: str) -> bool:
    """Whether an error says that the GPU's memory did not suffice."""
    return "out of memory" in message.lower()


def failure_of(job: Future[Any]) -> Lost | None:
    """Returns how a finished job's process was lost; None if the job's code returned or raised.

    A job that was cancelled counts as one whose process is gone.
    """
    if job.cancelled():
        return Lost(False, "was cancelled", taken=False)
    error = job.exception()
    if isinstance(error, TimeoutError):
        return Lost(True, "did not end within its time limit")
    if isinstance(error, ProcessExpired):
        code = error.exitcode or 0
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return Lost(False, f"its process died ({how})", max(0, -code))
    if isinstance(error, (BrokenProcessPool, CancelledError)):
        return Lost(False, "its process died", taken=False)
    return None


def exit_code_of(job: Future[Any]) -> int:
    """The exit code of the process that a job took down, 0 if it took none down."""
    error = None if job.cancelled() else job.exception()
    return (error.exitcode or 0) if isinstance(error, ProcessExpired) else 0


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))
