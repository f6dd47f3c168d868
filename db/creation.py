"""Creates databases and opens them. Rejects databases of other programs and of other schemas."""

import msgspec
from sqlalchemy import Connection, Engine, insert, inspect, select, text

from flashtune.core.errors import StoreError
from flashtune.db.engine import explained, make_engine, reading, writing
from flashtune.db.light.bootstrap import HEAD, check_revision, check_tables, create_database, not_flashtunes
from flashtune.db.limits import file_exists
from flashtune.db.location import database_url, describe, sqlite_path
from flashtune.db.schema import METADATA, VERSION
from flashtune.db.server import WRITABLE, forbidden

# Any number that no other program uses for an advisory lock on the same server.
SERVER_LOCK = 0x666C6173


class Upgraded(msgspec.Struct, frozen=True):
    """A database's schema before (None if there was none) and after."""

    before: str | None
    after: str


def upgrade(url: str | None = None) -> Upgraded:
    """Creates a database if there is none, and checks its schema."""
    address = database_url(url)
    engine = make_engine(address)
    try:
        return _created(engine, address)
    finally:
        engine.dispose()


def ready_engine(url: str, *, keep: bool = False) -> Engine:
    """Returns an engine, made with `make_engine`, on a database that has all tables and can be written."""
    engine = make_engine(url, keep=keep)
    try:
        _created(engine, url)
        # Taking the write lock writes nothing, and fails if the database cannot be written. Another process
        # may have replaced the file since.
        with writing(engine, url) as connection:
            if not has_tables(connection, url):
                raise StoreError(f"another process replaced the database {describe(url)}: try again")
            if sqlite_path(url) is None and not connection.scalar(WRITABLE):
                raise forbidden(url, "it can only be read")
    except BaseException:
        engine.dispose()
        raise
    return engine


def source_engine(url: str) -> Engine | None:
    """Returns a read-only engine on a database, None if it has no tables (yet)."""
    path = sqlite_path(url)
    if path is not None and not file_exists(path):
        return None
    engine = make_engine(url, read_only=True)
    try:
        with reading(engine, url) as connection:
            if has_tables(connection, url):
                return engine
    except BaseException:
        engine.dispose()
        raise
    engine.dispose()
    return None


def has_tables(connection: Connection, url: str) -> bool:
    """Returns whether a database has flashtune's tables, False if it is empty."""
    where = describe(url)
    if connection.dialect.name == "sqlite":
        return check_tables(connection.exec_driver_sql, where)
    names = inspect(connection).get_table_names()
    if names and VERSION.name not in names:
        raise not_flashtunes(where)
    if names:
        check_revision(connection.scalar(select(VERSION.c.version_num)), where)
    return bool(names)


def _created(engine: Engine, url: str) -> Upgraded:
    """Creates the tables of an empty database."""
    path = sqlite_path(url)
    if path is None or file_exists(path):
        with reading(engine, url) as connection:
            if has_tables(connection, url):
                return Upgraded(HEAD, HEAD)
    if path is not None:
        with explained(url):
            create_database(path)
        return Upgraded(None, HEAD)
    with writing(engine, url) as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": SERVER_LOCK})
        # Another process may have created them before the lock was free.
        if not has_tables(connection, url):
            METADATA.create_all(connection)
            connection.execute(insert(VERSION).values(version_num=HEAD))
    return Upgraded(None, HEAD)
