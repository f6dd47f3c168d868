"""Queries for the selections of a problem on a target, and for records.

Only a selection that cannot address every tensor has a fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    Label,
    Row,
    Select,
    Table,
    Text,
    delete,
    literal_column,
    select,
    text,
)

from flashtune.core.record import Record
from flashtune.db.codec import Check, encode_check, encode_record, fingerprint, without_gpu
from flashtune.db.eligibility import is_better_selection, serves_any_tensors
from flashtune.db.limits import bounded
from flashtune.db.schema import CHECKS, FALLBACKS, RECORDS, SELECTIONS
from flashtune.db.stored_rows import StoredRecord, readable

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite

    Upsert = sqlite.Insert | postgresql.Insert
    AnyRow = Row[*tuple[Any, ...],]


# Rows fetched at a time, so that a large database is never in memory as a whole.
CHUNK = 500


def now() -> str:
    """Returns the present time as ISO 8601 text in UTC, which sorts by time."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def insert_record(connection: Connection, record: Record, created_at: str) -> tuple[int, bool]:
    """Returns the record's row, and whether it is new. An equal record is not stored twice.

    Records that differ in the time of compilation alone are equal.
    """
    values = _columns(record, created_at)
    insert = insert_into(connection, RECORDS).values(values)
    unless_known = insert.on_conflict_do_nothing(index_elements=["content_hash"])
    added = connection.execute(unless_known.returning(RECORDS.c.id)).scalar()
    if added is not None:
        return int(added), True
    query = select(RECORDS.c.id).where(RECORDS.c.content_hash == values["content_hash"])
    return int(connection.execute(query).scalar_one()), False


def insert_records(connection: Connection, records: list[Record], created_at: str) -> list[tuple[int, bool]]:
    """Inserts some hundred records as `insert_record` does, with three statements in all."""
    rows = [_columns(record, created_at) for record in records]
    hashes = [str(row["content_hash"]) for row in rows]
    query = select(RECORDS.c.content_hash, RECORDS.c.id).where(RECORDS.c.content_hash.in_(hashes))
    stored = {row.content_hash for row in connection.execute(query)}
    new = {
        content_hash: row
        for content_hash, row in zip(hashes, rows, strict=True)
        if content_hash not in stored
    }
    if new:
        insert = insert_into(connection, RECORDS).on_conflict_do_nothing(index_elements=["content_hash"])
        connection.execute(insert, list(new.values()))
    ids = {row.content_hash: int(row.id) for row in connection.execute(query)}
    # Of equal records the first one is new.
    return [(ids[content_hash], new.pop(content_hash, None) is not None) for content_hash in hashes]


def _columns(record: Record, created_at: str) -> dict[str, object]:
    """Returns a record as a row."""
    payload = encode_record(record)
    evidence = without_gpu(record)
    if record.resources is not None:
        resources = msgspec.structs.replace(record.resources, compile_seconds=0.0)
        evidence = msgspec.structs.replace(evidence, resources=resources)
    return {
        "content_hash": fingerprint(encode_record(evidence)),
        "created_at": created_at,
        "problem_key": record.problem.key,
        "target": record.target,
        "family": record.family,
        "config": record.config.label() if record.config else None,
        "config_hash": fingerprint(record.config) if record.config else None,
        "kernel": record.kernel,
        "outcome": record.outcome.value,
        "provenance": record.provenance.value,
        "ms": record.ms,
        "triton": record.versions.triton,
        "template": record.versions.template,
        "payload": payload.decode(),
    }


def write_check(connection: Connection, check: Check, created_at: str, *, replace: bool) -> bool:
    """Stores a self-check's verdict. Returns whether anything was written."""
    payload = encode_check(check)
    changed = {"passed": check.verdict.passed, "created_at": created_at, "payload": payload.decode()}
    key = {"digest": check.digest, "target": check.target, "versions_hash": fingerprint(check.versions)}
    statement = insert_into(connection, CHECKS).values(**key, **changed)
    if replace:
        statement = statement.on_conflict_do_update(index_elements=list(key), set_=changed)
    else:
        statement = statement.on_conflict_do_nothing(index_elements=list(key))
    # Drivers count rows differently, but return the same rows.
    return connection.execute(statement.returning(CHECKS.c.digest)).scalar() is not None


def insert_into(connection: Connection, table: Table) -> Upsert:
    """Returns an insert with an `ON CONFLICT` clause, which SQLite and PostgreSQL share."""
    # Each dialect's import takes at least 30 ms of CPU, and only one is needed.
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import insert as postgresql_insert

        return postgresql_insert(table)
    from sqlalchemy.dialects.sqlite import insert as sqlite_insert

    return sqlite_insert(table)


def select_records() -> Select[*tuple[Any, ...]]:
    """Returns a query for the columns that `readable` needs of each record."""
    columns = RECORDS.c.id, RECORDS.c.created_at, RECORDS.c.problem_key, RECORDS.c.target
    return select(*columns, payload_of(RECORDS)).order_by(RECORDS.c.id)


def payload_of(table: Table) -> Label[Any]:
    """Returns a table's JSON as a column of a query, NULL for a value that is too large."""
    return literal_column(bounded(f"{table.name}.payload"), Text).label("payload")


def fetched(
    connection: Connection, query: Select[*tuple[Any, ...]], table: Table = RECORDS
) -> Iterator[AnyRow]:
    """Returns the rows of a query of a table, joined with records or not, some hundred at a time.

    The time limit is for SQLite, so they are used after the last one of each statement was fetched.
    """
    key = _row_key(connection, table)
    selected = connection.scalars(query.with_only_columns(key, maintain_column_froms=True)).all()
    keys = list(dict.fromkeys(selected))
    for start in range(0, len(keys), CHUNK):
        yield from connection.execute(query.where(key.in_(keys[start : start + CHUNK]))).all()


def _row_key(connection: Connection, table: Table) -> ColumnElement[Any]:
    """Returns a key of rows. In SQLite it is the row's number, since a text may not be valid UTF-8."""
    if connection.dialect.name == "sqlite":
        return literal_column(f"{table.name}.rowid", Integer)
    return CHECKS.c.digest if table is CHECKS else RECORDS.c.id


def select_chosen(table: Table, target: str | None = None) -> Select[*tuple[Any, ...]]:
    """Returns a query for the records that a table names, with the time of their selection.

    Rows are in the order of targets and problems. `table` is `SELECTIONS` or `FALLBACKS`. `target` is a GPU's
    name, or None for all.
    """
    query = (
        select(
            RECORDS.c.id,
            RECORDS.c.created_at,
            table.c.problem_key,
            table.c.target,
            payload_of(RECORDS),
            table.c.pinned_at,
        )
        .join_from(table, RECORDS)
        .order_by(table.c.target, table.c.problem_key)
    )
    return query if target is None else query.where(table.c.target == target)


def chosen(connection: Connection, table: Table, record: Record) -> StoredRecord | None:
    """Returns the row that a table names for a record's (problem, target)."""
    # PostgreSQL locks the row until the transaction ends. SQLite has one writer at a time.
    query = select_chosen(table).where(*_same(table, record)).with_for_update(of=table)
    return next(readable(connection.execute(query), "this database"), None)


def chosen_among(
    connection: Connection, table: Table, target: str, keys: list[str]
) -> dict[str, StoredRecord]:
    """Returns the rows that a table names for some problems of a target, by the problem's key."""
    query = select_chosen(table, target).where(table.c.problem_key.in_(keys))
    rows = connection.execute(query).all()
    return {stored.record.problem.key: stored for stored in readable(rows, "this database")}


def take_unchosen(
    connection: Connection,
    selections: list[tuple[Record, int]],
    fallbacks: list[tuple[Record, int]],
    pinned_at: str,
) -> None:
    """Stores the rows of selections, at most one for each problem, and of the fallbacks of these problems.

    The problems have neither, or one that cannot be read.
    """
    for table, rows in ((SELECTIONS, selections), (FALLBACKS, fallbacks)):
        values = [_named(record, record_id, pinned_at) for record, record_id in rows]
        if values:
            connection.execute(_upsert(connection, table), values)


def lock_selections(connection: Connection) -> None:
    """Lets no other process select records until the transaction ends, for changes of many selections."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("LOCK TABLE selections IN EXCLUSIVE MODE"))


def take_selection(
    connection: Connection,
    record: Record,
    record_id: int,
    pinned_at: str,
    stays: Callable[[StoredRecord], bool] = lambda present: False,
) -> tuple[bool, StoredRecord | None]:
    """Selects a row for its record's (problem, target), unless the present selection stays.

    If the new selection serves any tensors, the fallback is deleted. Otherwise an earlier selection that does
    becomes the fallback.

    Returns:
        Whether the row was selected, and the earlier selection.
    """
    while True:
        present = connection.scalar(select(SELECTIONS.c.record_id).where(*_same(SELECTIONS, record)))
        earlier = chosen(connection, SELECTIONS, record)
        if earlier is not None and stays(earlier):
            return False, earlier
        # One statement compares and selects. Another process may have selected a row since the query.
        upsert = _upsert(connection, SELECTIONS, SELECTIONS.c.record_id == present)
        values = _named(record, record_id, pinned_at)
        if connection.execute(upsert.returning(SELECTIONS.c.record_id), values).scalar() is not None:
            break
    if serves_any_tensors(record):
        connection.execute(delete(FALLBACKS).where(*_same(FALLBACKS, record)))
    elif earlier is not None and serves_any_tensors(earlier.record):
        _name(connection, FALLBACKS, record, earlier.id, pinned_at)
    return True, earlier


def take_fallback(connection: Connection, record: Record, record_id: int, pinned_at: str) -> bool:
    """Stores a row as its problem's fallback. Returns False if the selection needs none."""
    selection = chosen(connection, SELECTIONS, record)
    if selection is None or serves_any_tensors(selection.record) or not serves_any_tensors(record):
        return False
    _name(connection, FALLBACKS, record, record_id, pinned_at)
    return True


def offer_fallback(connection: Connection, record: Record, record_id: int, pinned_at: str) -> None:
    """Calls `take_fallback` unless the present fallback is as good."""
    present = chosen(connection, FALLBACKS, record)
    if present is None or is_better_selection(record, present.record):
        take_fallback(connection, record, record_id, pinned_at)


def _name(connection: Connection, table: Table, record: Record, record_id: int, pinned_at: str) -> None:
    connection.execute(_upsert(connection, table), _named(record, record_id, pinned_at))


def _named(record: Record, record_id: int, pinned_at: str) -> dict[str, object]:
    """Returns the row of `SELECTIONS` or `FALLBACKS` that names a record."""
    key = {"problem_key": record.problem.key, "target": record.target}
    return {**key, "record_id": record_id, "pinned_at": pinned_at}


def _upsert(connection: Connection, table: Table, only_if: ColumnElement[bool] | None = None) -> Upsert:
    """Returns the statement that inserts such a row, or replaces the present one if a condition holds."""
    insert = insert_into(connection, table)
    changed = {name: insert.excluded[name] for name in ("record_id", "pinned_at")}
    key = ["problem_key", "target"]
    return insert.on_conflict_do_update(index_elements=key, set_=changed, where=only_if)


def _same(table: Table, record: Record) -> tuple[ColumnElement[bool], ...]:
    return table.c.problem_key == record.problem.key, table.c.target == record.target
