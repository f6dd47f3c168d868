"""One worker thread for the jobs of a process. The thread ends when there was no job for a while."""

import atexit
import contextlib
import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator

import torch

# While a job runs, other threads wait at most this long for Python's lock, in s. The usual 5 ms would delay
# the calls that jobs are meant not to delay.
SWITCH_SECONDS = 2e-4
# An idle thread ends after this time, in s.
LINGER_SECONDS = 10.0
# `CU_STREAM_CAPTURE_MODE_RELAXED` and `CU_STREAM_NON_BLOCKING` of the CUDA driver.
RELAXED, NON_BLOCKING = 2, 1


class Worker:
    """A queue of jobs and the thread that runs them, one after another."""

    # The switch interval to restore after the present jobs.
    _interval: float | None = None

    def __init__(
        self,
        name: str,
        at_end: Callable[[], object] = lambda: None,
        at_exit: Callable[[], object] = lambda: None,
        linger: float = LINGER_SECONDS,
    ) -> None:
        """Names the thread.

        `at_end` runs in the thread when there was no job for a while. `at_exit` runs at the end of the
        process, to end the present job soon. The thread ends after `linger` seconds without a job.
        """
        self._name = name
        self._at_end, self._at_exit, self._linger = at_end, at_exit, linger
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._reset()
        atexit.register(self._stop)
        os.register_at_fork(after_in_child=self._reset)

    def put(self, job: Callable[[], None], limit: int) -> bool:
        """Queues a job. Returns False if `limit` jobs are queued already, and then does nothing."""
        with self._changed:
            if len(self._jobs) >= limit:
                return False
            if self._interval is None:
                # Set by this thread: it may wait for Python's lock before the worker thread runs at all.
                self._interval = sys.getswitchinterval()
                sys.setswitchinterval(min(self._interval, SWITCH_SECONDS))
            self._jobs.append(job)
            if self._thread is None:
                self._start()
            self._changed.notify_all()
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until all jobs are done. Returns False if `timeout` (in s) ends first."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._jobs or self._is_running), timeout)

    @contextlib.contextmanager
    def beside_captures(self, device: torch.device) -> Iterator[None]:
        """Lets this thread load and launch kernels while others use the device or capture a CUDA graph.

        Work is queued on a stream of its own. CUDA would otherwise end the capture of another thread.
        """
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device), _relaxed_captures():
            if device not in self._streams:
                # It is kept, because a stream cannot be freed while a job may use it.
                self._streams[device] = _new_stream(device)
            with torch.cuda.stream(self._streams[device]):
                yield

    def _reset(self) -> None:
        """Starts with no jobs. A forked process has no worker thread."""
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._is_running = self._is_ending = False
        if self._interval is not None:
            # This process was forked while its parent had jobs.
            sys.setswitchinterval(self._interval)
        self._interval = None

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                job()
                # A job may hold tables and sources.
                del job
        except BaseException:
            with self._changed:
                self._start()  # for the other jobs
            raise

    def _next(self) -> Callable[[], None] | None:
        """Returns the next job, or None at the end of the thread."""
        with self._changed:
            self._is_running = False
            if not self._jobs and self._interval is not None:
                sys.setswitchinterval(self._interval)
                self._interval = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._jobs or self._is_ending, self._linger)
            if self._jobs and not self._is_ending:
                self._is_running = True
                return self._jobs.popleft()
            self._thread = None
        # Without the lock, for which calls would wait.
        self._at_end()
        return None

    def _stop(self) -> None:
        """Ends the thread after its present job. A compiler must not run while the process ends."""
        with self._changed:
            self._jobs.clear()
            self._is_ending = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            self._at_exit()
            thread.join()


@contextlib.contextmanager
def _relaxed_captures() -> Iterator[None]:
    """Lets this thread allocate and load while other threads capture a CUDA graph."""
    if torch.version.hip:
        yield
        return
    mode = ctypes.c_int(RELAXED)
    exchange = _driver().cuThreadExchangeStreamCaptureMode
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns a stream for all jobs on a device, which must be the current one.

    torch hands out each of its 32 streams repeatedly. Another thread may capture a graph on such a stream.
    """
    if torch.version.hip:
        return torch.cuda.Stream(device)
    # A new thread has no current context. torch has created the device's primary context.
    driver, context, stream = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    status = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.cuda.current_device())
    status = status or driver.cuCtxSetCurrent(context)
    status = status or driver.cuStreamCreate(ctypes.byref(stream), NON_BLOCKING)
    if status or stream.value is None:
        raise RuntimeError(f"CUDA's driver created no stream: error {status}")
    return torch.cuda.ExternalStream(stream.value, device)


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
