"""Creates an empty database of the present schema without SQLAlchemy and Alembic.

A program's first call may create the database, and must not spend time on these imports. A test checks that
`schema.sql` equals the result of the migrations.
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

from flashtune.core.errors import StoreError
from flashtune.core.files import alone_with
from flashtune.db.errors import ELSEWHERE
from flashtune.db.limits import FOREIGN, foreign_object
from flashtune.db.location import describe, make_file

# The names of all migrations, oldest first.
REVISIONS = ("0001", "0002", "0003", "0004", "0005")
HEAD = REVISIONS[-1]
SCHEMA_FILE = "schema.sql"
LOCK_SECONDS = 60.0
# Write-ahead logging is a property of the file. It is set once, outside of a transaction.
LOG_AHEAD = "PRAGMA journal_mode = WAL"


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Holds the lock for creating or migrating an SQLite database, one process of this host at a time.

    Raises:
        StoreError: Another process held the lock for a minute, or the folder cannot be written.
    """
    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(alone_with(Path(f"{path}.lock"), LOCK_SECONDS))
        except TimeoutError as error:
            raise StoreError(
                f"another process is creating or upgrading {path}: wait for it, then try again"
            ) from error
        except OSError as error:
            raise StoreError(
                f"cannot write in the folder of the database {path} ({error.strerror}): {ELSEWHERE}"
            ) from error
        yield


def create_database(path: Path) -> None:
    """Creates a database of the present schema if there is none, or an empty one.

    Raises:
        StoreError: As `alone`.
        sqlite3.Error: The file cannot be written, or is not an SQLite database.
        OSError: The folder cannot be written.
    """
    with alone(path):
        if path.exists():
            with _open(path) as connection:
                if is_empty(connection):
                    connection.execute(LOG_AHEAD)
                    _make_tables(connection)
            return
        # No process sees an incomplete database, and no reader blocks the switch to WAL.
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
    return closing(sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None))


def _make_tables(connection: sqlite3.Connection) -> None:
    """Creates all tables and views or none: closing the connection rolls back."""
    connection.execute("BEGIN IMMEDIATE")
    for statement in _statements():
        connection.execute(statement)
    connection.execute("INSERT INTO alembic_version (version_num) VALUES (?)", (HEAD,))
    connection.execute("COMMIT")


def known_revision(connection: sqlite3.Connection, url: str) -> str:
    """Returns the schema version of an SQLite database that holds tables.

    Raises:
        StoreError: The database is not flashtune's, or a newer flashtune made it.
    """
    foreign = connection.execute(FOREIGN).fetchone()
    if foreign is not None:
        raise foreign_object(str(foreign[0]), describe(url))
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'alembic_version'"
    if not connection.execute(query).fetchone()[0]:
        raise StoreError(
            f"{describe(url)} contains other tables and is not a flashtune database: {ELSEWHERE}"
        )
    (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone() or (None,)
    if revision not in REVISIONS:
        raise StoreError(
            f"the database {describe(url)} has schema {str(revision)[:32]!r}, and this flashtune supports "
            f"schemas up to {HEAD}: upgrade flashtune, or {ELSEWHERE}"
        )
    return str(revision)


def older_schema(url: str) -> StoreError:
    """Returns the error for a database that must be migrated before it is read."""
    return StoreError(
        f"{describe(url)} has an older schema: run `flashtune db upgrade --db {describe(url)}` first"
    )


def is_empty(connection: sqlite3.Connection) -> bool:
    """Returns whether an SQLite database holds no table."""
    tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'")
    return bool(tables.fetchone()[0] == 0)


@functools.cache
def _statements() -> tuple[str, ...]:
    text = resources.files("flashtune.db").joinpath(SCHEMA_FILE).read_text(encoding="utf-8")
    return tuple(filter(None, map(str.strip, text.split(";"))))
