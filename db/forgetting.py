"""Deletes records, and takes back the selections that name them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import delete, func, select

from flashtune.db.eligibility import serves_any_tensors
from flashtune.db.queries import chosen, fetched, select_records, take_selection, take_stand_in
from flashtune.db.schema import RECORDS, SELECTIONS, STAND_INS
from flashtune.db.stored_rows import StoredRecord, readable, stored_text

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection

# Picks the record to select of one problem on one target, None if none may be.
Choose = Callable[[Sequence[StoredRecord]], StoredRecord | None]


class Forgettable(msgspec.Struct, frozen=True):
    """Which records are meant: those that match every filter that is given.

    Attributes:
        problems: Keys of problems; of all where empty.
        target: A GPU's name.
        family: A kernel family's name.
        outcomes: Outcomes; all where empty.
        before: Stored before this time, ISO 8601 in UTC.
        since: Stored at this time or later.
    """

    problems: tuple[str, ...] = ()
    target: str | None = None
    family: str | None = None
    outcomes: tuple[str, ...] = ()
    before: str | None = None
    since: str | None = None

    def clauses(self) -> list[ColumnElement[bool]]:
        """The filters as conditions on a row of `records`."""
        columns = RECORDS.c
        found: list[ColumnElement[bool]] = []
        if self.problems:
            found.append(columns.problem_key.in_(self.problems))
        if self.target is not None:
            found.append(columns.target == self.target)
        if self.family is not None:
            found.append(columns.family == self.family)
        if self.outcomes:
            found.append(columns.outcome.in_(self.outcomes))
        if self.before is not None:
            found.append(columns.created_at < self.before)
        if self.since is not None:
            found.append(columns.created_at >= self.since)
        return found


class Group(msgspec.Struct, frozen=True):
    """Records of one problem, target and outcome that are meant."""

    target: str
    problem: str
    outcome: str
    records: int


class TakenBack(msgspec.Struct, frozen=True):
    """A problem whose selection, or the record that stands in for it, is meant.

    `config` is what is selected in its place, None if nothing is left or nothing was deleted yet.
    """

    target: str
    problem: str
    family: str | None = None
    config: str | None = None


def groups(connection: Connection, meant: Forgettable) -> list[Group]:
    """What would be deleted, counted by target, problem and outcome."""
    key = (RECORDS.c.target, RECORDS.c.problem_key, RECORDS.c.outcome)
    query = select(*key, func.count()).where(*meant.clauses()).group_by(*key).order_by(*key)
    return [
        Group(stored_text(target), stored_text(problem), stored_text(outcome), records)
        for target, problem, outcome, records in connection.execute(query)
    ]


def affected(connection: Connection, meant: Forgettable) -> list[tuple[str, str]]:
    """Targets and problems whose selection, or what stands in for it, would be deleted."""
    found: set[tuple[str, str]] = set()
    for table in (SELECTIONS, STAND_INS):
        query = select(table.c.target, table.c.problem_key).join_from(table, RECORDS).where(*meant.clauses())
        found.update(
            (stored_text(row.target), stored_text(row.problem_key)) for row in connection.execute(query)
        )
    return sorted(found)


def forget(connection: Connection, meant: Forgettable, choose: Choose, pinned_at: str) -> list[TakenBack]:
    """Deletes records; of each problem that loses its selection the next best record is selected.

    Args:
        connection: Within a transaction.
        meant: Which records.
        choose: Picks the record to select among those that are left.
        pinned_at: The time of new selections.

    Returns:
        The problems that lost their selection or what stood in for it, and what is selected there now.
    """
    lost = affected(connection, meant)
    going = select(RECORDS.c.id).where(*meant.clauses())
    for table in (SELECTIONS, STAND_INS):
        connection.execute(delete(table).where(table.c.record_id.in_(going)))
    connection.execute(delete(RECORDS).where(*meant.clauses()))
    return [_reselected(connection, *key, choose, pinned_at) for key in lost]


def _reselected(
    connection: Connection, target: str, problem: str, choose: Choose, pinned_at: str
) -> TakenBack:
    query = select_records().where(RECORDS.c.problem_key == problem, RECORDS.c.target == target)
    left = list(readable(fetched(connection, query), "this database"))
    present = chosen(connection, SELECTIONS, left[0].record) if left else None
    row = present or choose(left)
    if row is None:
        # Nothing stands in for a selection that is gone.
        connection.execute(delete(STAND_INS).where(*_of(STAND_INS, target, problem)))
        return TakenBack(target, problem)
    if present is None:
        take_selection(connection, row.record, row.id, pinned_at)
    if chosen(connection, STAND_INS, row.record) is None:
        other = choose(_any_tensors(left))
        if other is not None:
            take_stand_in(connection, other.record, other.id, pinned_at)
    config = row.record.config.label() if row.record.config else None
    return TakenBack(target, problem, row.record.family, config)


def _any_tensors(rows: Iterable[StoredRecord]) -> list[StoredRecord]:
    return [row for row in rows if serves_any_tensors(row.record)]


def _of(table: Any, target: str, problem: str) -> tuple[ColumnElement[bool], ...]:
    return table.c.target == target, table.c.problem_key == problem
