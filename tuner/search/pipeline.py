"""The pipeline of one search: many candidates compile while one is verified and measured."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from flashtune.core.record import Outcome, Provenance
from flashtune.tuner.candidates import Candidate, SearchTask, demand
from flashtune.tuner.execution.backend import SearchWorkers
from flashtune.tuner.execution.compile_pool import Compiled
from flashtune.tuner.execution.evaluation import Evaluation
from flashtune.tuner.search.finals import compile_ahead
from flashtune.tuner.search.policy import Strategy
from flashtune.tuner.search.request import Budget, Stop
from flashtune.tuner.search.selection import candidate_of
from flashtune.tuner.search.trial_log import TrialLog

# Candidates in the GPU process: one that runs, and the next.
ON_DEVICE = 2
# Compiled candidates that wait for the GPU. A longer queue would be proposed without the latest results.
READY = 6
# Results after which the best candidate is often the final one.
SURE = 5
# Proposals between two checks of the budget: the model may prune many in a row.
PROPOSALS_PER_CHECK = 64


class Pipeline:
    """Moves candidates from proposal to record."""

    def __init__(
        self,
        scope: SearchTask,
        proposer: Strategy,
        equipment: SearchWorkers,
        journal: TrialLog,
        enqueued: frozenset[Candidate] = frozenset(),
    ) -> None:
        """Started `enqueued` candidates are finished even if the time budget is spent."""
        self._scope = scope
        self._proposer = proposer
        self._compiler, self._measurer, self._clock = equipment
        self._journal = journal
        self._promised = enqueued
        self._equipment = equipment
        self._compiling: dict[Future[Compiled], Candidate] = {}
        self._begun: dict[Future[Compiled], float] = {}  # When their compilations began.
        self._compile_seconds: list[float] = []
        self._ready: deque[tuple[Candidate, Compiled]] = deque()
        self._running: dict[Future[Evaluation], tuple[Candidate, Compiled]] = {}
        self._exhausted = False
        self._stop: Stop | None = None
        self._gain = math.inf

    def run(self, budget: Budget, started: float, beat: Callable[[], None]) -> Stop:
        """Runs until a budget is spent or every candidate was tried.

        `beat` is called when a job finished, and at regular intervals.
        """
        was_late = False
        while True:
            stop = self._stop = self._stop or self._reason_to_stop(budget, started)
            if stop is not None and not (stop in (Stop.SECONDS, Stop.GAIN) and self._owes()):
                self._drain()
                return stop
            is_late = self._is_late(budget, started)
            if is_late and not was_late:
                # The compilers are free for the kernels of the last verification.
                compile_ahead(self._scope, self._journal, self._equipment, budget)
            was_late = is_late
            if stop is None and not is_late:
                self._fill(budget)
            self._launch(budget.within)
            if not self._compiling and not self._running:
                if self._exhausted or is_late:
                    return Stop.EXHAUSTED if self._exhausted else Stop.SECONDS
                continue
            finished = len(self._journal.rows)
            pending: list[Future[Any]] = [*self._compiling, *self._running]
            self._clock.wait_for_any(pending)
            try:
                self._collect_compiled()
            finally:
                # Store finished evaluations even if compiling raised an error.
                self._collect_evaluated()
            if budget.gain is not None and len(self._journal.rows) != finished:
                self._gain = self._proposer.expected_gain()
            beat()

    def _owes(self) -> bool:
        """Returns whether enqueued candidates are unfinished, and drops others that wait for the GPU."""
        self._ready = deque(entry for entry in self._ready if entry[0] in self._promised)
        waiting = (candidate for candidate, _ in (*self._ready, *self._running.values()))
        return not self._promised.isdisjoint((*self._compiling.values(), *waiting))

    def _drain(self) -> None:
        """Waits for the candidates in the GPU process and stores their results. Stops all compilations."""
        for job in self._compiling:
            job.cancel()
        self._clock.wait_for_all(self._running)
        self._collect_evaluated()

    def _reason_to_stop(self, budget: Budget, started: float) -> Stop | None:
        if budget.seconds is not None and self._clock.now() - started >= budget.seconds:
            return Stop.SECONDS
        if budget.trials is not None and self._journal.tally().tried >= budget.trials:
            return Stop.TRIALS
        if budget.patience is not None and self._journal.best and self._journal.stale >= budget.patience:
            return Stop.PATIENCE
        if budget.gain is not None and self._journal.best and self._gain < budget.gain:
            return Stop.GAIN
        return None

    def _is_late(self, budget: Budget, started: float) -> bool:
        """Returns whether a new candidate would not be compiled within the time budget, as most are not."""
        if budget.seconds is None or not self._compile_seconds:
            return False
        left = budget.seconds - (self._clock.now() - started)
        return left < statistics.median(self._compile_seconds)

    def _fill(self, budget: Budget) -> None:
        """Proposes candidates, prunes those that do not fit, and starts compiling the others."""
        # The width changes while other searches start and end.
        width = self._compiler.width
        room = width + READY + ON_DEVICE
        if budget.trials is not None:
            room = min(room, budget.trials - self._journal.tally().tried)
        for _ in range(PROPOSALS_PER_CHECK):
            in_flight = len(self._compiling) + len(self._ready) + len(self._running)
            if self._exhausted or in_flight >= room or len(self._compiling) >= width:
                return
            candidate = self._proposer.ask()
            if candidate is None:
                self._exhausted = True
                return
            need = demand(self._scope, candidate)
            if need.excess:
                self._proposer.tell(candidate, self._journal.prune(candidate, need))
            else:
                job = self._compiler.submit(self._scope, candidate)
                self._compiling[job], self._begun[job] = candidate, self._clock.now()

    def _launch(self, within: float) -> None:
        """Submits compiled candidates to the GPU process.

        A candidate that cannot be a finalist is verified on small problems only, and its timing stops early.
        """
        while self._ready and len(self._running) < ON_DEVICE:
            candidate, compiled = self._ready.popleft()
            limit = self._journal.limit_ms(candidate, within)
            job = self._measurer.evaluate(self._scope, candidate, compiled, limit)
            self._running[job] = candidate, compiled

    def _collect_compiled(self) -> None:
        for job in _in_turn(self._compiling):
            compiled = job.result()
            candidate = self._compiling.pop(job)
            self._compile_seconds.append(self._clock.now() - self._begun.pop(job))
            if compiled.outcome is Outcome.OK:
                add = self._ready.appendleft if candidate in self._promised else self._ready.append
                add((candidate, compiled))
            else:
                self._proposer.tell(candidate, self._journal.reject(candidate, compiled))

    def _collect_evaluated(self) -> None:
        before = self._journal.best
        for job in _in_turn(self._running):
            evaluation = job.result()
            candidate, compiled = self._running.pop(job)
            self._proposer.tell(candidate, self._journal.finish(candidate, compiled, evaluation))
        best = self._journal.best
        is_measured = self._measurer.provenance is Provenance.MEASURED
        if is_measured and best is not None and best is not before and len(self._journal.rows) > SURE:
            # The last verification then need not wait for the compiler.
            self._compiler.compile_delayed(self._scope, candidate_of(best))


def _in_turn(jobs: Iterable[Future[Any]]) -> list[Future[Any]]:
    """Returns the finished jobs, failed ones last, so that an error does not lose other results."""
    done = [job for job in jobs if job.done()]
    return sorted(done, key=lambda job: job.exception() is not None)
