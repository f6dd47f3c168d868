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
    StoredRecord,
    insert_record,
    now,
    readable,
    select_records,
    write_check,
)
from flashtune.db.rules import by_problem, is_better_selection, why_not_selectable
from flashtune.db.schema import CHECKS, SELECTIONS, STAND_INS
from flashtune.db.selecting import chosen, offer_stand_in, select_chosen, take_selection
from flashtune.errors import TableError

if TYPE_CHECKING:
    from sqlalchemy import Connection, Row, Select, Table

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
    for selection, *stand_ins in (held for table in tables for held in by_problem(table.records).values()):
        news[insert_record(ours, selection, written)[1]] += 1
        ends[_take_selection(ours, selection, written, written)] += 1
        for record in stand_ins:
            record_id, is_new = insert_record(ours, record, written)
            news[is_new] += 1
            offer_stand_in(ours, record, record_id, written)
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
    ends = Counter(
        _take_selection(ours, stored.record, stored.created_at, pinned_at)
        for stored, pinned_at in _chosen(theirs, SELECTIONS, source_url)
    )
    for stored, pinned_at in _chosen(theirs, STAND_INS, source_url):
        record_id, _ = insert_record(ours, stored.record, stored.created_at)
        offer_stand_in(ours, stored.record, record_id, pinned_at)
    return ends[Taken.ADDED], ends[Taken.REPLACED], ends[Taken.KEPT]


def _chosen(theirs: Connection, table: Table, source_url: str) -> list[tuple[StoredRecord, str]]:
    """What another database has chosen and may serve, and when it chose it."""
    rows = list(_fetched(theirs, select_chosen(table), source_url))
    pinned = {row.id: str(row.pinned_at) for row in rows}
    return [
        (stored, pinned[stored.id])
        for stored in readable(rows, describe(source_url))
        if not why_not_selectable(stored.record)
    ]


def _take_selection(ours: Connection, record: Record, created_at: str, pinned_at: str) -> Taken:
    """Makes a record our selection, unless ours of the same (problem, target) stays."""
    present = chosen(ours, SELECTIONS, record)
    record_id, _ = insert_record(ours, record, created_at)
    if present is not None and not is_better_selection(record, present.record):
        offer_stand_in(ours, record, record_id, pinned_at)
        return Taken.KEPT
    take_selection(ours, record, record_id, pinned_at)
    return Taken.ADDED if present is None else Taken.REPLACED


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
