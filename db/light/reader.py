"""Read-only access of the runtime to selections and stored self-checks.

SQLite is read through the standard library, so a program that imports flashtune does not import SQLAlchemy.
Only tables are read: a view is code of the file's author. Each query opens the file again, once per problem
and process, in a third of a millisecond. So threads and forked children share nothing, and a database that
appears, grows or is replaced at run time is seen.
"""

from __future__ import annotations

import functools
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from flashtune.core.earlier_names import TABLES
from flashtune.core.errors import TableError
from flashtune.db.codec import MAX_RECORD_BYTES, decode_check, decode_stored, raw_bytes
from flashtune.db.errors import UnreadableRecord, sqlite_error
from flashtune.db.limits import FOREIGN, MAX_VALUE_BYTES, file_exists, foreign_object, is_too_large, restrict
from flashtune.db.location import database_url, describe, read_only_uri, sqlite_path

if TYPE_CHECKING:
    from flashtune.core.record import Record, Versions
    from flashtune.db.codec import Check
    from flashtune.db.light.remote import Query, Rows, Values

# Longest wait for a lock, and longest duration of one query.
BUSY_SECONDS = 4.0
READ_SECONDS = 4.0

SELECTIONS = "selections"
FALLBACKS = "fallbacks"
CHECKS = "checks"
# The size is queried first: a value larger than any record is not read into memory.
RECORD = """
SELECT chosen.problem_key, chosen.target, CASE WHEN length(payload) <= :most THEN payload END
FROM {table} AS chosen JOIN records ON records.id = chosen.record_id
WHERE chosen.target = :target AND chosen.problem_key = :problem_key
"""
RECORDS = """
SELECT chosen.problem_key, chosen.target, CASE WHEN length(payload) <= :most THEN payload END
FROM {table} AS chosen JOIN records ON records.id = chosen.record_id
WHERE chosen.target = :target ORDER BY chosen.problem_key
"""
CHECKS_OF = """
SELECT CASE WHEN length(payload) <= :most THEN payload END
FROM {table} WHERE digest = :digest AND target = :target ORDER BY created_at DESC
"""
ROWS = "SELECT rowid FROM {table}"
# Replaces a table's name in a query.
ONE_ROW = "(SELECT * FROM {table} WHERE rowid = :row)"
IS_THERE = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?"


def open_reader(url: str | None = None) -> Reader | None:
    """Returns a reader of a database, or None if the file does not exist (yet).

    Args:
        url: A path or an SQLAlchemy URL; None for `FLASHTUNE_DB` or the user's cache folder.
    """
    address = database_url(url)
    path = sqlite_path(address)
    if path is None:
        from flashtune.db.light.remote import server_query

        return Reader(server_query(address), describe(address))
    if not file_exists(path):
        return None
    return Reader(functools.partial(_query_file, path, address), str(path))


class Reader:
    """Answers the runtime's queries. Safe under threads, processes and forks."""

    def __init__(self, query: Query, where: str) -> None:
        self._query = query
        self._where = where

    def selection(self, problem_key: str, target: str) -> Record | None:
        """Returns the record selected for a problem on a target.

        Returns None also if the row cannot be read here, with an `UnreadableRecord` warning.

        Raises:
            StoreError: The database is damaged, locked or cannot be reached.
        """
        rows = self._query(
            SELECTIONS, RECORD, {"problem_key": problem_key, "target": target, "most": MAX_RECORD_BYTES}
        )
        return next(self._readable(rows), None)

    def selections(self, target: str) -> tuple[Record, ...]:
        """Returns all selected records of a target, in the order of their problems' keys."""
        return tuple(
            self._readable(self._query(SELECTIONS, RECORDS, {"target": target, "most": MAX_RECORD_BYTES}))
        )

    def fallbacks(self, target: str) -> tuple[Record, ...]:
        """Returns fallbacks of a target's selections that cannot address every tensor, in the same order."""
        return tuple(
            self._readable(self._query(FALLBACKS, RECORDS, {"target": target, "most": MAX_RECORD_BYTES}))
        )

    def check(self, digest: str, target: str, versions: Versions) -> bool | None:
        """Returns whether a kernel passed a self-check under versions that run it alike; None without one."""
        check = self.remembered(digest, target, versions)
        return check.verdict.passed if check else None

    def remembered(self, digest: str, target: str, versions: Versions) -> Check | None:
        """Returns the latest self-check of a kernel under versions that run it alike, None without one.

        A row that cannot be read is skipped, with an `UnreadableRecord` warning.
        """
        values: Values = {"digest": digest, "target": target, "most": MAX_RECORD_BYTES}
        for (payload,) in self._query(CHECKS, CHECKS_OF, values):
            try:
                check = decode_check(raw_bytes(str(payload)))
            except TableError as error:
                warnings.warn(
                    f"a self-check of {self._where} was skipped: {error}", UnreadableRecord, stacklevel=3
                )
                continue
            if check.versions.makers == versions.makers:
                return check
        return None

    def _readable(self, rows: Rows) -> Iterator[Record]:
        for problem_key, target, payload in rows:
            try:
                yield decode_stored(payload, problem_key, target)
            except TableError as error:
                warnings.warn(
                    f"a selection of {self._where} was skipped: {error}", UnreadableRecord, stacklevel=4
                )


def _query_file(path: Path, url: str, table: str, question: str, values: Values) -> Rows:
    if not file_exists(path):
        return []
    try:
        with closing(_connect(path)) as connection:
            # All statements see one state of the file: another process may rename the tables meanwhile.
            connection.execute("BEGIN")
            foreign = connection.execute(FOREIGN).fetchone()
            if foreign is not None:
                raise foreign_object(str(foreign[0]), describe(url))
            # The table may be missing: another process is creating the database, or an older flashtune made
            # it.
            if not _is_there(connection, table):
                table = TABLES.get(table, table)
                if not _is_there(connection, table):
                    return []
            try:
                return connection.execute(question.format(table=table), values).fetchall()
            except sqlite3.DataError as error:
                if not is_too_large(error):
                    raise
            return _query_rows(connection, table, question, values, describe(url))
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if not file_exists(path):
            return []
        raise sqlite_error(error, url) from error


def _query_rows(
    connection: sqlite3.Connection, table: str, question: str, values: Values, where: str
) -> Rows:
    """Queries each row alone, and leaves out rows with a value that is too large."""
    one = question.format(table=ONE_ROW.format(table=table))
    found, skipped = [], 0
    for (row,) in connection.execute(ROWS.format(table=table)).fetchall():
        try:
            found += connection.execute(one, {**values, "row": row}).fetchall()
        except sqlite3.DataError as error:
            if not is_too_large(error):
                raise
            skipped += 1
    message = f"{skipped} rows of {where} were skipped: a value has more than {MAX_VALUE_BYTES} bytes"
    warnings.warn(message, UnreadableRecord, stacklevel=4)
    return found


def _is_there(connection: sqlite3.Connection, table: str) -> bool:
    return bool(connection.execute(IS_THERE, (table,)).fetchone()[0])


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(read_only_uri(path), uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    restrict(connection, READ_SECONDS)
    return connection
