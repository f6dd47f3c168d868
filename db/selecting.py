"""Which rows of a database serve a problem on a target: its selection, and what stands in for it.

Only a selection whose family cannot address every tensor has a record that stands in for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, select

from flashtune.db.rows import bounded, fetched, insert_into
from flashtune.db.rules import is_better_selection, serves_any_tensors
from flashtune.db.schema import RECORDS, SELECTIONS, STAND_INS
from flashtune.db.stored_rows import StoredRecord, readable

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Select, Table

    from flashtune.record import Record


def select_chosen(table: Table, target: str | None = None) -> Select[*tuple[Any, ...]]:
    """What `readable` needs of each record that a table names, with the time of its choice.

    Args:
        table: `SELECTIONS` or `STAND_INS`.
        target: Whose; of all targets where None. In the order of targets and problems.
    """
    query = (
        select(
            RECORDS.c.id,
            RECORDS.c.created_at,
            table.c.problem_key,
            table.c.target,
            bounded(RECORDS),
            table.c.pinned_at,
        )
        .join_from(table, RECORDS)
        .order_by(table.c.target, table.c.problem_key)
    )
    return query if target is None else query.where(table.c.target == target)


def chosen(connection: Connection, table: Table, record: Record) -> StoredRecord | None:
    """The row that a table names for a record's (problem, target)."""
    rows = fetched(connection, select_chosen(table).where(*_same(table, record)), table)
    return next(readable(rows, "this database"), None)


def chosen_among(
    connection: Connection, table: Table, target: str, keys: list[str]
) -> dict[str, StoredRecord]:
    """The rows that a table names for some problems of a target, by the problem's key."""
    query = select_chosen(table, target).where(table.c.problem_key.in_(keys))
    rows = fetched(connection, query, table)
    return {stored.record.problem.key: stored for stored in readable(rows, "this database")}


def take_unchosen(
    connection: Connection,
    selections: list[tuple[Record, int]],
    stand_ins: list[tuple[Record, int]],
    pinned_at: str,
) -> None:
    """Makes rows the selections of problems that have none, and others what stands in for these.

    Args:
        connection: The database.
        selections: Records and their rows, at most one for each problem and target.
        stand_ins: Records and rows for tensors that the selection of their problem cannot address.
        pinned_at: The time of the choice.
    """
    for table, rows in ((SELECTIONS, selections), (STAND_INS, stand_ins)):
        values = [
            {
                "problem_key": record.problem.key,
                "target": record.target,
                "record_id": row,
                "pinned_at": pinned_at,
            }
            for record, row in rows
        ]
        if not values:
            continue
        # A row may be there that this flashtune cannot read.
        insert = insert_into(connection, table)
        changed = {name: insert.excluded[name] for name in ("record_id", "pinned_at")}
        connection.execute(
            insert.on_conflict_do_update(index_elements=["problem_key", "target"], set_=changed), values
        )


def take_selection(connection: Connection, record: Record, record_id: int, pinned_at: str) -> None:
    """Makes a row the selection of its record's (problem, target).

    An earlier selection stands in for it if it alone serves any tensors. Where the new one serves
    them, nothing need stand in for it any more.
    """
    earlier = chosen(connection, SELECTIONS, record)
    _name(connection, SELECTIONS, record, record_id, pinned_at)
    if serves_any_tensors(record):
        connection.execute(delete(STAND_INS).where(*_same(STAND_INS, record)))
    elif earlier is not None and serves_any_tensors(earlier.record):
        _name(connection, STAND_INS, record, earlier.id, pinned_at)


def take_stand_in(connection: Connection, record: Record, record_id: int, pinned_at: str) -> bool:
    """Lets a row stand in for the selection of its problem; whether that needs it."""
    selection = chosen(connection, SELECTIONS, record)
    if selection is None or serves_any_tensors(selection.record) or not serves_any_tensors(record):
        return False
    _name(connection, STAND_INS, record, record_id, pinned_at)
    return True


def offer_stand_in(connection: Connection, record: Record, record_id: int, pinned_at: str) -> None:
    """The same, unless what stands in already is as good."""
    present = chosen(connection, STAND_INS, record)
    if present is None or is_better_selection(record, present.record):
        take_stand_in(connection, record, record_id, pinned_at)


def _name(connection: Connection, table: Table, record: Record, record_id: int, pinned_at: str) -> None:
    changed = {"record_id": record_id, "pinned_at": pinned_at}
    key = {"problem_key": record.problem.key, "target": record.target}
    insert = insert_into(connection, table).values(**key, **changed)
    connection.execute(insert.on_conflict_do_update(index_elements=list(key), set_=changed))


def _same(table: Table, record: Record) -> tuple[ColumnElement[bool], ...]:
    return table.c.problem_key == record.problem.key, table.c.target == record.target
