"""Limits of an SQLite connection, since a database file may be damaged or of unknown origin."""

import sqlite3
import stat
import time
from pathlib import Path

from flashtune.core.errors import StoreError

# A record's JSON has at most 256 KiB. Larger values are refused before they are read into memory.
MAX_VALUE_BYTES = 1024 * 1024
# SQLite instructions between two checks of the clock: about 20 µs, or more if instructions are slow.
STEPS = 1_000
# Upper bound of the time counted between two checks, in seconds.
MAX_BETWEEN = 1.0
# A statement takes milliseconds, but a scan or a migration of a large database reads all of the file.
STATEMENT_SECONDS = 4.0
SCANNED_BYTES_PER_SECOND = 20e6
BLOCK_BYTES = 512


def bounded(column: str) -> str:
    """Returns SQL for a text column, NULL where its value is too large to be read into memory.

    A server has no limit like SQLite's. SQLite applies its own one to the cast.
    """
    return f"CASE WHEN length(CAST({column} AS TEXT)) <= {MAX_VALUE_BYTES} THEN {column} END"


class Deadline:
    """Stops a connection whose statements compute for too long. Waits for a lock hardly count."""

    def __init__(self, connection: sqlite3.Connection, seconds: float) -> None:
        self._seconds = seconds
        self.restart()
        connection.set_progress_handler(self._is_over, STEPS)

    def restart(self) -> None:
        """Gives the next statement, with the fetch of its rows, the full time."""
        self._spent = 0.0
        self._seen = time.monotonic()

    def _is_over(self) -> bool:
        now = time.monotonic()
        # SQLite makes no callback while it waits for a lock. That wait has its own limit.
        self._spent += min(now - self._seen, MAX_BETWEEN)
        self._seen = now
        return self._spent > self._seconds


def restrict(connection: sqlite3.Connection, seconds: float) -> Deadline:
    """Limits the time and memory that a database file can use, and the functions its schema may call.

    The connection has executed nothing yet. Its `seconds` of computing time count from now or from the last
    `restart`.
    """
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    # Text that is not UTF-8 would fail a whole query. Keep the bytes: the decoder rejects the row.
    connection.text_factory = lambda raw: raw.decode("utf-8", errors="surrogateescape")
    deadline = Deadline(connection, seconds)
    connection.execute("PRAGMA trusted_schema = OFF")
    return deadline


def statement_seconds(path: Path) -> float:
    """Returns the time limit of one statement on a database, longer for a file larger on disk."""
    try:
        stored = path.stat().st_blocks * BLOCK_BYTES
    except FileNotFoundError:
        stored = 0
    return STATEMENT_SECONDS + stored / SCANNED_BYTES_PER_SECOND


def file_exists(path: Path) -> bool:
    """Returns whether the file of a database exists."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StoreError(
            f"{path} cannot be looked up ({error.strerror}): name another with --db or FLASHTUNE_DB"
        ) from error
    if not stat.S_ISREG(mode):
        raise StoreError(
            f"{path} is not a file and holds no database: name another with --db or FLASHTUNE_DB"
        )
    return True
