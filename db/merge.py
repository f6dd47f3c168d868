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

from flashtune.db.eligibility import by_problem, is_better_selection, serves_any_tensors, why_not_selectable
from flashtune.db.engine import explained
from flashtune.db.errors import UnreadableRecord
from flashtune.db.location import describe
from flashtune.db.queries import (
    CHUNK,
    chosen_among,
    fetched,
    insert_record,
    insert_records,
    lock_selections,
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
from flashtune.db.stored_rows import StoredRecord, readable, readable_check, stored_text

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
    lock_selections(ours)
    news = _merge_records(theirs, ours, source_url)
    ends = _merge_selections(theirs, ours, source_url, why_refused)
    return _counts(news, ends, _merge_checks(theirs, ours, source_url))


def merge_tables(
    tables: Sequence[TunedTable], ours: Connection, progress: Callable[[int], None] = lambda records: None
) -> MergeCounts:
    """Merges the records and selections of tables as `merge` does. Receipts become self-checks.

    `progress` is called with the number of further records merged.
    """
    lock_selections(ours)
    written = now()
    news: Counter[bool] = Counter()
    ends: Counter[MergeOutcome] = Counter()
    for table in tables:
        problems = iter(by_problem(table.records).values())
        while groups := list(itertools.islice(problems, CHUNK)):
            records = [record for group in groups for record in group]
            inserted = insert_records(ours, records, written)
            news.update(is_new for _, is_new in inserted)
            ids = iter(record_id for record_id, _ in inserted)
            rows = [[(record, next(ids)) for record in group] for group in groups]
            ends.update(_take_groups(ours, table.target, rows, written))
            progress(len(records))
    checks = sum(
        write_check(ours, receipt, written, replace=False) for table in tables for receipt in table.receipts
    )
    return _counts(news, ends, checks)


def _take_groups(
    ours: Connection, target: str, groups: list[list[tuple[Record, int]]], written: str
) -> Iterator[MergeOutcome]:
    """Merges the selection and the fallbacks of each problem, with their rows."""
    keys = [group[0][0].problem.key for group in groups]
    selections = chosen_among(ours, SELECTIONS, target, keys)
    fallbacks = chosen_among(ours, FALLBACKS, target, keys)
    new = [group for group, key in zip(groups, keys, strict=True) if key not in {*selections, *fallbacks}]
    new_fallbacks = [
        row
        for selection, *others in new
        if not serves_any_tensors(selection[0])
        for row in others
        if serves_any_tensors(row[0])
    ]
    take_unchosen(ours, [group[0] for group in new], new_fallbacks, written)
    yield from (MergeOutcome.ADDED for _ in new)
    for (record, record_id), *others in groups:
        selection, fallback = selections.get(record.problem.key), fallbacks.get(record.problem.key)
        if selection is None and fallback is None:
            continue
        # A selection is not compared with itself.
        is_same = selection is not None and selection.id == record_id
        yield MergeOutcome.KEPT if is_same else _take_selection(ours, record, record_id, written)
        for other, other_id in others:
            if fallback is None or fallback.id != other_id:
                offer_fallback(ours, other, other_id, written)


def _from(url: str, rows: Callable[[], Iterable[AnyRow]]) -> Iterator[AnyRow]:
    """Yields the rows of a query of a database, with errors that name it even during a write to another."""
    with explained(url):
        yield from rows()


def _counts(news: Counter[bool], ends: Counter[MergeOutcome], checks: int) -> MergeCounts:
    return MergeCounts(
        news[True],
        news[False],
        ends[MergeOutcome.ADDED],
        ends[MergeOutcome.REPLACED],
        ends[MergeOutcome.KEPT],
        checks,
    )


def _merge_records(theirs: Connection, ours: Connection, source_url: str) -> Counter[bool]:
    """Returns the numbers of records that are new, and that are not."""
    rows = _from(source_url, lambda: fetched(theirs, select_records()))
    return Counter(
        insert_record(ours, stored.record, stored.created_at)[1]
        for stored in readable(rows, describe(source_url))
    )


def _merge_selections(
    theirs: Connection, ours: Connection, source_url: str, why_refused: WhyRefused
) -> Counter[MergeOutcome]:
    ends: Counter[MergeOutcome] = Counter()
    for stored, pinned_at in _chosen(theirs, SELECTIONS, source_url, why_refused):
        record_id, _ = insert_record(ours, stored.record, stored.created_at)
        ends[_take_selection(ours, stored.record, record_id, pinned_at)] += 1
    for stored, pinned_at in _chosen(theirs, FALLBACKS, source_url, why_refused):
        record_id, _ = insert_record(ours, stored.record, stored.created_at)
        offer_fallback(ours, stored.record, record_id, pinned_at)
    return ends


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


def _take_selection(ours: Connection, record: Record, record_id: int, pinned_at: str) -> MergeOutcome:
    """Selects a row, unless our selection of the same (problem, target) stays."""
    is_taken, present = take_selection(
        ours, record, record_id, pinned_at, lambda present: not is_better_selection(record, present.record)
    )
    if not is_taken:
        offer_fallback(ours, record, record_id, pinned_at)
        return MergeOutcome.KEPT
    return MergeOutcome.ADDED if present is None else MergeOutcome.REPLACED


def _merge_checks(theirs: Connection, ours: Connection, source_url: str) -> int:
    added = 0
    query = select(payload_of(CHECKS), CHECKS.c.created_at)
    for row in _from(source_url, lambda: fetched(theirs, query, CHECKS)):
        check = readable_check(row.payload, describe(source_url))
        if check is not None:
            added += write_check(ours, check, stored_text(row.created_at), replace=False)
    return added
