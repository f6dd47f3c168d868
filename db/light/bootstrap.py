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

from flashtune.core.errors import StoreError
from flashtune.core.file_lock import alone_with
from flashtune.db.errors import ELSEWHERE
from flashtune.db.limits import FOREIGN, foreign_object
from flashtune.db.location import describe

# Every schema that there ever was, oldest first: the names of the migrations.
REVISIONS = ("0001", "0002", "0003", "0004")
HEAD = REVISIONS[-1]
SCHEMA_FILE = "schema.sql"
LOCK_SECONDS = 60.0
# Write-ahead logging is a property of the file: set once, and not within a transaction.
LOG_AHEAD = "PRAGMA journal_mode = WAL"


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
        OSError: The folder cannot be written.
    """
    with alone(path):
        if path.exists():
            with _open(path) as connection:
                if is_empty(connection):
                    connection.execute(LOG_AHEAD)
                    _make_tables(connection)
            return
        # Nobody sees a database that is half made, and no reader is in the way of the switch to WAL.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            draft = Path(folder) / path.name
            with _open(draft) as connection:
                # It reaches the disk in one step: each by itself, on a busy disk, delays a first call.
                connection.execute("PRAGMA synchronous = OFF")
                _make_tables(connection)
                # Last, since a log that a full disk does not let into the file would be left behind.
                connection.execute(LOG_AHEAD)
            with draft.open("rb+") as file:
                os.fsync(file.fileno())
            draft.replace(path)


def _open(path: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None))


def _make_tables(connection: sqlite3.Connection) -> None:
    """All tables and views or none: closing takes back what was not committed."""
    connection.execute("BEGIN IMMEDIATE")
    for statement in _statements():
        connection.execute(statement)
    connection.execute("INSERT INTO alembic_version (version_num) VALUES (?)", (HEAD,))
    connection.execute("COMMIT")


def known_revision(connection: sqlite3.Connection, url: str) -> str:
    """Returns the schema of an SQLite database that holds tables.

    Raises:
        StoreError: It is no database of flashtune's, or a newer flashtune made it.
    """
    foreign = connection.execute(FOREIGN).fetchone()
    if foreign is not None:
        raise foreign_object(str(foreign[0]), describe(url))
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'alembic_version'"
    if not connection.execute(query).fetchone()[0]:
        raise StoreError(f"{describe(url)} holds other tables and is no flashtune database: {ELSEWHERE}")
    (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone() or (None,)
    if revision not in REVISIONS:
        raise StoreError(
            f"the database {describe(url)} has schema {str(revision)[:32]!r}, and this flashtune knows those "
            f"up to {HEAD}: upgrade flashtune, or {ELSEWHERE}"
        )
    return str(revision)


def older_schema(url: str) -> StoreError:
    """Returns the error of a database that must be brought to the present schema before it is read."""
    return StoreError(
        f"{describe(url)} has an older schema: run `flashtune db upgrade --db {describe(url)}` first"
    )


def is_empty(connection: sqlite3.Connection) -> bool:
    """Whether an SQLite database holds no table."""
    tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'")
    return bool(tables.fetchone()[0] == 0)


@functools.cache
def _statements() -> tuple[str, ...]:
    text = resources.files("flashtune.db").joinpath(SCHEMA_FILE).read_text(encoding="utf-8")
    return tuple(filter(None, map(str.strip, text.split(";"))))
