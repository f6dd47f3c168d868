"""Deletes records and the selections that name them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, delete, func, select

from flashtune.db.eligibility import serves_any_tensors
from flashtune.db.queries import chosen, lock_selections, select_records, take_fallback, take_selection
from flashtune.db.schema import FALLBACKS, RECORDS, SELECTIONS
from flashtune.db.stored_rows import StoredRecord, readable, stored_text

# Returns the record to select for one problem on one target, None if none may be.
Choose = Callable[[Sequence[StoredRecord]], StoredRecord | None]


class Forgettable(msgspec.Struct, frozen=True):
    """A filter of records: those that match every given field."""

    problems: tuple[str, ...] = ()  # Keys of problems. Empty means all.
    target: str | None = None
    family: str | None = None
    outcomes: tuple[str, ...] = ()  # Outcomes. Empty means all.
    before: str | None = None  # Stored before this time, ISO 8601 in UTC.
    since: str | None = None  # Stored at this time or later.

    def clauses(self) -> list[ColumnElement[bool]]:
        """Returns the filters as conditions on a row of `records`."""
        columns = RECORDS.c
        conditions: list[ColumnElement[bool]] = []
        if self.problems:
            conditions.append(columns.problem_key.in_(self.problems))
        if self.target is not None:
            conditions.append(columns.target == self.target)
        if self.family is not None:
            conditions.append(columns.family == self.family)
        if self.outcomes:
            conditions.append(columns.outcome.in_(self.outcomes))
        if self.before is not None:
            conditions.append(columns.created_at < self.before)
        if self.since is not None:
            conditions.append(columns.created_at >= self.since)
        return conditions


class Group(msgspec.Struct, frozen=True):
    """The matching records of one problem, target and outcome."""

    target: str
    problem: str
    outcome: str
    records: int


class TakenBack(msgspec.Struct, frozen=True):
    """A problem whose selection or fallback matches the filter.

    `config` is the new selection's, None if no record is left or nothing was deleted yet.
    """

    target: str
    problem: str
    family: str | None = None
    config: str | None = None


def groups(connection: Connection, meant: Forgettable) -> list[Group]:
    """Returns the records that would be deleted, counted by target, problem and outcome."""
    key = (RECORDS.c.target, RECORDS.c.problem_key, RECORDS.c.outcome)
    query = select(*key, func.count()).where(*meant.clauses()).group_by(*key).order_by(*key)
    return [
        Group(stored_text(target), stored_text(problem), stored_text(outcome), records)
        for target, problem, outcome, records in connection.execute(query)
    ]


def affected(connection: Connection, meant: Forgettable) -> list[tuple[str, str]]:
    """Returns targets and problems whose selection or fallback would be deleted."""
    pairs: set[tuple[str, str]] = set()
    for table in (SELECTIONS, FALLBACKS):
        query = select(table.c.target, table.c.problem_key).join_from(table, RECORDS).where(*meant.clauses())
        pairs.update(
            (stored_text(row.target), stored_text(row.problem_key)) for row in connection.execute(query)
        )
    return sorted(pairs)


def forget(connection: Connection, meant: Forgettable, choose: Choose, pinned_at: str) -> list[TakenBack]:
    """Deletes records. Each problem that loses its selection gets the next best record.

    `choose` returns the record to select among the remaining ones.

    Returns:
        The problems that lost their selection or fallback, and their new selection.
    """
    lock_selections(connection)
    lost = affected(connection, meant)
    going = select(RECORDS.c.id).where(*meant.clauses())
    for table in (SELECTIONS, FALLBACKS):
        connection.execute(delete(table).where(table.c.record_id.in_(going)))
    connection.execute(delete(RECORDS).where(*meant.clauses()))
    return [_reselected(connection, *key, choose, pinned_at) for key in lost]


def _reselected(
    connection: Connection, target: str, problem: str, choose: Choose, pinned_at: str
) -> TakenBack:
    query = select_records().where(RECORDS.c.problem_key == problem, RECORDS.c.target == target)
    left = list(readable(connection.execute(query).all(), "this database"))
    present = chosen(connection, SELECTIONS, left[0].record) if left else None
    row = present or choose(left)
    if row is None:
        # Without a selection there is no fallback.
        connection.execute(delete(FALLBACKS).where(*_of(FALLBACKS, target, problem)))
        return TakenBack(target, problem)
    if present is None:
        take_selection(connection, row.record, row.id, pinned_at)
    if chosen(connection, FALLBACKS, row.record) is None:
        other = choose(_any_tensors(left))
        if other is not None:
            take_fallback(connection, other.record, other.id, pinned_at)
    config = row.record.config.label() if row.record.config else None
    return TakenBack(target, problem, row.record.family, config)


def _any_tensors(rows: Iterable[StoredRecord]) -> list[StoredRecord]:
    return [row for row in rows if serves_any_tensors(row.record)]


def _of(table: Any, target: str, problem: str) -> tuple[ColumnElement[bool], ...]:
    return table.c.target == target, table.c.problem_key == problem
