"""The end of a search: the best timed once more, in one run, and the one that is chosen proven once more."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from flashtune.db.rules import serves_any_tensors
from flashtune.db.store import StoredRecord
from flashtune.record import Outcome, Record, Verdict
from flashtune.tuner.candidates import Scope
from flashtune.tuner.equipment import Equipment
from flashtune.tuner.evaluation import Evaluation
from flashtune.tuner.journal import Journal
from flashtune.tuner.selection import candidate_of, finalists, may_be_selected, select

# Candidates that are timed once more, in turn. Many, since the first time of each was taken alone: where only
# the fastest run in turn, the GPU is hotter, and who was first by a few percent may be twentieth.
FINALISTS = 24
# The finals take no candidate that is slower than this many times the best.
FINALS_WITHIN = 1.15
# What a verdict names beside its probes: warps that fell behind.
DELAYS = "delays"


def run_finals(scope: Scope, journal: Journal, tools: Equipment) -> tuple[StoredRecord, ...]:
    """Times the best candidates, the fastest default, what may stand in, and the peers in one run.

    Raises:
        DeviceLostError: The GPU was taken away.
    """
    best = finalists(journal.records(), FINALISTS, FINALS_WITHIN)
    rows = (journal.rows.get(candidate) for candidate in scope.defaults())
    defaults = [row.record for row in rows if row is not None and may_be_selected(row.record)]
    if not best:
        return ()
    default = sorted(defaults, key=lambda record: record.ms or 0.0)[:1]
    stand_in = finalists(filter(serves_any_tensors, journal.records()), 1, FINALS_WITHIN)
    entrants = tuple(dict.fromkeys(map(candidate_of, (*best, *default, *stand_in))))
    job = tools.measurer.finals(scope, entrants)
    tools.clock.wait_for_all((job,))
    return tuple(
        journal.amend(msgspec.structs.replace(journal.rows[candidate].record, measurement=measurement))
        for candidate, measurement in zip(entrants, job.result(), strict=False)
    )


def prove_choice(
    scope: Scope, journal: Journal, tools: Equipment, final: tuple[StoredRecord, ...]
) -> tuple[StoredRecord, ...]:
    """Proves what is about to be selected with warps that fall behind; after one that fails, finals again.

    Args:
        scope: The problem and the GPU.
        journal: Where what is found is written.
        tools: What proves.
        final: The finalists; empty where there were no finals, and all are chosen from.

    Returns:
        The finalists, with what is known of them now.

    Raises:
        DeviceLostError: The GPU was taken away.
    """
    while (row := selected(final or journal.rows.values())) is not None:
        record = row.record
        if record.verdict and record.verdict.probes and DELAYS in record.verdict.probes:
            break
        job = tools.measurer.evaluate_delayed(scope, candidate_of(record))
        tools.clock.wait_for_all((job,))
        evaluation = job.result()
        if evaluation is None:
            break
        known = journal.amend(_judged(record, evaluation))
        if evaluation.outcome is Outcome.OK:
            return tuple(known if one is row else one for one in final)
        # The others may all be far slower than what was not among them for want of room.
        final = run_finals(scope, journal, tools)
    return final


def selected(rows: Iterable[StoredRecord]) -> StoredRecord | None:
    """The row to select among those of one problem and run."""
    listed = list(rows)
    record = select(row.record for row in listed)
    return next((row for row in listed if row.record is record), None)


def _judged(record: Record, evaluation: Evaluation) -> Record:
    """A record with what delays told: more checks that were passed, or a failure."""
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
    return msgspec.structs.replace(record, verdict=_both(record.verdict, evaluation.verdict))


def _both(before: Verdict, late: Verdict) -> Verdict:
    """Two verdicts of one kernel, both passed, as one that names the delays."""
    return msgspec.structs.replace(
        before,
        worst_ratio=max(before.worst_ratio, late.worst_ratio),
        checks=before.checks + late.checks,
        probes=(*(before.probes or ()), DELAYS),
    )
