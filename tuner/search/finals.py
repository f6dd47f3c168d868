"""The final measurement of the best candidates in one run, and the last verification of the selection."""

import math
from collections.abc import Iterable

import msgspec

from flashtune.core.record import Outcome, Provenance, Record
from flashtune.db.eligibility import serves_any_tensors
from flashtune.db.store import StoredRecord
from flashtune.tuner.candidates import SearchTask
from flashtune.tuner.execution.backend import SearchWorkers
from flashtune.tuner.execution.compile_pool import Compiled
from flashtune.tuner.execution.evaluation import Evaluation
from flashtune.tuner.search.request import Budget
from flashtune.tuner.search.selection import candidate_of, finalists, may_be_selected, select
from flashtune.tuner.search.trial_log import TrialLog
from flashtune.verification.check import joined
from flashtune.verification.schedule_fuzzing import DELAYS

# Fastest finalists whose kernels with delays are compiled during the final measurement.
COMPILED_AHEAD = 4


def run_finals(scope: SearchTask, journal: TrialLog, tools: SearchWorkers, budget: Budget) -> None:
    """Times the best candidates, the fastest default, the best fallback and the baselines in one run.

    If that run measures nothing, the finalists of the previous run remain.
    """
    _verify_skipped(scope, journal, tools, budget)
    best = finalists(journal.records(), budget.finalists, budget.within)
    compile_ahead(scope, journal, tools, budget)
    rows = (journal.rows.get(candidate) for candidate in scope.defaults())
    defaults = [row.record for row in rows if row is not None and may_be_selected(row.record)]
    if not best:
        return
    default = sorted(defaults, key=lambda record: record.ms or 0.0)[:1]
    fallback = finalists(filter(serves_any_tensors, journal.records()), 1, 1.0)
    entrants = tuple(dict.fromkeys(map(candidate_of, (*best, *default, *fallback))))
    job = tools.measurer.finals(scope, entrants, budget.closest_seconds)
    tools.clock.wait_for_all((job,))
    measured = job.result()
    if measured:
        # A search that is killed leaves all times of a run, or none.
        timed = zip(entrants, measured, strict=False)
        before = ((journal.rows[candidate].record, measurement) for candidate, measurement in timed)
        journal.amend(*(msgspec.structs.replace(old, measurement=new) for old, new in before))
        journal.finalists = entrants


def compile_ahead(scope: SearchTask, journal: TrialLog, tools: SearchWorkers, budget: Budget) -> None:
    """Starts compiling the best candidates so far with delays, for the last verification."""
    if tools.measurer.provenance is Provenance.MEASURED:
        for record in finalists(journal.records(), COMPILED_AHEAD, budget.within):
            tools.compiler.compile_delayed(scope, candidate_of(record))


def _verify_skipped(scope: SearchTask, journal: TrialLog, tools: SearchWorkers, budget: Budget) -> None:
    """Verifies the fastest candidates that were too slow for the full verification when they were tried.

    They can be finalists if a faster candidate has failed since.
    """
    best = finalists(journal.records(), 1, 1.0)
    slowest = budget.within * (best[0].ms or math.inf) if best else math.inf
    skipped = [
        record
        for record in journal.records()
        if record.outcome is Outcome.OK and record.verdict is None and not may_be_selected(record)
    ]
    for record in sorted(skipped, key=lambda record: record.ms or math.inf)[: budget.finalists]:
        if (record.ms or math.inf) > slowest:
            return
        compiled = Compiled(record.outcome, record.kernel, record.resources)
        job = tools.measurer.evaluate(scope, candidate_of(record), compiled, None)
        tools.clock.wait_for_all((job,))
        evaluation = job.result()
        journal.amend(
            msgspec.structs.replace(
                record,
                outcome=evaluation.outcome,
                verdict=evaluation.verdict,
                measurement=evaluation.measurement,
                message=evaluation.message,
            )
        )


def prove_choice(scope: SearchTask, journal: TrialLog, tools: SearchWorkers, budget: Budget) -> None:
    """Verifies the best candidate with schedule fuzzing. If it fails, the next best is verified."""
    while (row := selected(journal.contenders())) is not None:
        record = row.record
        if record.verdict and record.verdict.probes and DELAYS in record.verdict.probes:
            return
        job = tools.measurer.evaluate_delayed(scope, candidate_of(record))
        tools.clock.wait_for_all((job,))
        evaluation = job.result()
        if evaluation is None:
            return
        journal.amend(_judged(record, evaluation))
        if evaluation.outcome is Outcome.OK:
            return
        following = selected(journal.rows[candidate] for candidate in journal.finalists)
        # Candidates that were not among the finalists may now be faster than the remaining finalists.
        if following is None or (following.record.ms or 0.0) > budget.within * (record.ms or 0.0):
            run_finals(scope, journal, tools, budget)


def selected(rows: Iterable[StoredRecord]) -> StoredRecord | None:
    """Returns the row to select among those of one problem and run."""
    listed = list(rows)
    record = select(row.record for row in listed)
    return next((row for row in listed if row.record is record), None)


def _judged(record: Record, evaluation: Evaluation) -> Record:
    """Returns a record with the result of schedule fuzzing: more passed probes, or a failure."""
    if evaluation.outcome is not Outcome.OK:
        return msgspec.structs.replace(
            record,
            outcome=evaluation.outcome,
            verdict=evaluation.verdict,
            measurement=None,
            message=evaluation.message,
        )
    assert record.verdict is not None
    assert evaluation.verdict is not None
    return msgspec.structs.replace(record, verdict=joined([record.verdict, evaluation.verdict]))
