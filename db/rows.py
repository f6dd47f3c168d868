"""Rows and records: one way in, one way out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import msgspec
from sqlalchemy import Table, select
from sqlalchemy.dialects import postgresql, sqlite

from flashtune.db.codec import decode_stored, encode_check, encode_record, fingerprint
from flashtune.db.failures import UnreadableRecord
from flashtune.db.schema import CHECKS, RECORDS
from flashtune.errors import TableError
from flashtune.record import Record

if TYPE_CHECKING:
    from sqlalchemy import Connection, Row, Select

    from flashtune.db.checks import Check

    Upsert = sqlite.Insert | postgresql.Insert


class StoredRecord(msgspec.Struct, frozen=True):
    """A record and where it lies: its row, and when it was written (ISO 8601, UTC)."""

    id: int
    created_at: str
    record: Record


def now() -> str:
    """The present as ISO 8601 text in UTC, which sorts by time."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def insert_record(connection: Connection, record: Record, created_at: str) -> tuple[int, bool]:
    """The record's row, and whether it is new: what is already there is not stored twice.

    Raises:
        TableError: A field is outside its bounds.
    """
    payload = encode_record(record)
    content_hash = fingerprint(payload)
    values = {
        "content_hash": content_hash,
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
    insert = insert_into(connection, RECORDS).values(values)
    unless_known = insert.on_conflict_do_nothing(index_elements=["content_hash"])
    added = connection.execute(unless_known.returning(RECORDS.c.id)).scalar()
    if added is not None:
        return int(added), True
    known = select(RECORDS.c.id).where(RECORDS.c.content_hash == content_hash)
    return int(connection.execute(known).scalar_one()), False


def write_check(connection: Connection, check: Check, created_at: str, *, replace: bool) -> bool:
    """Stores a self-check's verdict; whether anything was written."""
    payload = encode_check(check)
    changed = {"passed": check.verdict.passed, "created_at": created_at, "payload": payload.decode()}
    key = {"digest": check.digest, "target": check.target, "versions_hash": fingerprint(check.versions)}
    statement = insert_into(connection, CHECKS).values(**key, **changed)
    if replace:
        statement = statement.on_conflict_do_update(index_elements=list(key), set_=changed)
    else:
        statement = statement.on_conflict_do_nothing(index_elements=list(key))
    # Drivers differ in what they count, and agree on what they return.
    return connection.execute(statement.returning(CHECKS.c.digest)).scalar() is not None


def insert_into(connection: Connection, table: Table) -> Upsert:
    """An insert that can say what to do on a conflict: SQLite and PostgreSQL share the syntax."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    return cast("Upsert", dialect.insert(table))


def select_records() -> Select[*tuple[Any, ...]]:
    """What `readable` needs of each record."""
    return select(
        RECORDS.c.id, RECORDS.c.created_at, RECORDS.c.problem_key, RECORDS.c.target, RECORDS.c.payload
    ).order_by(RECORDS.c.id)


def readable(rows: Iterable[Row[*tuple[Any, ...]]], where: str) -> Iterator[StoredRecord]:
    """The records among rows; one warning says how many held none that can be read here.

    A database is shared by versions of flashtune, and one may know a family that another does not.
    """
    skipped = 0
    reason = ""
    for row in rows:
        try:
            record = decode_stored(row.payload, row.problem_key, row.target)
        except TableError as error:
            skipped += 1
            reason = reason or str(error)
            continue
        yield StoredRecord(row.id, str(row.created_at), record)
    if skipped:
        warnings.warn(f"{skipped} rows of {where} were skipped: {reason}", UnreadableRecord, stacklevel=3)
