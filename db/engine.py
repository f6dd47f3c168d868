"""Connections and transactions. The hooks here configure SQLite so that no write is lost."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, exc
from sqlalchemy.pool import ConnectionPoolEntry

from flashtune.db.errors import sqlite_error
from flashtune.db.limits import restrict, statement_seconds
from flashtune.db.location import read_only_uri, read_write_uri, sqlite_path, without_secrets
from flashtune.db.server import row_error, server_engine, server_error

BUSY_SECONDS = 60.0
DEADLINE = "flashtune_deadline"
READING = "flashtune_reading"


def make_engine(url: str, *, read_only: bool = False, keep: bool = False) -> Engine:
    """Returns an engine for a URL that `database_url` made, without connecting.

    With `keep`, connections to a server are kept for later transactions.
    """
    path = sqlite_path(url)
    if path is not None:
        return _sqlite_engine(path, read_only)
    return server_engine(url, keep=keep)


def _sqlite_engine(path: Path, read_only: bool) -> Engine:
    def connect() -> sqlite3.Connection:
        # With a URI, SQLite itself refuses to write, or to create a missing file.
        name = read_only_uri(path) if read_only else read_write_uri(path)
        # With no isolation level, the driver opens no transactions: the hook below opens them.
        return sqlite3.connect(
            name, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )

    def on_connect(connection: sqlite3.Connection, record: ConnectionPoolEntry) -> None:
        record.info[DEADLINE] = restrict(connection, statement_seconds(path))
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")

    engine = create_engine(URL.create("sqlite", database=str(path)), creator=connect)
    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", _on_sqlite_begin)
    event.listen(engine, "before_cursor_execute", _before_statement)
    return engine


def _before_statement(connection: Connection, *_: Any) -> None:
    connection.info[DEADLINE].restart()


def _on_sqlite_begin(connection: Connection) -> None:
    # Under WAL, a deferred transaction that reads and then writes fails at once, whatever the busy timeout. A
    # transaction that takes the write lock at its beginning waits for it.
    is_reading = connection.get_execution_options().get(READING, False)
    connection.exec_driver_sql("BEGIN" if is_reading else "BEGIN IMMEDIATE")


@contextmanager
def writing(engine: Engine, url: str) -> Iterator[Connection]:
    """Opens one write transaction: it commits everything or nothing."""
    with explained(url), engine.begin() as connection:
        yield connection


@contextmanager
def reading(engine: Engine, url: str) -> Iterator[Connection]:
    """Opens one consistent view of the database. It blocks no writer."""
    with (
        explained(url),
        engine.connect().execution_options(**{READING: True}) as connection,
        connection.begin(),
    ):
        yield connection


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Converts database errors to `StoreError`."""
    try:
        yield
    except exc.DBAPIError as error:
        if isinstance(error.orig, sqlite3.Error):
            raise sqlite_error(error.orig, url) from error
        # The chain of causes would show a password that the driver quotes.
        raise server_error(error, url) from None
    except (sqlite3.Error, UnicodeError) as error:
        if sqlite_path(url) is None:
            raise row_error(without_secrets(str(error), url), url) from None
        raise sqlite_error(error, url) from error
