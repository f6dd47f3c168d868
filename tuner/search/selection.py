"""The selection among measured candidates, with a fixed rule for ties."""

import math
from collections.abc import Iterable, Sequence

from flashtune.core.record import Measurement, Outcome, Provenance, Record, is_tied
from flashtune.db.stored_rows import StoredRecord
from flashtune.tuner.candidates import Candidate


def may_be_selected(record: Record) -> bool:
    """Returns whether a record is of a timed kernel, and of a verified one if the time was measured."""
    if record.outcome is not Outcome.OK or record.measurement is None or record.config is None:
        return False
    return record.provenance is Provenance.PREDICTED or (record.verdict is not None and record.verdict.passed)


def select(records: Iterable[Record]) -> Record | None:
    """Returns the record to select among those of one problem and run, or None if none is eligible.

    Times within noise of the fastest are ties. Among ties the least SRAM decides, then the fewest
    registers, then the order of families and configs. Small differences in time between two runs
    then lead to the same selection.
    """
    eligible = [record for record in records if may_be_selected(record)]
    fastest = min(map(_time, eligible), key=lambda time: time.ms, default=None)
    if fastest is None:
        return None
    return min((record for record in eligible if is_tied(_time(record), fastest)), key=_preference)


def finalists(records: Iterable[Record], limit: int, within: float) -> tuple[Record, ...]:
    """Returns the fastest records, at most `limit`, none slower than `within` times the fastest."""
    ranked = sorted(filter(may_be_selected, records), key=_milliseconds)
    slowest = within * _milliseconds(ranked[0]) if ranked else 0.0
    return tuple(record for record in ranked[:limit] if _milliseconds(record) <= slowest)


def candidate_of(record: Record) -> Candidate:
    """Returns the candidate of a record. Records of baselines have none."""
    assert record.config is not None
    return Candidate(record.family, record.config)


def _time(record: Record) -> Measurement:
    assert record.measurement is not None
    return record.measurement


def _milliseconds(record: Record) -> float:
    return _time(record).ms


def _preference(record: Record) -> tuple[float, float, tuple[str, tuple[object, ...]]]:
    resources = record.resources
    sram, registers = (resources.sram_bytes, resources.registers) if resources else (math.inf, math.inf)
    return sram, registers, candidate_of(record).order()


def next_best(rows: Sequence[StoredRecord]) -> StoredRecord | None:
    """Returns the record to select among the remaining ones of a problem and target, or None.

    Only the latest record of each candidate counts: it may be a failure. Measured records come before
    predicted ones. Times are compared among records of the newest versions.
    """
    latest: dict[tuple[Candidate, Provenance], StoredRecord] = {
        (candidate_of(row.record), row.record.provenance): row
        for row in rows
        if row.record.config is not None
    }
    eligible = sorted(
        (row for row in latest.values() if may_be_selected(row.record)), key=lambda row: row.created_at
    )
    measured = [row for row in eligible if row.record.provenance is Provenance.MEASURED]
    offered = measured or eligible
    newest = [row for row in offered if row.record.versions.builders == offered[-1].record.versions.builders]
    best = select(row.record for row in newest)
    return next((row for row in newest if row.record is best), None)
