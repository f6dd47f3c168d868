"""Merges databases: records by their content, selections by their time."""

from __future__ import annotations

import enum
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import Connection, Table, select

from flashtune.core.errors import TableError
from flashtune.db.codec import decode_check, raw_bytes
from flashtune.db.eligibility import by_problem, is_better_selection, serves_any_tensors, why_not_selectable
from flashtune.db.engine import explained
from flashtune.db.errors import UnreadableRecord
from flashtune.db.location import describe
from flashtune.db.queries import (
    CHUNK,
    chosen,
    chosen_among,
    fetched,
    insert_record,
    insert_records,
    now,
    offer_fallback,
    payload_of,
    select_chosen,
    select_records,
    take_selection,
    take_unchosen,
    write_check,
)
from flashtune.db.schema import CHECKS, FALLBACKS, SELECTIONS
from flashtune.db.stored_rows import StoredRecord, readable, stored_text

if TYPE_CHECKING:
    from flashtune.core.record import Record
    from flashtune.db.queries import AnyRow
    from flashtune.db.table import TunedTable

# Returns why a record may not become a selection; empty if it may.
WhyRefused = Callable[["Record"], str]


class MergeOutcome(enum.Enum):
    """Result of merging one selection of another database."""

    ADDED = enum.auto()
    REPLACED = enum.auto()
    KEPT = enum.auto()


class MergeCounts(msgspec.Struct, frozen=True):
    """Counts of a merge: new rows, and rows that were present or unchanged."""

    records_added: int
    records_known: int
    selections_added: int
    selections_replaced: int
    selections_kept: int
    checks_added: int


def merge(theirs: Connection, ours: Connection, source_url: str, why_refused: WhyRefused) -> MergeCounts:
    """Copies the rows that `ours` lacks. `source_url` is the other database's URL."""
    added, known = _merge_records(theirs, ours, source_url)
    new, replaced, kept = _merge_selections(theirs, ours, source_url, why_refused)
    return MergeCounts(added, known, new, replaced, kept, _merge_checks(theirs, ours, source_url))


def merge_tables(
    tables: Sequence[TunedTable], ours: Connection, progress: Callable[[int], None] = lambda records: None
) -> MergeCounts:
    """Merges the records and selections of tables as `merge` does. Receipts become self-checks.

    `progress` is called with the number of further records merged.
    """
    written = now()
    news: Counter[bool] = Counter()
    ends: Counter[MergeOutcome] = Counter()
    for table in tables:
        problems = iter(by_problem(table.records).values())
        while held := list(itertools.islice(problems, CHUNK)):
            records = [record for group in held for record in group]
            inserted = insert_records(ours, records, written)
            news.update(is_new for _, is_new in inserted)
            ids = iter(record_id for record_id, _ in inserted)
            groups = [[(record, next(ids)) for record in group] for group in held]
            ends.update(_take_groups(ours, table.target, groups, written))
            progress(len(records))
    checks = sum(
        write_check(ours, receipt, written, replace=False) for table in tables for receipt in table.receipts
    )
    return MergeCounts(
        news[True],
        news[False],
        ends[MergeOutcome.ADDED],
        ends[MergeOutcome.REPLACED],
        ends[MergeOutcome.KEPT],
        checks,
    )


def _take_groups(
    ours: Connection, target: str, groups: list[list[tuple[Record, int]]], written: str
) -> Iterator[MergeOutcome]:
    """Merges each problem's selection and fallback, with their rows."""
    keys = [group[0][0].problem.key for group in groups]
    present = chosen_among(ours, SELECTIONS, target, keys)
    standing = chosen_among(ours, FALLBACKS, target, keys)
    taken = {*present, *standing}
    fresh = [group for group, key in zip(groups, keys, strict=True) if key not in taken]
    selections = [group[0] for group in fresh]
    fallbacks = [
        other
        for group in fresh
        if not serves_any_tensors(group[0][0])
        for other in group[1:]
        if serves_any_tensors(other[0])
    ]
    take_unchosen(ours, selections, fallbacks, written)
    yield from (MergeOutcome.ADDED for _ in fresh)
    for (selection, row), *others in groups:
        there, beside = present.get(selection.problem.key), standing.get(selection.problem.key)
        if there is None and beside is None:
            continue
        # A selection is not compared with itself.
        same = there is not None and there.id == row
        yield MergeOutcome.KEPT if same else _take_selection(ours, selection, written, written)
        for record, record_id in others:
            if beside is None or beside.id != record_id:
                offer_fallback(ours, record, record_id, written)


def _from(url: str, rows: Callable[[], Iterable[AnyRow]]) -> Iterator[AnyRow]:
    """Yields the rows of a query of a database, with errors that name it even during a write to another."""
    with explained(url):
        yield from rows()


def _merge_records(theirs: Connection, ours: Connection, source_url: str) -> tuple[int, int]:
    added = already_stored = 0
    rows = _from(source_url, lambda: fetched(theirs, select_records()))
    for stored in readable(rows, describe(source_url)):
        _, is_new = insert_record(ours, stored.record, stored.created_at)
        added += is_new
        already_stored += not is_new
    return added, already_stored


def _merge_selections(
    theirs: Connection, ours: Connection, source_url: str, why_refused: WhyRefused
) -> tuple[int, int, int]:
    ends = Counter(
        _take_selection(ours, stored.record, stored.created_at, pinned_at)
        for stored, pinned_at in _chosen(theirs, SELECTIONS, source_url, why_refused)
    )
    for stored, pinned_at in _chosen(theirs, FALLBACKS, source_url, why_refused):
        record_id, _ = insert_record(ours, stored.record, stored.created_at)
        offer_fallback(ours, stored.record, record_id, pinned_at)
    return ends[MergeOutcome.ADDED], ends[MergeOutcome.REPLACED], ends[MergeOutcome.KEPT]


def _chosen(
    theirs: Connection, table: Table, source_url: str, why_refused: WhyRefused
) -> list[tuple[StoredRecord, str]]:
    """Returns another database's selections that may be selected here, and their times of selection."""
    rows = list(_from(source_url, lambda: fetched(theirs, select_chosen(table), table)))
    pinned = {row.id: stored_text(row.pinned_at) for row in rows}
    taken, reasons = [], []
    for stored in readable(rows, describe(source_url)):
        reason = why_not_selectable(stored.record) or why_refused(stored.record)
        if reason:
            reasons.append(reason)
        else:
            taken.append((stored, pinned[stored.id]))
    if reasons:
        message = f"{len(reasons)} selections of {describe(source_url)} were left out: {reasons[0]}"
        warnings.warn(message, UnreadableRecord, stacklevel=2)
    return taken


def _take_selection(ours: Connection, record: Record, created_at: str, pinned_at: str) -> MergeOutcome:
    """Selects a record, unless our selection of the same (problem, target) stays."""
    present = chosen(ours, SELECTIONS, record)
    record_id, _ = insert_record(ours, record, created_at)
    if present is not None and not is_better_selection(record, present.record):
        offer_fallback(ours, record, record_id, pinned_at)
        return MergeOutcome.KEPT
    take_selection(ours, record, record_id, pinned_at)
    return MergeOutcome.ADDED if present is None else MergeOutcome.REPLACED


def _merge_checks(theirs: Connection, ours: Connection, source_url: str) -> int:
    added = 0
    query = select(payload_of(CHECKS), CHECKS.c.created_at)
    for row in _from(source_url, lambda: fetched(theirs, query, CHECKS)):
        try:
            check = decode_check(raw_bytes(row.payload))
        except TableError as error:
            message = f"a self-check of {describe(source_url)} was skipped: {error}"
            warnings.warn(message, UnreadableRecord, stacklevel=2)
            continue
        added += write_check(ours, check, stored_text(row.created_at), replace=False)
    return added
