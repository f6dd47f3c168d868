"""Creates databases and migrates old ones to the present schema. Rejects databases of other programs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import msgspec
from sqlalchemy import Connection, Engine, column, inspect, select, table, text

from flashtune.core.errors import StoreError
from flashtune.db.engine import explained, make_engine, reading, writing
from flashtune.db.errors import ELSEWHERE
from flashtune.db.light.bootstrap import HEAD, REVISIONS, alone, older_schema
from flashtune.db.limits import FOREIGN, file_exists, foreign_object
from flashtune.db.location import database_url, describe, sqlite_path

MIGRATIONS = Path(__file__).parent / "migrations"
VERSION_TABLE = "alembic_version"
# Any number that no other program uses for an advisory lock on the same server.
SERVER_LOCK = 0x666C6173


class Upgraded(msgspec.Struct, frozen=True):
    """A database's schema before (None if there was none) and after."""

    before: str | None
    after: str


def upgrade(url: str | None = None) -> Upgraded:
    """Migrates a database to the present schema; creates it if there is none.

    Raises:
        StoreError: The database is damaged, newer than this flashtune, not flashtune's, or unwritable.
    """
    address = database_url(url)
    engine = make_engine(address)
    try:
        return _upgraded(engine, address)
    finally:
        engine.dispose()


def ready_engine(url: str) -> Engine:
    """Returns an engine on a database that has the present schema and can be written.

    Raises:
        StoreError: As `upgrade`.
    """
    engine = make_engine(url)
    try:
        _upgraded(engine, url)
        # Taking the write lock writes nothing, and fails if the database cannot be written.
        with writing(engine, url):
            pass
    except BaseException:
        engine.dispose()
        raise
    return engine


def source_engine(url: str) -> Engine | None:
    """Returns a read-only engine on a database of the present schema, None if it has no tables (yet).

    Raises:
        StoreError: The database is damaged, newer, older or not flashtune's.
    """
    path = sqlite_path(url)
    if path is not None and not file_exists(path):
        return None
    engine = make_engine(url, read_only=True)
    try:
        with reading(engine, url) as connection:
            revision = _revision(connection, url)
        if revision not in (None, HEAD):
            raise older_schema(url)
    except BaseException:
        engine.dispose()
        raise
    return engine if revision else None


def _upgraded(engine: Engine, url: str) -> Upgraded:
    path = sqlite_path(url)
    if path is not None and not file_exists(path):
        before = None
    else:
        with reading(engine, url) as connection:
            before = _revision(connection, url)
    if before != HEAD:
        with alone(path) if path else nullcontext():
            if path is not None:
                _set_wal(engine, url)
            with writing(engine, url) as connection:
                _migrate(connection, url)
    return Upgraded(before, HEAD)


def _revision(connection: Connection, url: str) -> str | None:
    """Returns the database's schema version, None if it is empty."""
    if connection.dialect.name == "sqlite":
        foreign = connection.exec_driver_sql(FOREIGN).scalar()
        if foreign is not None:
            raise foreign_object(str(foreign), describe(url))
    tables = inspect(connection).get_table_names()
    if not tables:
        return None
    if VERSION_TABLE not in tables:
        raise StoreError(
            f"{describe(url)} contains other tables and is not a flashtune database: {ELSEWHERE}"
        )
    revision = connection.execute(select(column("version_num")).select_from(table(VERSION_TABLE))).scalar()
    if revision is not None and revision not in REVISIONS:
        raise StoreError(
            f"the database {describe(url)} has schema {str(revision)[:32]!r}, and this flashtune supports "
            f"schemas up to {HEAD}: upgrade flashtune, or {ELSEWHERE}"
        )
    return None if revision is None else str(revision)


def _set_wal(engine: Engine, url: str) -> None:
    """Sets write-ahead logging, once per file and outside of a transaction.

    The switch ignores the busy timeout, hence the file lock around it.
    """
    with explained(url):
        raw = engine.raw_connection()
        try:
            raw.cursor().execute("PRAGMA journal_mode = WAL")
        finally:
            raw.close()


def _migrate(connection: Connection, url: str) -> None:
    """Runs the migrations in the caller's transaction. A failure leaves the old schema.

    Raises:
        StoreError: flashtune is imported from an archive.
    """
    if not MIGRATIONS.is_dir():
        raise StoreError(
            f"{describe(url)} cannot be created or upgraded, because the folder {MIGRATIONS} does not exist: "
            "unpack flashtune's archive into a folder, and import it from there"
        )
    from alembic import command
    from alembic.config import Config as AlembicConfig

    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": SERVER_LOCK})
    if _revision(connection, url) == HEAD:
        return
    config = AlembicConfig()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
