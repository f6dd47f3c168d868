"""Deletion of records by `flashtune db forget`: their age, and the next selection."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from flashtune.core.errors import UsageError
from flashtune.core.record import Provenance, Record
from flashtune.db.store import StoredRecord
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.search.selection import candidate_of, may_be_selected, select

AGE = re.compile(r"(\d{1,6})([mhdw])")
UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def moment(age: str, now: datetime | None = None) -> str:
    """Returns the time before an age such as `30d`, in ISO 8601 and UTC as in records.

    Raises:
        UsageError: The text is not an age.
    """
    found = AGE.fullmatch(age)
    if found is None:
        raise UsageError(f"{age!r} is not an age: write a number and a unit, such as 90m, 12h, 30d or 8w")
    try:
        past = (now or datetime.now(UTC)) - timedelta(**{UNITS[found[2]]: int(found[1])})
    except OverflowError as error:
        raise UsageError(f"{age!r} reaches before year 1: write a smaller number") from error
    return past.isoformat(timespec="microseconds")


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
    newest = [row for row in offered if _makers(row.record) == _makers(offered[-1].record)]
    best = select(row.record for row in newest)
    return next((row for row in newest if row.record is best), None)


def _makers(record: Record) -> tuple[str, str, str]:
    """Returns the versions that must be equal for times to be compared."""
    return record.versions.triton, record.versions.ptxas, record.versions.driver
