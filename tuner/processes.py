"""Worker processes: how they start, and what becomes of a job whose process crashed or hung.

Workers are forked from a server that has imported what they need and touched no GPU: a replacement
is there in milliseconds, and no process ever inherits a CUDA context.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import ForkServerContext
from typing import Any

from pebble import ProcessExpired, ProcessPool

# Nothing of this may touch a GPU when it is imported.
PRELOADED = ("triton.compiler", "flashtune.tuner.compile_pool", "flashtune.tuner.jobs")


def start_pool(workers: int) -> ProcessPool:
    """A pool whose jobs have time limits and whose workers die with this process."""
    return ProcessPool(max_workers=workers, context=_context(), initializer=_become_worker)


def stop_pool(pool: ProcessPool) -> None:
    """Ends a pool at once, with whatever its workers are doing."""
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
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
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def failure_of(job: Future[Any]) -> tuple[bool, str] | None:
    """Whether a finished job timed out, and what became of it in words; None if its code returned or raised.

    A job that was cancelled counts as one whose process is gone.
    """
    if job.cancelled():
        return False, "was cancelled"
    error = job.exception()
    if isinstance(error, TimeoutError):
        return True, "did not end within its time limit"
    if isinstance(error, ProcessExpired):
        code = error.exitcode or 0
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return False, f"its process died ({how})"
    if isinstance(error, (BrokenProcessPool, CancelledError)):
        return False, "its process died"
    return None


def exit_code_of(job: Future[Any]) -> int:
    """The exit code of the process that a job took down, 0 if it took none down."""
    error = None if job.cancelled() else job.exception()
    return (error.exitcode or 0) if isinstance(error, ProcessExpired) else 0


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))
