"""Searches on the GPUs of this host: one at a time on each GPU, with one compile pool for all."""

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import msgspec

from flashtune.core.notices import warn_once
from flashtune.db.store import Store
from flashtune.tuner.execution.backend import SearchWorkers, StoppableClock, open_host
from flashtune.tuner.execution.compile_pool import CompilerShare, SearchCompiler
from flashtune.tuner.execution.evaluation import DeviceLostError, Measurer
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.request import Observer, Progress, SearchRequest, SearchResult


class LocalExecutor:
    """An `Executor` with a thread for each GPU. A GPU that is free takes the next search.

    Results are stored in a database of this process. Workers stay warm between searches.
    """

    def __init__(
        self,
        store: Store,
        compiler: SearchCompiler,
        measurers: Mapping[int | None, Measurer],
        driver: str | None = None,
    ) -> None:
        """Takes the measurer of each GPU by its index, or of None to predict times.

        `driver` is the version of the GPU driver if the GPUs are those of other machines.
        """
        self._store = store
        self._compiler = compiler
        self._measurers = dict(measurers)
        self._driver = driver
        self._running: dict[Future[SearchResult], tuple[int | None, SearchRequest]] = {}

    def run(self, requests: Sequence[SearchRequest], observer: Observer) -> Generator[SearchResult]:
        """Runs searches, as `Executor.run` says. A search that loses its GPU goes on at another one once."""
        waiting, free = deque(requests), deque(self._measurers)
        # The searches that no other one has compiled ahead. A search takes one in its finals.
        ahead = iter(requests[len(free) :])
        events: SimpleQueue[Progress | Future[SearchResult]] = SimpleQueue()
        clock, moved = StoppableClock(), set[str]()
        threads = ThreadPoolExecutor(len(free))

        def start() -> None:
            while waiting and free:
                device, request = free.popleft(), waiting.popleft()
                search = functools.partial(self._search, request, device, clock, events.put)
                job = threads.submit(search, functools.partial(next, ahead, None))
                self._running[job] = device, request
                job.add_done_callback(events.put)

        try:
            start()
            while self._running:
                event = events.get()
                if isinstance(event, Progress):
                    observer(event)
                    continue
                device, request = self._running.pop(event)
                try:
                    result = event.result()
                except DeviceLostError as error:
                    key = request.problem.key
                    if key in moved or not (free or self._running):
                        raise
                    moved.add(key)
                    waiting.appendleft(request)
                    warn_once(f"GPU {device}", f"{error.reason}: the other GPUs continue, also with {key}")
                    start()
                else:
                    free.append(device)
                    start()
                    yield result
        finally:
            if self._running:
                clock.stop()
                self._store.retries.stop()
            threads.shutdown()
            self._running.clear()

    def _search(
        self,
        request: SearchRequest,
        device: int | None,
        clock: StoppableClock,
        report: Observer,
        following: Callable[[], SearchRequest | None],
    ) -> SearchResult:
        """Runs one search in a thread."""
        worker = f"GPU {device}" if len(self._measurers) > 1 else ""

        def observe(progress: Progress) -> None:
            report(msgspec.structs.replace(progress, worker=worker))

        compiler = CompilerShare(self._compiler, lambda: len(self._running))
        workers = SearchWorkers(compiler, self._measurers[device], clock)
        request = msgspec.structs.replace(request, device=device, driver=self._driver)
        return run_search(request, self._store, observe, workers, following=following)


@contextlib.contextmanager
def open_local(store: Store, devices: Sequence[int], jobs: int | None = None) -> Iterator[LocalExecutor]:
    """Starts the processes of an executor, as `open_host`, and stops them when the context ends."""
    with open_host(devices, jobs) as host:
        yield LocalExecutor(store, host.compiler, host.measurers)
