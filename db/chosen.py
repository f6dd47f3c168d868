"""Reads all selections of an SQLite file without SQLAlchemy, whose import takes most of a short command."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from flashtune.db.codec import MAX_RECORD_BYTES
from flashtune.db.creation import HEAD, is_empty, known_revision, older_schema
from flashtune.db.failures import sqlite_error
from flashtune.db.limits import is_too_large, require_file, restrict, statement_seconds
from flashtune.db.location import describe, read_only_uri
from flashtune.db.stored_rows import StoredRecord, readable

if TYPE_CHECKING:
    from pathlib import Path

BUSY_SECONDS = 60.0
QUESTION = """
SELECT records.id, records.created_at, chosen.problem_key, chosen.target,
    CASE WHEN length(payload) <= :most THEN payload END
FROM {table} AS chosen JOIN records ON records.id = chosen.record_id
ORDER BY chosen.target, chosen.problem_key
"""
TABLES = ("selections", "stand_ins")


class _Row(NamedTuple):
    """A row of the question's answer."""

    id: int
    created_at: str
    problem_key: str
    target: str
    payload: str | None


def chosen_in_file(path: Path, url: str) -> tuple[StoredRecord, ...] | None:
    """Returns the selections of a file and then what stands in for them, as `Store` lists both.

    None where a value is too large: `Store` reads the rows one by one and leaves out that one.

    Args:
        path: The file.
        url: Its URL, as `database_url` makes it.

    Raises:
        StoreError: The file is damaged, or of another schema.
    """
    require_file(path)
    found: list[StoredRecord] = []
    try:
        with closing(_connect(path)) as connection:
            deadline = restrict(connection, statement_seconds(path))
            # One view of both tables.
            connection.execute("BEGIN")
            if is_empty(connection) or known_revision(connection, url) != HEAD:
                raise older_schema(url)
            for table in TABLES:
                deadline.restart()
                # Fetched first: the time limit is of SQLite alone.
                rows = connection.execute(QUESTION.format(table=table), {"most": MAX_RECORD_BYTES}).fetchall()
                found += readable(map(_Row._make, rows), describe(url))
    except (sqlite3.Error, UnicodeError) as error:
        if is_too_large(error):
            return None
        raise sqlite_error(error, url) from error
    return tuple(found)


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(read_only_uri(path), uri=True, timeout=BUSY_SECONDS, isolation_level=None)
