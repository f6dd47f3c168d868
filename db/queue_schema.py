"""The tables of the queue of searches. Only PostgreSQL servers have them, in addition to those of records."""

from importlib import resources

from sqlalchemy import Connection, inspect, text

from flashtune.core.errors import StoreError
from flashtune.db.creation import SERVER_LOCK
from flashtune.db.errors import ELSEWHERE
from flashtune.db.location import describe

# The version of these tables. It is separate from that of the records, which SQLite files have too.
QUEUE_HEAD = "0001"
SCHEMA_FILE = "queue.sql"


def create_queue(connection: Connection, url: str) -> None:
    """Creates the tables of the queue if there are none, and rejects those of another version."""
    if not inspect(connection).has_table("queue_version"):
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": SERVER_LOCK})
        # Another process may have created them before the lock was free.
        if not inspect(connection).has_table("queue_version"):
            connection.exec_driver_sql(resources.files("flashtune.db").joinpath(SCHEMA_FILE).read_text())
    version = connection.scalar(text("SELECT version_num FROM queue_version"))
    if version != QUEUE_HEAD:
        raise StoreError(
            f"the queue of {describe(url)} has schema {str(version)[:32]!r}, and this flashtune supports "
            f"{QUEUE_HEAD}: upgrade flashtune, or {ELSEWHERE}"
        )
