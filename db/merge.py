"""Joining databases: records by their content, selections by their time."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import select

from flashtune.db.codec import decode_check
from flashtune.db.failures import UnreadableRecord
from flashtune.db.rows import (
    insert_record,
    readable,
    select_records,
    select_selected,
    write_check,
    write_selection,
)
from flashtune.db.rules import is_better_selection, why_not_selectable
from flashtune.db.schema import CHECKS, SELECTIONS
from flashtune.errors import TableError

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from flashtune.record import Record

# Rows fetched at a time, so that a large source never lies in memory whole.
CHUNK = 500


class MergeCounts(msgspec.Struct, frozen=True):
    """What a merge did: new rows, and what was there already or stayed as it was."""

    records_added: int
    records_known: int
    selections_added: int
    selections_replaced: int
    selections_kept: int
    checks_added: int


def merge(theirs: Connection, ours: Connection, source: str) -> MergeCounts:
    """Copies what `ours` lacks; `source` names the other database in warnings."""
    added, known = _merge_records(theirs, ours, source)
    new, replaced, kept = _merge_selections(theirs, ours, source)
    return MergeCounts(added, known, new, replaced, kept, _merge_checks(theirs, ours, source))


def _merge_records(theirs: Connection, ours: Connection, source: str) -> tuple[int, int]:
    added = known = 0
    rows = theirs.execute(select_records().execution_options(yield_per=CHUNK))
    for stored in readable(rows, source):
        _, is_new = insert_record(ours, stored.record, stored.created_at)
        added += is_new
        known += not is_new
    return added, known


def _merge_selections(theirs: Connection, ours: Connection, source: str) -> tuple[int, int, int]:
    added = replaced = kept = 0
    rows = theirs.execute(select_selected()).all()
    pinned = {row.id: row.pinned_at for row in rows}
    for stored in readable(rows, source):
        record = stored.record
        if why_not_selectable(record):
            continue
        present = _selection(ours, record)
        if present is not None and not is_better_selection(record, present):
            kept += 1
            continue
        record_id, _ = insert_record(ours, record, stored.created_at)
        write_selection(ours, record, record_id, pinned[stored.id])
        added += present is None
        replaced += present is not None
    return added, replaced, kept


def _selection(connection: Connection, record: Record) -> Record | None:
    """The selection that a database has for a record's (problem, target)."""
    query = select_selected().where(
        SELECTIONS.c.problem_key == record.problem.key, SELECTIONS.c.target == record.target
    )
    found = list(readable(connection.execute(query), "this database"))
    return found[0].record if found else None


def _merge_checks(theirs: Connection, ours: Connection, source: str) -> int:
    added = 0
    for row in theirs.execute(select(CHECKS.c.payload, CHECKS.c.created_at)):
        try:
            check = decode_check(str(row.payload).encode())
        except TableError as error:
            warnings.warn(f"a self-check of {source} was skipped: {error}", UnreadableRecord, stacklevel=2)
            continue
        added += write_check(ours, check, row.created_at, replace=False)
    return added
