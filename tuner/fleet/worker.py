"""Workers: each claims jobs of a queue, one after the other, and searches them on one GPU."""

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple, Self

import msgspec

from flashtune.core.errors import (
    FlashtuneError,
    MachineError,
    StoreError,
    TableError,
    UsageError,
    printable,
)
from flashtune.core.machine import triton_folder
from flashtune.core.notices import warn_once
from flashtune.core.target import Target
from flashtune.db.errors import RowError
from flashtune.db.queue import Claimant, Lease, LeasedStore, LeaseLostError, Queue, lost
from flashtune.tuner.execution.backend import SearchWorkers, StoppableClock
from flashtune.tuner.execution.compile_pool import CompilerShare, SearchCompiler
from flashtune.tuner.execution.compiled_files import has_received, unpack_files
from flashtune.tuner.execution.evaluation import DeviceLostError, Measurer
from flashtune.tuner.fleet.jobs import claimant, idle_reason, request_of
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.request import Progress, SearchResult


class Patience(NamedTuple):
    """Times of a worker, in seconds."""

    poll: float = 2.0  # Between two looks into an empty queue.
    # Without progress until a search is given up. Every step of a search has a shorter limit of its own.
    hang: float = 600.0


PATIENCE = Patience()
# Heartbeats within the time of one lease.
BEATS = 4


class Ended(NamedTuple):
    """The end of a claimed job."""

    lease: Lease
    result: SearchResult | None  # None if it failed or was lost.
    reason: str  # Why it has no result, or an empty text.


# A text is the reason why a worker has no job.
Event = Lease | Progress | Ended | str


def run_workers(
    queue: Queue,
    target: Target,
    compiler: SearchCompiler,
    measurers: Mapping[int | None, Measurer],
    *,
    exit_when_empty: bool = False,
    patience: Patience = PATIENCE,
) -> Generator[Event]:
    """Runs a worker for each GPU, in threads, and yields claimed jobs, their progress and their ends.

    When the generator is closed, each search selects the best kernel so far, and its job is given back.

    Args:
        queue: The queue. Its database has the results too.
        target: The model of the GPUs.
        compiler: Compiles for all workers.
        measurers: The measurer of each GPU by its index, or of None to predict times.
        exit_when_empty: Whether a worker ends when no job that it may run is open.
        patience: Times of a worker.

    Raises:
        MachineError: The machine prevents searches. The jobs were given back.
        DeviceLostError: The last GPU is lost. The job of a lost GPU goes to another worker.
        StoreError: The server does not answer for long, or stores nothing. The jobs were given back.
    """
    events: SimpleQueue[Event | Future[None]] = SimpleQueue()
    clock = StoppableClock()
    threads = ThreadPoolExecutor(len(measurers))
    running = len(measurers)
    share = CompilerShare(compiler, lambda: running)
    try:
        for device, measurer in measurers.items():
            name = f"GPU {device}" if len(measurers) > 1 else ""
            equipment, own = SearchWorkers(share, measurer), claimant(target, device)
            worker = Worker(queue, target, device, equipment, clock, events.put, name, own)
            job = threads.submit(worker.run, exit_when_empty=exit_when_empty, patience=patience)
            job.add_done_callback(events.put)
        while running:
            event = events.get()
            if isinstance(event, Future):
                running -= 1
                try:
                    event.result()
                except DeviceLostError as error:
                    if not running:
                        raise
                    warn_once(error.reason, f"{error.reason}: the other GPUs continue")
            else:
                yield event
    finally:
        clock.stop()
        if running:
            # No worker waits for a server that is down.
            queue.retries.stop()
        threads.shutdown()


class Worker(NamedTuple):
    """A worker for one GPU."""

    queue: Queue
    target: Target
    device: int | None  # None predicts times.
    equipment: SearchWorkers
    clock: StoppableClock  # Ends its waits.
    report: Callable[[Event], None]  # Gets its events.
    name: str  # Distinguishes its progress from that of other workers.
    claimant: Claimant

    def run(self, *, exit_when_empty: bool, patience: Patience) -> None:
        """Claims jobs and searches them, until the clock stops or the queue is empty."""
        with LeasedStore(self.queue.url) as store:
            store.retries = self.queue.retries
            try:
                while True:
                    store.lease = self.queue.claim(self.claimant)
                    if store.lease is not None:
                        self.report(store.lease)
                        self.report(self._search(store, store.lease, patience))
                        continue
                    waiting = self.queue.open_jobs(self.claimant)
                    self.report(printable(idle_reason(self.queue.batches(), self.claimant, waiting)))
                    if exit_when_empty and not waiting:
                        return
                    self.clock.pause(patience.poll)
            except KeyboardInterrupt:
                # The claim may have been interrupted too.
                with contextlib.suppress(StoreError):
                    self.queue.give_back(self.claimant.name, "its worker was stopped")

    def _search(self, store: LeasedStore, lease: Lease, patience: Patience) -> Ended:
        """Searches a claimed job, and ends, repeats or returns it."""
        clock = StoppableClock(self.clock)
        with Heart(self.queue, lease, clock, patience.hang) as heart:

            def observe(progress: Progress) -> None:
                heart.observe(progress)
                self.report(msgspec.structs.replace(progress, worker=self.name))

            try:
                if lease.spec is None:
                    raise TableError(lease.flaw)
                heart.fetch()
                request = request_of(lease.spec, self.target, self.device)
                tools = self.equipment._replace(clock=clock)
                result = run_search(request, store, observe, tools, keeps_code=_compiles_alone)
                if result.best is None:
                    raise UsageError(_no_kernel(result))
                if not self.queue.finish(lease):
                    raise lost(lease)
            except KeyboardInterrupt:
                if heart.hangs:
                    raise MachineError(heart.fault) from None
                if not heart.fault:
                    raise
                return Ended(lease, None, heart.fault)
            except LeaseLostError as error:
                return Ended(lease, None, str(error))
            except FlashtuneError as error:
                is_of_host = isinstance(error, MachineError | StoreError) and not isinstance(error, RowError)
                # If the server does not answer, the lease ends by itself.
                with contextlib.suppress(StoreError):
                    if is_of_host:
                        self.queue.give_back(lease.worker, str(error))
                    else:
                        # The job may be the cause, also of a lost GPU, so the attempt counts.
                        self.queue.fail(lease, str(error), final=isinstance(error, UsageError))
                if is_of_host or isinstance(error, DeviceLostError):
                    raise
                return Ended(lease, None, str(error))
            except Exception as error:
                # The job may be the cause, so its next workers get a limited number of attempts.
                with contextlib.suppress(StoreError):
                    self.queue.fail(lease, f"{type(error).__name__}: {error}")
                raise
        return Ended(lease, result, "")


class Heart:
    """Renews a lease while its search makes progress, and stops the search's clock when the lease is lost.

    Attributes:
        fault: Why the lease is lost, or an empty text.
        hangs: Whether the search made no progress.
    """

    def __init__(self, queue: Queue, lease: Lease, clock: StoppableClock, hang_seconds: float) -> None:
        self._queue = queue
        self._lease = lease
        self._clock = clock
        self._hang_seconds = hang_seconds
        self._seen: object = None
        self._moved = time.monotonic()
        self._known: set[str] = set()  # Kernels that other machines compiled.
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flashtune-lease", daemon=True)
        self.fault, self.hangs = "", False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()

    def observe(self, progress: Progress) -> None:
        """Notes the progress of the search."""
        seen = progress.phase, progress.counts
        if seen != self._seen:
            self._seen, self._moved = seen, time.monotonic()

    def fetch(self) -> None:
        """Adds kernels that other machines compiled for the job to Triton's cache."""
        for kernel, files in self._queue.new_files(self._lease.job, self._known).items():
            self._known.add(kernel)
            # Without its files, a kernel is compiled here.
            with contextlib.suppress(FlashtuneError, OSError):
                unpack_files(files, triton_folder())

    def _run(self) -> None:
        while not self._stop.wait(self._queue.lease_seconds / BEATS):
            if time.monotonic() - self._moved > self._hang_seconds:
                self.hangs = True
                self.fault = (
                    f"job {self._lease.job} finished nothing for {self._hang_seconds:g} s and goes to "
                    "another worker: check this machine with flashtune doctor"
                )
            else:
                # While the server does not answer, the lease may hold: its checks decide.
                with contextlib.suppress(StoreError):
                    if not self._queue.renew(self._lease):
                        self.fault = str(lost(self._lease))
                    self.fetch()
            if self.fault and not self._stop.is_set():
                self._clock.stop()
                return


def _compiles_alone() -> bool:
    """Returns whether all kernels were compiled here. Other programs must not load those of the database."""
    return not has_received(triton_folder())


def _no_kernel(result: SearchResult) -> str:
    words = "; ".join(f"{count} times {reason}" for reason, count in result.reasons)
    return f"no candidate worked: {words or 'none was tried'}"
