"""Read-only access of the runtime to selections and stored self-checks.

SQLite is read through the standard library, so a program that imports flashtune does not import SQLAlchemy.
Each query opens the file again, once per problem and process, in a third of a millisecond. So threads and
forked children share nothing, and a database that appears, grows or is replaced at run time is seen.
"""

from __future__ import annotations

import functools
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flashtune.db.codec import Check
from flashtune.db.errors import sqlite_error
from flashtune.db.light.bootstrap import check_tables
from flashtune.db.limits import bounded, file_exists, restrict, statement_seconds
from flashtune.db.location import database_url, describe, read_only_uri, sqlite_path
from flashtune.db.stored_rows import StoredRecord, readable, readable_check

if TYPE_CHECKING:
    from flashtune.core.record import Record, Versions
    from flashtune.db.light.remote import Query, Rows, Values

# Longest wait for a lock, and longest duration of a query of the runtime.
BUSY_SECONDS = 4.0
READ_SECONDS = 4.0

SELECTIONS = "selections"
FALLBACKS = "fallbacks"
# Both tables in one statement: a server's statements of one transaction may see different states.
BOTH = """(
SELECT 1 AS place, problem_key, target, record_id FROM selections
UNION ALL SELECT 2 AS place, problem_key, target, record_id FROM fallbacks
)"""
CHOSEN = """
SELECT records.id, records.created_at, chosen.problem_key, chosen.target, {payload}
FROM {table} AS chosen JOIN records ON records.id = chosen.record_id
{where} ORDER BY {order}chosen.target, chosen.problem_key
"""
OF_PROBLEM = "WHERE chosen.target = :target AND chosen.problem_key = :problem_key"
OF_TARGET = "WHERE chosen.target = :target"
CHECKS_OF = """
SELECT {payload} FROM checks
WHERE digest = :digest AND target = :target ORDER BY created_at DESC
"""


class _Row(NamedTuple):
    """A row of `CHOSEN`."""

    id: int
    created_at: str
    problem_key: str
    target: str
    payload: str | None


def open_reader(url: str | None = None) -> Reader | None:
    """Returns a reader of a database, or None if the file does not exist (yet).

    `url` is a path or an SQLAlchemy URL; None means `FLASHTUNE_DB` or the user's cache folder.
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
        """
        rows = self._chosen(SELECTIONS, OF_PROBLEM, {"problem_key": problem_key, "target": target})
        return rows[0].record if rows else None

    def selections(self, target: str) -> tuple[Record, ...]:
        """Returns all selected records of a target, in the order of their problems' keys."""
        return tuple(row.record for row in self._chosen(SELECTIONS, OF_TARGET, {"target": target}))

    def fallbacks(self, target: str) -> tuple[Record, ...]:
        """Returns fallbacks of a target's selections that cannot address every tensor, in the same order."""
        return tuple(row.record for row in self._chosen(FALLBACKS, OF_TARGET, {"target": target}))

    def stored(self) -> tuple[StoredRecord, ...]:
        """Returns the selections of all targets and then their fallbacks, as `Store` lists both."""
        question = _question(BOTH, "", order="chosen.place, ")
        return tuple(self._records(self._query(question, {}, True)))

    def remembered(self, digest: str, target: str, versions: Versions) -> Check | None:
        """Returns the latest self-check of a kernel under versions that run it alike, None without one.

        A row that cannot be read is skipped, with an `UnreadableRecord` warning.
        """
        question = CHECKS_OF.format(payload=bounded("payload"))
        for (payload,) in self._query(question, {"digest": digest, "target": target}, False):
            check = readable_check(payload, self._where)
            if check is not None and check.versions.makers == versions.makers:
                return check
        return None

    def _chosen(self, table: str, where: str, values: Values) -> list[StoredRecord]:
        return self._records(self._query(_question(table, where), values, False))

    def _records(self, rows: Rows) -> list[StoredRecord]:
        return list(readable(map(_Row._make, rows), self._where))


def _question(table: str, where: str, order: str = "") -> str:
    return CHOSEN.format(table=table, where=where, order=order, payload=bounded("records.payload"))


def _query_file(path: Path, url: str, question: str, values: Values, reads_all: bool) -> Rows:
    if not file_exists(path):
        return []
    try:
        with closing(_connect(path, statement_seconds(path) if reads_all else READ_SECONDS)) as connection:
            # The check and the query see one state of the file.
            connection.execute("BEGIN")
            if not check_tables(connection.execute, describe(url)):
                return []  # another process is creating it
            return connection.execute(question, values).fetchall()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if not file_exists(path):
            return []
        raise sqlite_error(error, url) from error


def _connect(path: Path, seconds: float) -> sqlite3.Connection:
    connection = sqlite3.connect(read_only_uri(path), uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    restrict(connection, seconds)
    return connection
