"""What the runtime reads of the database: selections and remembered self-checks, never writing.

SQLite is read through the standard library, so that a program that imports flashtune pays for no
SQLAlchemy. Each question opens the file anew (a third of a millisecond, once per problem and
process): nothing is shared between threads or with forked children, and a database that appears,
grows or is replaced while the program runs is seen.
"""

from __future__ import annotations

import functools
import sqlite3
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtune.db.codec import decode_check, decode_stored, fingerprint
from flashtune.db.failures import UnreadableRecord, sqlite_error
from flashtune.db.location import database_url, describe, read_only_uri, sqlite_path
from flashtune.errors import TableError

if TYPE_CHECKING:
    from flashtune.db.checks import Check
    from flashtune.record import Record, Versions

    Rows = list[tuple[Any, ...]]
    # A view, a question with a place for its name, and the question's values.
    Query = Callable[[str, str, dict[str, str]], Rows]

BUSY_SECONDS = 5.0

SELECTIONS = "selected_records"
STAND_INS = "stand_in_records"
CHECKS = "known_checks"
PAYLOADS = "check_payloads"
RECORD = (
    "SELECT problem_key, target, payload FROM {view} WHERE target = :target AND problem_key = :problem_key"
)
RECORDS = "SELECT problem_key, target, payload FROM {view} WHERE target = :target ORDER BY problem_key"
CHECK = (
    "SELECT passed FROM {view} WHERE digest = :digest AND target = :target AND versions_hash = :versions_hash"
)
PAYLOAD = CHECK.replace("passed", "payload")
IS_THERE = "SELECT count(*) FROM sqlite_master WHERE type = 'view' AND name = ?"


def open_reader(url: str | None = None) -> Reader | None:
    """A reader of a database, or None where there is no such file (yet).

    Args:
        url: A path or an SQLAlchemy URL; None for `FLASHTUNE_DB` or the user's cache folder.
    """
    address = database_url(url)
    path = sqlite_path(address)
    if path is None:
        from flashtune.db.remote import server_query

        return Reader(server_query(address), describe(address))
    if not path.exists():
        return None
    return Reader(functools.partial(_query_file, path, address), str(path))


class Reader:
    """Answers the runtime's questions. Safe under threads, processes and forks."""

    def __init__(self, query: Query, where: str) -> None:
        self._query = query
        self._where = where

    def selection(self, problem_key: str, target: str) -> Record | None:
        """The record selected for a problem on a target.

        None also where the row cannot be read here; an `UnreadableRecord` warning then says so.

        Raises:
            StoreError: The database is damaged, locked or out of reach.
        """
        rows = self._query(SELECTIONS, RECORD, {"problem_key": problem_key, "target": target})
        return next(self._readable(rows), None)

    def selections(self, target: str) -> tuple[Record, ...]:
        """All selected records of a target, in the order of their problems' keys."""
        return tuple(self._readable(self._query(SELECTIONS, RECORDS, {"target": target})))

    def stand_ins(self, target: str) -> tuple[Record, ...]:
        """What stands in for selections of a target that cannot address every tensor, in the same order."""
        return tuple(self._readable(self._query(STAND_INS, RECORDS, {"target": target})))

    def check(self, digest: str, target: str, versions: Versions) -> bool | None:
        """Whether a kernel passed its self-check here under these versions; None if it had none."""
        rows = self._query(CHECKS, CHECK, _check_key(digest, target, versions))
        return rows[0][0] == 1 if rows else None

    def remembered(self, digest: str, target: str, versions: Versions) -> Check | None:
        """All that is remembered of a kernel's self-check; None too in a database of an older schema.

        Raises:
            TableError: The row holds no self-check.
        """
        rows = self._query(PAYLOADS, PAYLOAD, _check_key(digest, target, versions))
        return decode_check(str(rows[0][0]).encode()) if rows else None

    def _readable(self, rows: Rows) -> Iterator[Record]:
        for problem_key, target, payload in rows:
            try:
                yield decode_stored(payload, problem_key, target)
            except TableError as error:
                warnings.warn(
                    f"a selection of {self._where} was skipped: {error}", UnreadableRecord, stacklevel=4
                )


def _check_key(digest: str, target: str, versions: Versions) -> dict[str, str]:
    return {"digest": digest, "target": target, "versions_hash": fingerprint(versions)}


def _query_file(path: Path, url: str, view: str, question: str, values: dict[str, str]) -> Rows:
    try:
        with closing(_connect(path)) as connection:
            # Another process may still be creating the database, or an older flashtune made it.
            if not connection.execute(IS_THERE, (view,)).fetchone()[0]:
                return []
            return connection.execute(question.format(view=view), values).fetchall()
    except sqlite3.Error as error:
        if not path.exists():
            return []
        raise sqlite_error(error, url) from error


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(read_only_uri(path), uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    # Text that is no UTF-8 would fail a whole query: the row is refused when it is decoded.
    connection.text_factory = lambda raw: raw.decode("utf-8", errors="replace")
    return connection
