"""Creates SQLite databases and checks their schema, without SQLAlchemy.

A program's first call may create the database, and must not spend time on that import.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from flashtune.core.errors import StoreError
from flashtune.core.files import alone_with
from flashtune.db.errors import ELSEWHERE
from flashtune.db.limits import restrict, statement_seconds
from flashtune.db.location import make_file

# The schema's version. Versions are four digits, so that they are ordered as texts.
HEAD = "0006"
SCHEMA_FILE = "schema.sql"
LOCK_SECONDS = 60.0
# Write-ahead logging is a property of the file. It is set once, outside of a transaction.
LOG_AHEAD = "PRAGMA journal_mode = WAL"
# No more than a hostile file needs to be refused.
DEFINITIONS = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL LIMIT 100"
REVISION = "SELECT version_num FROM alembic_version"


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Holds the lock for creating an SQLite database, one process of this host at a time.

    Raises:
        StoreError: Another process held the lock for a minute, or the folder cannot be written.
    """
    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(alone_with(Path(f"{path}.lock"), LOCK_SECONDS))
        except TimeoutError as error:
            raise StoreError(f"another process is creating {path}: wait for it, then try again") from error
        except OSError as error:
            raise StoreError(
                f"cannot write in the folder of the database {path} ({error.strerror}): {ELSEWHERE}"
            ) from error
        yield


def create_database(path: Path) -> None:
    """Creates a database of the present schema if there is none, or an empty one.

    Raises:
        StoreError: As `alone` and `check_tables`, or the folder cannot be written.
        sqlite3.Error: The file cannot be written, or is not an SQLite database.
    """
    with alone(path):
        if path.exists():
            with _open(path) as connection:
                if not check_tables(connection.execute, str(path)):
                    connection.execute(LOG_AHEAD)
                    _make_tables(connection)
            return
        try:
            _create_file(path)
        except OSError as error:
            raise StoreError(f"cannot write the database {path} ({error.strerror}): {ELSEWHERE}") from error


def _create_file(path: Path) -> None:
    """Creates a file that no process sees before it is complete. No reader blocks the switch to WAL."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder) / path.name
        make_file(draft)
        with _open(draft) as connection:
            # Skip the syncs: each one delays a first call on a busy disk. The file is synced once, at the
            # end.
            connection.execute("PRAGMA synchronous = OFF")
            _make_tables(connection)
            # Last: if a full disk refuses the log's content, the log would remain.
            connection.execute(LOG_AHEAD)
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(path)


def _open(path: Path) -> closing[sqlite3.Connection]:
    connection = sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)
    restrict(connection, statement_seconds(path))
    return closing(connection)


def _make_tables(connection: sqlite3.Connection) -> None:
    """Creates all tables or none: closing the connection rolls back."""
    connection.execute("BEGIN IMMEDIATE")
    for statement in _statements():
        connection.execute(statement)
    connection.execute("INSERT INTO alembic_version (version_num) VALUES (?)", (HEAD,))
    connection.execute("COMMIT")


def check_tables(execute: Callable[[str], Any], where: str) -> bool:
    """Returns whether an SQLite database has flashtune's tables, False if it is empty.

    Triggers, views, generated columns, checks and indexes of expressions run SQL of the file's author, and a
    deadline cannot interrupt a single SQLite function. So all definitions must be those of `schema.sql`.

    Args:
        execute: Executes a statement and returns its cursor.
        where: The database's name in errors.

    Raises:
        StoreError: The database is of another schema, or not flashtune's.
    """
    expected = {_plain(statement) for statement in _statements()}
    version_table = _plain(_statements()[0])
    defined = {_plain(str(sql)) for (sql,) in execute(DEFINITIONS).fetchall()}
    if not defined:
        return False
    if version_table not in defined:
        raise not_flashtunes(where)
    (revision,) = execute(REVISION).fetchone() or (None,)
    check_revision(revision, where)
    if defined != expected:
        raise StoreError(
            f"{where} has other tables, indexes, views or triggers than flashtune makes: {ELSEWHERE}"
        )
    return True


def check_revision(revision: object, where: str) -> None:
    """Rejects a database of another schema version.

    Raises:
        StoreError: The version is not `HEAD`.
    """
    if revision == HEAD:
        return
    shown = str(revision)[:32]
    if isinstance(revision, str) and revision < HEAD:
        raise StoreError(
            f"the database {where} has schema {shown!r} of an earlier flashtune: search again or import a "
            f"table into another one, and {ELSEWHERE}"
        )
    raise StoreError(
        f"the database {where} has schema {shown!r}, and this flashtune supports schema {HEAD}: upgrade "
        f"flashtune, or {ELSEWHERE}"
    )


def not_flashtunes(where: str) -> StoreError:
    """Returns the error for a database of another program."""
    return StoreError(f"{where} contains other tables and is not a flashtune database: {ELSEWHERE}")


@functools.cache
def _statements() -> tuple[str, ...]:
    """Returns the statements that create the tables, first that of the version."""
    text = resources.files("flashtune.db").joinpath(SCHEMA_FILE).read_text(encoding="utf-8")
    return tuple(filter(None, map(str.strip, text.split(";"))))


def _plain(statement: str) -> str:
    """Returns a statement on one line. Earlier versions wrote other white space."""
    return " ".join(statement.split())
