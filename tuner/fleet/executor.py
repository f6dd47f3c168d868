"""Runs searches through a queue: by workers of this host, and of others."""

import contextlib
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence

from flashtune.core.errors import StoreError
from flashtune.core.notices import warn_once
from flashtune.core.record import Provenance
from flashtune.db.queue import Queue
from flashtune.tuner.execution.backend import open_host
from flashtune.tuner.execution.compile_pool import SearchCompiler
from flashtune.tuner.execution.evaluation import Measurer
from flashtune.tuner.fleet.jobs import queue_versions, spec_of
from flashtune.tuner.fleet.worker import PATIENCE, Ended, Patience, run_workers
from flashtune.tuner.search.request import Observer, Progress, SearchRequest, SearchResult, Stop, Tally


class QueueExecutor:
    """An `Executor` with workers for the GPUs of this host, maybe none. Workers elsewhere help.

    The observer gets the progress of searches on this host. Jobs are cancelled if `run` ends early.
    """

    def __init__(
        self,
        queue: Queue,
        compiler: SearchCompiler | None,
        measurers: Mapping[int | None, Measurer],
        patience: Patience = PATIENCE,
    ) -> None:
        self._queue = queue
        self._compiler = compiler
        self._measurers = measurers
        self._patience = patience

    def run(self, requests: Sequence[SearchRequest], observer: Observer) -> Generator[SearchResult]:
        """Runs searches, as `Executor.run` says. A result from elsewhere has no default and no duration."""
        waiting = {request.problem.key: request for request in requests}
        if not waiting:
            return
        queue, specs, versions = self._queue, [spec_of(request) for request in requests], queue_versions()
        batch, _ = queue.enqueue(specs, versions)
        try:
            if self._compiler is not None:
                workers = run_workers(
                    queue,
                    requests[0].target,
                    self._compiler,
                    self._measurers,
                    exit_when_empty=True,
                    patience=self._patience,
                )
                with contextlib.closing(workers) as events:
                    for event in events:
                        if isinstance(event, Progress):
                            observer(event)
                        elif isinstance(event, Ended) and event.result:
                            if waiting.pop(event.result.problem.key, None):
                                yield event.result
                            if not waiting:
                                break
            while waiting:
                ended = queue.ended(specs, versions)
                for key in ended.keys() & waiting.keys():
                    yield self._result(waiting.pop(key), ended[key])
                if waiting:
                    time.sleep(self._patience.poll)
        except BaseException:
            self._cancel(batch)
            raise

    def _cancel(self, batch: str) -> None:
        """Cancels the jobs of a batch. A server that is down does not hide the error before."""
        self._queue.retries.stop()
        try:
            self._queue.cancel(batch)
        except StoreError:
            warn_once(batch, f"batch {batch} stays queued: flashtune queue cancel --batch {batch} ends it")

    def _result(self, request: SearchRequest, reason: str) -> SearchResult:
        """Returns the stored result of a search that ended elsewhere."""
        name = request.target.name
        outcomes = Counter(entry.record.outcome for entry in self._queue.records(request.problem, name))
        chosen = [row for row in self._queue.selections(name) if row.record.problem == request.problem]
        best = chosen[0] if chosen and not reason else None
        return SearchResult(
            problem=request.problem,
            target=request.target,
            provenance=Provenance.PREDICTED if request.device is None else Provenance.MEASURED,
            stop=Stop.ELSEWHERE,
            seconds=0.0,
            counts=Tally(dict(outcomes)),
            candidates=sum(outcomes.values()),
            best=best.record if best else None,
            best_id=best.id if best else None,
            is_selected=best is not None,
            default=None,
            reasons=((reason, 1),) if reason else (),
        )


@contextlib.contextmanager
def open_queue(queue: Queue, devices: Sequence[int], jobs: int | None = None) -> Iterator[QueueExecutor]:
    """Starts the processes of an executor, as `open_host`. Without devices, only other hosts search."""
    if not devices:
        yield QueueExecutor(queue, None, {})
        return
    with open_host(devices, jobs) as host:
        yield QueueExecutor(queue, host.compiler, host.measurers)
