"""Worker processes: their start, and the handling of crashes and hangs.

Workers are forked from a server that has imported their modules and has not used a GPU. A replacement
therefore starts in milliseconds, and no process inherits a CUDA context. Each worker has a guard process.
It kills the worker's process group when the worker or the program that started it ends.
"""

import atexit
import contextlib
import functools
import multiprocessing
import os
import select
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from typing import Any, NamedTuple, TypeVar

from pebble import ProcessExpired, ProcessPool

from flashtune.core.errors import MachineError
from flashtune.core.machine import FREE_MEMORY, machine_fault, temporary_folder
from flashtune.launch.compilation import first_line

# These imports must not use a GPU.
PRELOADED = (
    "triton.compiler.code_generator",
    "triton.experimental.gluon.language.nvidia.hopper",
    "flashtune.tuner.execution.compile_pool",
    "flashtune.tuner.execution.gpu_jobs",
    "flashtune.tuner.execution.preloaded",
)

# Pipes and sockets for the start of a worker.
WORKER_FILES = 10
NOTHING_LOST = "what was finished is stored, and the same command goes on"

Result = TypeVar("Result")


def start_server() -> None:
    """Starts the server of processes, which imports their modules meanwhile."""
    with _starting():
        _context()


def start_pool(workers: int) -> ProcessPool:
    """Returns a pool with time limits for jobs, and starts its workers. They end with this process."""
    with _starting():
        context, folder = _context(), _temporary_folder()
        _require_files()
    return started(
        ProcessPool(max_workers=workers, context=context, initializer=_become_worker, initargs=(folder,))
    )


def _require_files() -> None:
    """Raises if this process cannot open the files of a worker. The server would print a traceback."""
    with contextlib.ExitStack() as opened:
        for _ in range(WORKER_FILES):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))


def started(pool: ProcessPool) -> ProcessPool:
    """Starts the workers of a new pool, and returns it. After an error or Ctrl-C, none of them is left."""
    try:
        # Ctrl-C interrupts the main thread. A process that it was starting would then never be stopped.
        with _starting(), ThreadPoolExecutor(1) as starter:
            starter.submit(lambda: pool.active).result()
    except BaseException:
        stop_pool(pool)
        raise
    return pool


def stop_pool(pool: ProcessPool) -> None:
    """Stops a pool at once, and kills running jobs."""
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()


class Workers:
    """A pool of worker processes. A broken pool is replaced.

    Attributes:
        stopped: Whether it was stopped. Results of its jobs are then without meaning.
    """

    def __init__(self, count: int) -> None:
        """Starts the server of processes, which imports their modules."""
        self._count = count
        self._pool: ProcessPool | None = None
        # Callbacks of a broken pool schedule jobs in another thread.
        self._lock = threading.Lock()
        self.stopped = False
        start_server()

    def schedule(
        self, function: Callable[..., Result], arguments: tuple[Any, ...], seconds: float
    ) -> Future[Result]:
        """Schedules a job with a time limit. The first job starts the processes."""
        with self._lock, _starting():
            job: Future[Result] = self._running().schedule(function, args=arguments, timeout=seconds)
        return job

    def start(
        self,
        function: Callable[..., Any] | None = None,
        arguments: tuple[Any, ...] = (),
        seconds: float | None = None,
    ) -> None:
        """Starts the processes, and maybe a job without a result, in another thread.

        An error here recurs when the next job is scheduled.
        """

        def begin() -> None:
            with contextlib.suppress(MachineError), self._lock, _starting():
                pool = self._running()
                if function is not None:
                    pool.schedule(function, args=arguments, timeout=seconds)

        threading.Thread(target=begin).start()

    def _running(self) -> ProcessPool:
        """Returns the pool with running processes. The caller holds the lock."""
        if self.stopped:
            raise MachineError("the worker processes were stopped")
        if self._pool is not None and not self._pool.active:
            broken, self._pool = self._pool, None
            threading.Thread(target=stop_pool, args=(broken,), daemon=True).start()
        if self._pool is None:
            self._pool = start_pool(self._count)
        return self._pool

    def supervise(
        self,
        function: Callable[..., Result],
        arguments: tuple[Any, ...],
        seconds: float,
        settled: Future[Any],
        settle: Callable[[Future[Result]], None],
    ) -> None:
        """Schedules a job with the callback `settle`, which settles the future `settled`.

        `settled` is cancelled if the processes were stopped. It gets the error if none can be started. If
        `settled` is cancelled, the job is stopped.
        """

        def finish(job: Future[Result]) -> None:
            if self.stopped:
                if not settled.cancel():
                    settled.set_exception(CancelledError())
            # A running future cannot be cancelled any more.
            elif settled.running() or settled.set_running_or_notify_cancel():
                settle(job)

        try:
            job = self.schedule(function, arguments, seconds)
        except MachineError as error:
            settled.set_exception(stopped(str(error)))
            return
        job.add_done_callback(finish)
        settled.add_done_callback(lambda future: future.cancelled() and job.cancel())

    def stop(self) -> None:
        """Stops the processes at once, and kills running jobs. Waits for a start under way."""
        self.stopped = True
        with self._lock:
            pool, self._pool = self._pool, None
        # Callbacks may wait for the lock, and the pool for its callbacks.
        if pool is not None:
            stop_pool(pool)

    def stop_soon(self) -> None:
        """Stops the processes without waiting, for callbacks, which run in a thread of the pool."""
        self.stopped = True
        threading.Thread(target=self.stop, daemon=True).start()


def stopped(fault: str) -> MachineError:
    """Returns the error that stops a search because of a fault of the machine."""
    return MachineError(f"{fault}; {NOTHING_LOST}")


def import_safely() -> None:
    """Prevents that new processes import modules from the present folder, as `python -c` does."""
    os.environ["PYTHONSAFEPATH"] = "1"


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Converts errors of starting processes to `MachineError`."""
    try:
        yield
    except (OSError, EOFError, RuntimeError, MemoryError) as error:
        # A broken pool raises a RuntimeError. Its cause is the reason.
        cause = error.__cause__ or error
        reason = machine_fault(cause) or f"{first_line(cause)}: {FREE_MEMORY}"
        raise MachineError(f"worker processes cannot be started: {reason}") from error


@functools.cache
def _context() -> ForkServerContext:
    import_safely()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    # Signals to the process group reach the server too. Ctrl-C would print a traceback while it imports, and
    # the others would end it before the program has stopped its pools. The server inherits the signal mask.
    # Start the resource tracker before, because its start unblocks the signals.
    resource_tracker.ensure_running()
    blocked = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


@functools.cache
def _temporary_folder() -> str:
    """Returns the folder of the workers' temporary files. Killed compilers leave files."""
    folder = tempfile.mkdtemp(prefix="flashtune-", dir=temporary_folder())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _become_worker(folder: str) -> None:
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # Only the search handles Ctrl-C. In the terminal's process group the signal would reach ptxas too, and
    # look like a failed compilation.
    os.setpgid(0, 0)
    # Triton prints whole programs when a compilation fails; the error has the relevant part.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    # A local import, so that the program that starts workers does not wait for it.
    import torch

    # Other workers keep the cores busy, so that several threads would wait for one another.
    torch.set_num_threads(1)
    # A worker needs no cleanup, and a Python handler would run only after the compiler returns.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGHUP})
    _start_guard(folder)


def _start_guard(folder: str) -> None:
    """Forks a guard that kills this process group when this process, or the program that uses it, ends.

    If the program ends, it also removes the folder of temporary files, since a killed program does not.

    A thread cannot do this: it would wait for a compiler that holds the interpreter's lock. A
    parent-death signal cannot either: the parent is the fork server, and the signal would not reach ptxas.
    """
    program = multiprocessing.parent_process()
    assert program is not None
    assert program.pid is not None
    group, server = os.getpgid(0), os.getppid()
    reading, writing = os.pipe()
    if os.fork():
        # The write end stays open and unused. The guard reads end-of-file when this process ends.
        os.close(reading)
        return
    os.setpgid(0, 0)
    os.close(writing)
    ended = _wait_for_end(program.pid, reading)
    # The group does not exist any more if it had no other process.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    if ended:
        shutil.rmtree(folder, ignore_errors=True)
        # Without this the server ends only after it unloaded torch, which takes seconds.
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)
    os._exit(0)


def _wait_for_end(program: int, pipe: int) -> bool:
    """Waits until a process ends or a pipe is closed, and returns whether the process ended."""
    try:
        watched = os.pidfd_open(program)
    except ProcessLookupError:
        return True
    return watched in select.select([pipe, watched], [], [])[0]


class LostJob(NamedTuple):
    """How a job's process was lost."""

    timed_out: bool  # Whether it reached its time limit.
    words: str  # A description, as part of a sentence.
    signal: int = 0  # The signal that ended its process; 0 if none is known.
    taken: bool = True  # Whether a process had taken the job.


def lacked_memory(message: str) -> bool:
    """Returns whether an error message is about too little GPU memory."""
    return "out of memory" in message.lower()


def failure_of(job: Future[Any]) -> LostJob | None:
    """Returns how a finished job's process was lost; None if the job's code returned or raised.

    A cancelled job counts as a job with a lost process.
    """
    if job.cancelled():
        return LostJob(False, "was cancelled", taken=False)
    error = job.exception()
    if isinstance(error, TimeoutError):
        return LostJob(True, "did not end within its time limit")
    if isinstance(error, ProcessExpired):
        code = error.exitcode or 0
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return LostJob(False, f"its process died ({how})", max(0, -code))
    if isinstance(error, (BrokenProcessPool, CancelledError)):
        return LostJob(False, "its process died", taken=False)
    return None


def exit_code_of(job: Future[Any]) -> int:
    """Returns the exit code of a job's process if that ended, else 0."""
    error = None if job.cancelled() else job.exception()
    return (error.exitcode or 0) if isinstance(error, ProcessExpired) else 0
