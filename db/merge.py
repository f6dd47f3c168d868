"""Joining databases: records by their content, selections by their time."""

from __future__ import annotations

import enum
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import select

from flashtune.db.codec import decode_check
from flashtune.db.engine import explained
from flashtune.db.failures import UnreadableRecord
from flashtune.db.location import describe
from flashtune.db.rows import (
    insert_record,
    now,
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
    from sqlalchemy import Connection, Row, Select

    from flashtune.db.table import TunedTable
    from flashtune.record import Record

# Rows fetched at a time, so that a large source never lies in memory whole.
CHUNK = 500


class Taken(enum.Enum):
    """What became of another's selection."""

    ADDED = enum.auto()
    REPLACED = enum.auto()
    KEPT = enum.auto()


class MergeCounts(msgspec.Struct, frozen=True):
    """What a merge did: new rows, and what was there already or stayed as it was."""

    records_added: int
    records_known: int
    selections_added: int
    selections_replaced: int
    selections_kept: int
    checks_added: int


def merge(theirs: Connection, ours: Connection, source_url: str) -> MergeCounts:
    """Copies what `ours` lacks; `source_url` is the other database's."""
    added, known = _merge_records(theirs, ours, source_url)
    new, replaced, kept = _merge_selections(theirs, ours, source_url)
    return MergeCounts(added, known, new, replaced, kept, _merge_checks(theirs, ours, source_url))


def merge_tables(tables: Iterable[TunedTable], ours: Connection) -> MergeCounts:
    """Takes the records of tables and, by the rule of `merge`, their selections."""
    written = now()
    news: Counter[bool] = Counter()
    ends: Counter[Taken] = Counter()
    for record in (record for table in tables for record in table.records):
        news[insert_record(ours, record, written)[1]] += 1
        ends[_take_selection(ours, record, written, written)] += 1
    return MergeCounts(news[True], news[False], ends[Taken.ADDED], ends[Taken.REPLACED], ends[Taken.KEPT], 0)


def _fetched(
    connection: Connection, query: Select[*tuple[Any, ...]], url: str
) -> Iterator[Row[*tuple[Any, ...]]]:
    """The rows of a query whose errors name this database, though it is read amid writing another."""
    with explained(url):
        yield from connection.execute(query.execution_options(yield_per=CHUNK))


def _merge_records(theirs: Connection, ours: Connection, source_url: str) -> tuple[int, int]:
    added = known = 0
    for stored in readable(_fetched(theirs, select_records(), source_url), describe(source_url)):
        _, is_new = insert_record(ours, stored.record, stored.created_at)
        added += is_new
        known += not is_new
    return added, known


def _merge_selections(theirs: Connection, ours: Connection, source_url: str) -> tuple[int, int, int]:
    rows = list(_fetched(theirs, select_selected(), source_url))
    pinned = {row.id: str(row.pinned_at) for row in rows}
    ends = Counter(
        _take_selection(ours, stored.record, stored.created_at, pinned[stored.id])
        for stored in readable(rows, describe(source_url))
        if not why_not_selectable(stored.record)
    )
    return ends[Taken.ADDED], ends[Taken.REPLACED], ends[Taken.KEPT]


def _take_selection(ours: Connection, record: Record, created_at: str, pinned_at: str) -> Taken:
    """Makes a record our selection, unless ours of the same (problem, target) stays."""
    present = _selection(ours, record)
    if present is not None and not is_better_selection(record, present):
        return Taken.KEPT
    record_id, _ = insert_record(ours, record, created_at)
    write_selection(ours, record, record_id, pinned_at)
    return Taken.ADDED if present is None else Taken.REPLACED


def _selection(connection: Connection, record: Record) -> Record | None:
    """The selection that a database has for a record's (problem, target)."""
    query = select_selected().where(
        SELECTIONS.c.problem_key == record.problem.key, SELECTIONS.c.target == record.target
    )
    found = list(readable(connection.execute(query), "this database"))
    return found[0].record if found else None


def _merge_checks(theirs: Connection, ours: Connection, source_url: str) -> int:
    added = 0
    for row in _fetched(theirs, select(CHECKS.c.payload, CHECKS.c.created_at), source_url):
        try:
            check = decode_check(str(row.payload).encode())
        except TableError as error:
            message = f"a self-check of {describe(source_url)} was skipped: {error}"
            warnings.warn(message, UnreadableRecord, stacklevel=2)
            continue
        added += write_check(ours, check, row.created_at, replace=False)
    return added
