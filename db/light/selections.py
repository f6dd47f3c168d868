"""Reads all selections of an SQLite file without SQLAlchemy.

Importing SQLAlchemy would take most of the time of a short command.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from flashtune.db.codec import MAX_RECORD_BYTES
from flashtune.db.errors import sqlite_error
from flashtune.db.light.bootstrap import HEAD, is_empty, known_revision, older_schema
from flashtune.db.limits import is_too_large, restrict, statement_seconds
from flashtune.db.location import describe, read_only_uri
from flashtune.db.stored_rows import StoredRecord, readable

if TYPE_CHECKING:
    from pathlib import Path

BUSY_SECONDS = 60.0
QUERY = """
SELECT records.id, records.created_at, chosen.problem_key, chosen.target,
    CASE WHEN length(payload) <= :most THEN payload END
FROM {table} AS chosen JOIN records ON records.id = chosen.record_id
ORDER BY chosen.target, chosen.problem_key
"""
TABLES = ("selections", "fallbacks")


class _Row(NamedTuple):
    """A row of the query."""

    id: int
    created_at: str
    problem_key: str
    target: str
    payload: str | None


def chosen_in_file(path: Path, url: str) -> tuple[StoredRecord, ...] | None:
    """Returns the selections of a file and then their fallbacks, as `Store` lists both.

    Returns None if a value is too large: `Store` can leave out that row alone.

    Args:
        path: The file.
        url: Its URL, as `database_url` makes it.

    Raises:
        StoreError: The file is damaged, or of another schema.
    """
    found: list[StoredRecord] = []
    try:
        uri = read_only_uri(path)
        with closing(
            sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
        ) as connection:
            deadline = restrict(connection, statement_seconds(path))
            # Both tables are read in one view.
            connection.execute("BEGIN")
            if is_empty(connection):
                return ()  # another process is creating it
            if known_revision(connection, url) != HEAD:
                raise older_schema(url)
            for table in TABLES:
                deadline.restart()
                # The time limit is for SQLite, so decoding begins after the last row.
                rows = connection.execute(QUERY.format(table=table), {"most": MAX_RECORD_BYTES}).fetchall()
                found += readable(map(_Row._make, rows), describe(url))
    except (sqlite3.Error, UnicodeError) as error:
        if is_too_large(error):
            return None
        raise sqlite_error(error, url) from error
    return tuple(found)
