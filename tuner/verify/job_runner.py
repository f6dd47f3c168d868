"""Runs the jobs of `flashtune verify` in worker processes, up to a time limit or a signal."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from pebble import ProcessPool

from flashtune.tuner.execution.processes import stop_pool
from flashtune.tuner.verify.verify_jobs import failure

# Interval of checks for the time limit and for signals.
POLL_SECONDS = 0.2

Progress = Callable[[str, int, int], None]
Key = TypeVar("Key", bound=Hashable)


class Runs:
    """Runs jobs in worker processes until a time limit or a call of `stop`.

    Attributes:
        stopped: Whether `stop` was called.
        error: The error that ended the run, with `hold_errors`.
    """

    def __init__(
        self,
        seconds: float | None = None,
        progress: Progress = lambda phase, done, total: None,
        *,
        hold_errors: bool = False,
    ) -> None:
        """Sets the limit.

        Args:
            seconds: Time limit from now on, in seconds; None for no limit.
            progress: Called with the phase, the number of finished jobs and the total.
            hold_errors: Whether an error that is not a job's result ends the run and becomes `error`. The
                caller can then store the results so far, and must raise the error.
        """
        self._end = None if seconds is None else time.monotonic() + seconds
        self._progress = progress
        self._holds_errors = hold_errors
        self.stopped = False
        self.error: Exception | None = None

    def stop(self) -> None:
        """Ends the run. Unfinished jobs are dropped."""
        self.stopped = True

    @property
    def ended(self) -> bool:
        """Returns whether the time limit is over, `stop` was called or an error is held."""
        late = self._end is not None and time.monotonic() >= self._end
        return late or self.stopped or self.error is not None

    def run(
        self,
        phase: str,
        start: Callable[[], ProcessPool],
        function: Callable[..., Any],
        jobs: Mapping[Key, tuple[Any, ...]],
        seconds: float,
    ) -> dict[Key, tuple[str, Any]]:
        """Calls a function for each job in a pool of processes.

        Returns:
            For each finished job: why it has no result, empty if it has one, and the result. Unfinished jobs
            are left out.

        Raises:
            MachineError: The machine failed, for example with a full disk, and errors are not held.
        """
        if not jobs or self.ended:
            return {}
        pool = start()
        try:
            futures = {key: pool.schedule(function, args=job, timeout=seconds) for key, job in jobs.items()}
            pending: set[Future[Any]] = set(futures.values())
            while pending and not self.ended:
                finished, pending = wait(pending, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                for one in finished:
                    self._result(one)
                self._progress(phase, len(futures) - len(pending), len(futures))
            results = {key: self._result(one) for key, one in futures.items() if one.done()}
            return {key: result for key, result in results.items() if result is not None}
        finally:
            stop_pool(pool)

    def _result(self, job: Future[Any]) -> tuple[str, Any] | None:
        """Returns why a job has no result, and its result; None after a held error."""
        try:
            lost = failure(job)
        except Exception as error:
            if not self._holds_errors:
                raise
            self.error = self.error or error
            return None
        return lost, None if lost else job.result()


@contextlib.contextmanager
def stopped_by_signals(runs: Runs) -> Iterator[None]:
    """Makes SIGINT and SIGTERM stop a run instead of the program. A second signal ends the program."""
    usual = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for one, handler in usual.items():
            signal.signal(one, handler)

    def stop(*_: object) -> None:
        restore()
        runs.stop()

    for one in usual:
        signal.signal(one, stop)
    try:
        yield
    finally:
        restore()
