"""Stores a self-check without SQLAlchemy. Its import would take longer than the check."""

import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from flashtune.db.codec import Check, encode_check, fingerprint
from flashtune.db.errors import sqlite_error
from flashtune.db.light.bootstrap import check_tables, create_database
from flashtune.db.limits import file_exists, restrict
from flashtune.db.location import database_url, read_write_uri, sqlite_path

# Longest wait for another process's write.
BUSY_SECONDS = 30.0
# Longest computing time of SQLite for one write.
WRITE_SECONDS = 4.0
REMEMBER = (
    "INSERT INTO checks (digest, target, versions_hash, passed, created_at, payload) "
    "VALUES (:digest, :target, :versions_hash, :passed, :created_at, :payload) "
    "ON CONFLICT (digest, target, versions_hash) DO UPDATE SET "
    "passed = excluded.passed, created_at = excluded.created_at, payload = excluded.payload"
)


def remember_check(check: Check, url: str | None = None) -> None:
    """Stores a self-check's verdict, and replaces an earlier one of the same kernel, GPU and versions.

    Creates the database if there is none. `url` is a path or an SQLAlchemy URL; None means `FLASHTUNE_DB` or
    the user's cache folder.
    """
    address = database_url(url)
    path = sqlite_path(address)
    if path is None:
        from flashtune.db.light.remote import Server
        from flashtune.db.store import open_store

        def remember() -> None:
            with open_store(address) as store:
                store.remember_check(check)

        Server(address).ask(remember)
        return
    row: dict[str, object] = {
        "digest": check.digest,
        "target": check.target,
        "versions_hash": fingerprint(check.versions),
        "passed": check.verdict.passed,
        "created_at": datetime.now(UTC).isoformat(timespec="microseconds"),
        "payload": encode_check(check).decode(),
    }
    try:
        while not (file_exists(path) and _wrote(path, row)):
            create_database(path)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise sqlite_error(error, address) from error


def _wrote(path: Path, row: dict[str, object]) -> bool:
    """Stores a row. Returns False if the database has no tables yet.

    The check of the tables and the write are one transaction, so no other process replaces tables between
    them.
    """
    with closing(_connect(path)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        if not check_tables(connection.execute, str(path)):
            return False
        connection.execute(REMEMBER, row)
        connection.execute("COMMIT")
    return True


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(read_write_uri(path), uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    restrict(connection, WRITE_SECONDS)
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection
