"""Creates SQLite databases and checks their schema, without SQLAlchemy.

A program's first call may create the database, and must not spend time on that import.
"""

import functools
import os
import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator
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
DEFINITIONS = "SELECT type, name, tbl_name, sql FROM sqlite_master"
VERSION_TABLES = f"{DEFINITIONS} WHERE name = 'alembic_version' COLLATE NOCASE LIMIT 2"
REVISION = "SELECT version_num FROM alembic_version"
# The tables that `ANALYZE` and `PRAGMA optimize` add.
STATISTICS = frozenset(
    ("table", name, name, f"CREATE TABLE {name}({columns})")
    for name, columns in (("sqlite_stat1", "tbl,idx,stat"), ("sqlite_stat4", "tbl,idx,neq,nlt,ndlt,sample"))
)
# The characters that SQLite skips between tokens. `str.split()` also drops some that it reads as names.
SPACE = re.compile(r"[ \t\r\n\f]+")


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Holds the lock for creating an SQLite database, one process of this host at a time."""
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
    """Creates a database of the present schema if there is none, or an empty one."""
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
    `where` is the database's name in errors.
    """
    expected = _definitions()
    # One more than a genuine file can have, so that a hostile one cannot fill the memory.
    most = len(expected) + len(STATISTICS) + 1
    rows = [tuple(row) for row in execute(f"{DEFINITIONS} LIMIT {most}").fetchall()]
    defined = set(rows) - STATISTICS
    if not defined:
        return False
    version_table = ("table", "alembic_version", "alembic_version", _statements()[0])
    if [_loose(row) for row in execute(VERSION_TABLES).fetchall()] != [_loose(version_table)]:
        raise not_flashtunes(where)
    # The version is read after this check only: a view of that name would run its author's SQL.
    (revision,) = execute(REVISION).fetchone() or (None,)
    check_revision(revision, where)
    if defined != expected or len(rows) != len(set(rows)):
        raise StoreError(
            f"{where} has other tables, indexes, views or triggers than flashtune makes: {ELSEWHERE}"
        )
    return True


def check_revision(revision: object, where: str) -> None:
    """Rejects a database of another schema version."""
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


@functools.cache
def _definitions() -> frozenset[tuple[object, ...]]:
    """Returns the rows of `sqlite_master` in a database of the present schema."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for statement in _statements():
            connection.execute(statement)
        return frozenset(connection.execute(DEFINITIONS).fetchall())


def _loose(definition: Iterable[object]) -> tuple[str, ...]:
    """Returns a definition with single spaces. Earlier versions wrote other white space."""
    return tuple(SPACE.sub(" ", str(value)) for value in definition)
