"""The trial log of one search: every finished candidate is stored as a record at once."""

import math
import re
from collections import Counter

import msgspec

from flashtune.core.record import Measurement, Outcome, Record
from flashtune.db.eligibility import ANY_TENSORS, serves_any_tensors
from flashtune.db.store import Store, StoredRecord
from flashtune.dispatch.versions import current_versions
from flashtune.templates.registry import find_family
from flashtune.tuner.candidates import Candidate, Demand, SearchTask, demand
from flashtune.tuner.execution.compile_pool import Compiled
from flashtune.tuner.execution.evaluation import DeviceLostError, Evaluation, Measurer
from flashtune.tuner.execution.processes import NOTHING_LOST
from flashtune.tuner.search.optuna_study import TrialResult
from flashtune.tuner.search.request import Tally
from flashtune.tuner.search.selection import candidate_of, finalists, may_be_selected
from flashtune.tuner.search.warm_start import finished, is_of_gpu

MAX_REASONS = 4
# A fallback takes at most this many times the best time.
DROP_FACTOR = 2.0
# A time above this many times the best does not reset the count of trials without improvement.
WORTH_WAITING_FOR = 0.995


class TrialLog:
    """Stores the records of finished candidates, and tracks the best one and the counts.

    Attributes:
        rows: The record of each finished candidate, those of earlier searches included.
        stale: Candidates in a row that did not improve on the best.
        finalists: Candidates of the last final measurement; empty before it.
    """

    def __init__(
        self, store: Store, scope: SearchTask, measurer: Measurer, *, retry_failed: bool = False
    ) -> None:
        self._store = store
        self._scope = scope
        self._measurer = measurer
        self.rows: dict[Candidate, StoredRecord] = finished(
            store, scope, measurer.provenance, measurer.gpu_uuid, retry_failed=retry_failed
        )
        self._reused = len(self.rows)
        self._outcomes = Counter(row.record.outcome for row in self.rows.values())
        self._pruned = sum(_was_pruned(row.record) for row in self.rows.values())
        self.best: Record | None = None
        self.stale = 0
        self.finalists: tuple[Candidate, ...] = ()
        for row in self.rows.values():
            self._compare(row.record)

    @property
    def best_ms(self) -> float | None:
        """Returns the best time so far, in ms."""
        return self.best.ms if self.best else None

    def tally(self) -> Tally:
        """Returns the counts so far."""
        return Tally(dict(self._outcomes), self._pruned, self._reused)

    def answers(self) -> dict[Candidate, TrialResult]:
        """Returns the results of all finished candidates, for the sampler."""
        return {candidate: answer_of(row.record, self._scope) for candidate, row in self.rows.items()}

    def records(self) -> tuple[Record, ...]:
        """Returns all records of this problem, target and provenance."""
        return tuple(row.record for row in self.rows.values())

    def reasons(self) -> tuple[tuple[str, int], ...]:
        """Returns the most frequent failure messages, with `#` for numbers, and their counts."""
        failed = (row.record for row in self.rows.values() if row.record.outcome is not Outcome.OK)
        return tuple(Counter(_reason(record) for record in failed).most_common(MAX_REASONS))

    def contenders(self) -> tuple[StoredRecord, ...]:
        """Returns the rows to select from: the finalists if any is eligible, else all rows."""
        timed = tuple(self.rows[candidate] for candidate in self.finalists)
        return timed if any(may_be_selected(row.record) for row in timed) else tuple(self.rows.values())

    def limit_ms(self, candidate: Candidate, within: float) -> float | None:
        """Returns the time above which a candidate cannot be a finalist; None if any time can be.

        A fallback must serve tensors of any strides. Its families may be slower, so they have another limit.
        """
        if not self.best_ms:
            return None
        family = find_family(candidate.family)
        if not family.can_address(self._scope.problem.dtype, ANY_TENSORS):
            return within * self.best_ms
        others = finalists(filter(serves_any_tensors, self.records()), 1, 1.0)
        slowest = within * (others[0].ms or math.inf) if others else math.inf
        return min(slowest, DROP_FACTOR * self.best_ms)

    def prune(self, candidate: Candidate, need: Demand) -> TrialResult:
        """Stores a candidate that the model rejected."""
        self._pruned += 1
        return self._write(candidate, Compiled(Outcome.INFEASIBLE, message=need.message), None, need.excess)

    def reject(self, candidate: Candidate, compiled: Compiled) -> TrialResult:
        """Stores a candidate that did not compile or does not fit."""
        self.stale += 1
        return self._write(candidate, compiled, None, excess(compiled, self._scope))

    def finish(self, candidate: Candidate, compiled: Compiled, evaluation: Evaluation) -> TrialResult:
        """Stores a candidate that was launched."""
        self.stale += 1
        return self._write(candidate, compiled, evaluation, 0.0)

    def amend(self, *records: Record) -> None:
        """Stores later results of candidates, all or none: another time, more passed probes, or a failure."""
        self._require_gpu(*(record.measurement for record in records))
        for record, row in zip(records, self._store.add_all([*records]), strict=True):
            candidate = candidate_of(record)
            before = self.rows[candidate].record
            self.rows[candidate] = StoredRecord(row, "", record)
            self._outcomes[before.outcome] -= 1
            self._outcomes[record.outcome] += 1
            failed = record.outcome is not Outcome.OK
            if failed and self.best is not None and candidate_of(self.best) == candidate:
                self.best = next(iter(finalists(self.records(), 1, 1.0)), None)

    def _write(
        self, candidate: Candidate, compiled: Compiled, evaluation: Evaluation | None, over: float
    ) -> TrialResult:
        self._require_gpu(evaluation.measurement if evaluation else None)
        record = Record(
            problem=self._scope.problem,
            target=self._scope.target.name,
            family=candidate.family,
            config=candidate.config,
            specialization=self._scope.specialization,
            kernel=compiled.kernel,
            outcome=evaluation.outcome if evaluation else compiled.outcome,
            provenance=self._measurer.provenance,
            versions=current_versions(candidate.family, self._scope.driver),
            resources=compiled.resources,
            verdict=evaluation.verdict if evaluation else None,
            measurement=evaluation.measurement if evaluation else None,
            message=evaluation.message if evaluation else compiled.message,
            gpu=msgspec.UNSET if self._scope.target.is_listed else self._scope.target,
        )
        self.rows[candidate] = StoredRecord(self._store.add(record), "", record)
        self._outcomes[record.outcome] += 1
        self._compare(record)
        return TrialResult(record.ms if record.outcome is Outcome.OK else None, over)

    def _require_gpu(self, *measurements: Measurement | None) -> None:
        """Raises if the process of the GPU was restarted on another one: their times are not compared."""
        uuid = self._measurer.gpu_uuid
        if not all(is_of_gpu(measurement, uuid) for measurement in measurements):
            raise DeviceLostError(f"GPU {uuid} was replaced by another one: {NOTHING_LOST}")

    def _compare(self, record: Record) -> None:
        if not may_be_selected(record) or record.ms is None:
            return
        if self.best_ms is None or record.ms < WORTH_WAITING_FOR * self.best_ms:
            self.stale = 0
        if self.best_ms is None or record.ms < self.best_ms:
            self.best = record


def answer_of(record: Record, scope: SearchTask) -> TrialResult:
    """Returns the result of a stored record, for the sampler."""
    if record.outcome is Outcome.OK:
        return TrialResult(record.ms)
    if _was_pruned(record):
        return TrialResult(None, demand(scope, candidate_of(record)).excess)
    compiled = Compiled(record.outcome, record.kernel, record.resources)
    return TrialResult(None, excess(compiled, scope))


def excess(compiled: Compiled, scope: SearchTask) -> float:
    """Returns the SRAM beyond the target's capacity, as a fraction of it; 0 if another check failed."""
    if compiled.outcome is not Outcome.INFEASIBLE or compiled.resources is None:
        return 0.0
    return max(0.0, compiled.resources.sram_bytes / scope.target.sram_per_block - 1)


def _was_pruned(record: Record) -> bool:
    """Returns whether the model rejected a candidate. Such records have no kernel."""
    return record.outcome is Outcome.INFEASIBLE and record.kernel is None


def _reason(record: Record) -> str:
    words = re.sub(r"[\d#]+", "#", record.message)
    return f"{record.outcome.value}: {words.splitlines()[0][:80]}" if words else record.outcome.value
