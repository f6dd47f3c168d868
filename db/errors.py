"""Database errors as one sentence that states the remedy."""

import sqlite3

from flashtune.core.errors import Printable, StoreError
from flashtune.core.machine import CAPACITY, unwritable, writing_error
from flashtune.db.location import describe, sqlite_path

# SQLite's primary result codes. Extended codes add information in the upper bits.
PRIMARY_CODE = 0xFF

ELSEWHERE = "name another with --db or FLASHTUNE_DB"

# Codes that SQLite reports, among other causes, if a disk fills while a database is open.
FROM_THE_DISK = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN})


class ServerUnavailableError(StoreError):
    """A server cannot be reached, or it ended the connection. The same transaction may succeed later."""


class RowError(StoreError):
    """A row cannot be stored or selected. Other rows can."""


class UnreadableRecord(Printable, UserWarning):
    """A stored row was skipped: this flashtune cannot read or use it."""


def sqlite_error(error: sqlite3.Error | UnicodeError, url: str) -> StoreError:
    """Returns the error to raise for an SQLite error, with a sentence for the user.

    The driver raises a `UnicodeError` if SQLite's message quotes a damaged schema, or if a statement gets
    text from a damaged row.
    """
    where = describe(url)
    if isinstance(error, UnicodeError):
        return StoreError(f"the database {where} is damaged: restore a copy, or {ELSEWHERE}")
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & PRIMARY_CODE
    if code == sqlite3.SQLITE_BUSY:
        return StoreError(f"another process has locked the database {where}: wait for it, then try again")
    if code in FROM_THE_DISK:
        reason = _disk_fault(url)
        if reason is not None:
            return StoreError(unwritable(f"the database {where}", reason, ELSEWHERE))
    # The error and its remedy, in addition to the use of another database.
    sentences = {
        sqlite3.SQLITE_NOTADB: f"{where} is no SQLite database or is damaged: move it away",
        sqlite3.SQLITE_CORRUPT: f"the database {where} is damaged: put a copy in its place",
        sqlite3.SQLITE_READONLY: f"the database {where} or its folder is read-only: make it writable",
        sqlite3.SQLITE_CANTOPEN: f"the database {where} cannot be opened: check its folder and its rights",
        sqlite3.SQLITE_FULL: f"the disk is full, so nothing was written to {where}: free some space",
        sqlite3.SQLITE_INTERRUPT: f"the database {where} takes too long to answer: move it away",
        sqlite3.SQLITE_TOOBIG: f"the database {where} holds a value that is too large: move it away",
        sqlite3.SQLITE_IOERR: f"the disk failed under the database {where} ({error}): check it",
    }
    fallback = f"the database {where} cannot be used ({error}): move it away"
    return StoreError(f"{sentences.get(code, fallback)}, or {ELSEWHERE}")


def _disk_fault(url: str) -> OSError | None:
    """Returns why the disk of a database's folder takes no data.

    Returns None if it does, or if the folder is missing or read-only.
    """
    path = sqlite_path(url)
    if path is None or not path.parent.is_dir():
        return None
    reason = writing_error(path.parent)
    return reason if reason is not None and reason.errno in CAPACITY else None
