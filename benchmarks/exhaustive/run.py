"""Makes a tabular benchmark: all cores compile, while one process verifies and times finished kernels."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from benchmarks.exhaustive.jobs import Batch, Described, describe_candidate, measure_batch
from benchmarks.exhaustive.truth_table import Row, Sampled, TruthTable, draw, rounded, values_of, write_table
from flashtune.core.problem import Problem
from flashtune.core.record import Measurement, Outcome, Resources
from flashtune.core.target import Target
from flashtune.dispatch.versions import current_versions
from flashtune.tuner.candidates import Candidate, SearchTask, contiguous_specialization, open_spaces
from flashtune.tuner.execution.compile_pool import COMPILE_SECONDS, Compiled
from flashtune.tuner.execution.evaluation import Evaluation
from flashtune.tuner.execution.gpu_jobs import fatal_error, time_finalists
from flashtune.tuner.execution.processes import exit_code_of, failure_of, start_pool, stop_pool

BATCH = 16
BATCH_SECONDS = 90.0
ALONE_SECONDS = 30.0
FINALS_SECONDS = 120.0
# The best of all batches, within so much of the fastest, are timed once more.
FINALISTS = 40
FINALS_WITHIN = 1.12
# How often what is there so far is written, in seconds.
WRITE_EVERY = 15.0
MAX_MESSAGE = 100


class Ready(NamedTuple):
    """A candidate, and the result of its compilation."""

    candidate: Candidate
    described: Described


class Workers:
    """The processes that compile and the one that measures, for one problem after the other."""

    def __init__(self, device: int, jobs: int) -> None:
        self.device = device
        self.jobs = jobs
        self.compilers = start_pool(jobs)
        self._gpu = start_pool(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop_pool(self.compilers)
        stop_pool(self._gpu)

    def on_gpu(self, function: Any, arguments: tuple[Any, ...], seconds: float) -> Future[Any]:
        """Starts a job in the GPU's own process, or in a new one where that one broke."""
        if not self._gpu.active:
            stop_pool(self._gpu)
            self._gpu = start_pool(1)
        job: Future[Any] = self._gpu.schedule(function, args=arguments, timeout=seconds)
        return job


class TableRun:
    """One table while it is made."""

    def __init__(
        self, workers: Workers, scope: SearchTask, drawn: tuple[Candidate, ...], until: float
    ) -> None:
        self._workers = workers
        self._scope = scope
        self._until = until
        self._waiting = deque(drawn)
        self._anchor = scope.defaults()[0]
        self._compiling: dict[Future[Described], Candidate] = {}
        self._ready: deque[Ready] = deque()
        self.rows: list[Row] = []
        self.anchors: list[float] = []

    def run(self) -> Iterator[None]:
        """Compiles and measures until all is done or time is up; yields after each batch."""
        running: Future[Batch] | None = None
        batch: list[Ready] = []
        while time.monotonic() < self._until:
            self._compile()
            if running is None and (len(self._ready) >= BATCH or not self._compiling):
                batch = [self._ready.popleft() for _ in range(min(BATCH, len(self._ready)))]
                if not batch:
                    return
                running = self._started(batch, BATCH_SECONDS)
            pending: list[Future[Any]] = [*self._compiling, *([running] if running else [])]
            wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
            self._collect()
            if running is not None and running.done():
                self._keep(batch, running)
                running = None
                yield
        for job in self._compiling:
            job.cancel()
        if running is not None:
            self._keep(batch, running)

    def _compile(self) -> None:
        """Keeps the compilers busy, and no further ahead of the GPU than a few batches."""
        while (
            self._waiting and len(self._compiling) < 2 * self._workers.jobs and len(self._ready) < 8 * BATCH
        ):
            candidate = self._waiting.popleft()
            scope = self._scope
            arguments = scope.problem, candidate, scope.specialization, scope.target
            job = self._workers.compilers.schedule(
                describe_candidate, args=arguments, timeout=COMPILE_SECONDS
            )
            self._compiling[job] = candidate

    def _collect(self) -> None:
        for job in [job for job in self._compiling if job.done()]:
            candidate = self._compiling.pop(job)
            failure = failure_of(job)
            if failure is None:
                described = job.result()
            else:
                outcome = Outcome.TIMEOUT if failure[0] else Outcome.COMPILE_ERROR
                described = Described(Compiled(outcome, message=f"compiling {failure[1]}"))
            ready = Ready(candidate, described)
            if described.compiled.outcome is Outcome.OK:
                self._ready.append(ready)
            else:
                self.rows.append(row_of(ready, None, 0))

    def _started(self, batch: list[Ready], seconds: float) -> Future[Batch]:
        scope = self._scope
        candidates = tuple(ready.candidate for ready in batch)
        arguments = scope.problem, self._anchor, candidates, scope.specialization, scope.target
        return self._workers.on_gpu(measure_batch, (*arguments, self._workers.device), seconds)

    def _keep(self, batch: list[Ready], job: Future[Batch]) -> None:
        """Adds the results of a batch; if its process died, each candidate is tried again alone."""
        wait([job])
        failure = failure_of(job)
        if failure is None:
            measured = job.result()
            self.anchors.append(rounded(measured.anchor_ms))
            number = len(self.anchors) - 1
            self.rows += [
                row_of(ready, evaluation, number)
                for ready, evaluation in zip(batch, measured.evaluations, strict=True)
            ]
        elif len(batch) > 1:
            for ready in batch:
                self._keep([ready], self._started([ready], ALONE_SECONDS))
        else:
            outcome = Outcome.TIMEOUT if failure[0] else Outcome.LAUNCH_ERROR
            message = fatal_error(exit_code_of(job)) or f"running {failure[1]}"
            self.rows.append(row_of(batch[0], Evaluation(outcome, message=message), 0))

    def finals(self, table: TruthTable) -> TruthTable:
        """The table with the best of all batches, and the peers, timed once more in one run."""
        times = zip(table.rows, table.first_times(), strict=True)
        ranked = sorted(((row, ms) for row, ms in times if ms), key=lambda timed: timed[1])[:FINALISTS]
        best = [row for row, ms in ranked if ms <= FINALS_WITHIN * ranked[0][1]]
        if not best:
            return table
        scope = self._scope
        entrants = tuple(table.candidate(row) for row in best)
        arguments = scope.problem, entrants, scope.specialization, scope.target, self._workers.device
        job = self._workers.on_gpu(time_finalists, arguments, FINALS_SECONDS)
        wait([job])
        if failure_of(job) is not None or not job.result():
            return table
        measured: tuple[Measurement, ...] = job.result()
        final = {row.values: sampled(measurement) for row, measurement in zip(best, measured, strict=True)}
        rows = tuple(msgspec.structs.replace(row, final=final.get(row.values)) for row in table.rows)
        return msgspec.structs.replace(table, rows=rows, peers=measured[0].peers)


def row_of(ready: Ready, evaluation: Evaluation | None, batch: int) -> Row:
    """The outcome of a candidate; `evaluation` is None if it did not compile or does not fit."""
    compiled = ready.described.compiled
    return Row(
        values=values_of(ready.candidate.config),
        outcome=evaluation.outcome if evaluation else compiled.outcome,
        message=(evaluation.message if evaluation else compiled.message)[:MAX_MESSAGE],
        resources=_brief(compiled.resources),
        loop=ready.described.loop,
        batch=batch,
        first=sampled(evaluation.measurement) if evaluation and evaluation.measurement else None,
    )


def sampled(measurement: Measurement) -> Sampled:
    """A measurement as a row keeps it."""
    ms, p20, p80 = map(rounded, (measurement.ms, measurement.p20, measurement.p80))
    return Sampled(ms, p20, p80, measurement.samples)


def _brief(resources: Resources | None) -> Resources | None:
    if resources is None:
        return None
    return msgspec.structs.replace(resources, compile_seconds=round(resources.compile_seconds, 3))


class Drawing(msgspec.Struct, frozen=True):
    """Which configs a table holds, and how long making it may take."""

    configs: int | None = 300  # How many to draw; None for all.
    seed: int = 0  # Of the draw.
    seconds: float = 150.0  # Wall clock after which no batch is begun.


def make_table(
    workers: Workers, problem: Problem, family: str, target: Target, drawing: Drawing, path: Path
) -> TruthTable:
    """Makes one table and writes it, at intervals and at the end, also after an error."""
    started = time.monotonic()
    spaces = open_spaces(problem, target, (family,))
    scope = SearchTask(problem, target, contiguous_specialization(problem), spaces)
    fitting, drawn = draw(scope, drawing.configs, drawing.seed)
    making = TableRun(workers, scope, drawn, started + drawing.seconds)
    empty = TruthTable(
        problem=problem,
        target=target.name,
        family=family,
        versions=current_versions(family),
        space=spaces[0].space.size(),
        fitting=fitting,
        drawn=len(drawn),
        seed=drawing.seed,
        seconds=0.0,
        jobs=workers.jobs,
        anchors=(),
        peers=(),
        fields=spaces[0].family.config_type.__struct_fields__,
        rows=(),
    )

    def table() -> TruthTable:
        return msgspec.structs.replace(
            empty,
            seconds=round(time.monotonic() - started, 1),
            anchors=tuple(making.anchors),
            rows=tuple(making.rows),
        )

    written = started
    final: TruthTable | None = None
    try:
        for _ in making.run():
            if time.monotonic() - written > WRITE_EVERY:
                written = time.monotonic()
                write_table(table(), path)
        final = making.finals(table())
        return final
    finally:
        write_table(final or table(), path)
