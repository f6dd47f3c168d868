"""An empty database of the present schema, made without SQLAlchemy and Alembic.

A program's first call may be the one that creates the database, and must not wait for their import.
`schema.sql` is what the migrations come to; a test holds the two together.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib import resources
from pathlib import Path
from typing import Literal

from flashtune.db.failures import ELSEWHERE
from flashtune.errors import StoreError
from flashtune.locking import alone_with

# Every schema that there ever was, oldest first: the names of the migrations.
REVISIONS = ("0001", "0002", "0003")
HEAD = REVISIONS[-1]
SCHEMA_FILE = "schema.sql"
LOCK_SECONDS = 60.0


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Of all processes of this host, one at a time creates or migrates an SQLite database.

    Raises:
        StoreError: Another process takes a minute, or the folder cannot be written.
    """
    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(alone_with(Path(f"{path}.lock"), LOCK_SECONDS))
        except TimeoutError as error:
            raise StoreError(
                f"another process is creating or upgrading {path}: let it finish, then try again"
            ) from error
        except OSError as error:
            raise StoreError(
                f"cannot write beside the database {path} ({error.strerror}): {ELSEWHERE}"
            ) from error
        yield


def create_database(path: Path) -> None:
    """Leaves a database of the present schema where there is none, or an empty one.

    Raises:
        StoreError: As `alone`.
        sqlite3.Error: The file cannot be written, or is no SQLite database.
    """
    with alone(path):
        if path.exists():
            _fill(path)
            return
        # Nobody sees a database that is half made, and no reader is in the way of the switch to WAL.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            draft = Path(folder) / path.name
            # It reaches the disk as a whole: each step by itself, on a busy disk, is a first call's delay.
            _fill(draft, synchronous="OFF")
            with draft.open("rb+") as file:
                os.fsync(file.fileno())
            draft.replace(path)


def _fill(path: Path, synchronous: Literal["FULL", "OFF"] = "FULL") -> None:
    """Makes the tables and views, unless there are some."""
    with closing(sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        if is_empty(connection):
            _execute_schema(connection)


def _execute_schema(connection: sqlite3.Connection) -> None:
    # Write-ahead logging is a property of the file: set once, and not within a transaction.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statement in _statements():
            connection.execute(statement)
        connection.execute("INSERT INTO alembic_version (version_num) VALUES (?)", (HEAD,))
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def is_empty(connection: sqlite3.Connection) -> bool:
    """Whether an SQLite database holds no table."""
    tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'")
    return bool(tables.fetchone()[0] == 0)


@functools.cache
def _statements() -> tuple[str, ...]:
    text = resources.files("flashtune.db").joinpath(SCHEMA_FILE).read_text(encoding="utf-8")
    return tuple(filter(None, map(str.strip, text.split(";"))))
