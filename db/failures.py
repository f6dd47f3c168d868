"""Database errors as one sentence that says what to do next."""

from __future__ import annotations

import sqlite3

from flashtune.db.location import describe
from flashtune.errors import StoreError

# SQLite's primary result codes; the upper bits of an extended code refine them.
PRIMARY_CODE = 0xFF

ELSEWHERE = "name another with --db or FLASHTUNE_DB"


class UnreadableRecord(UserWarning):
    """A stored row was skipped, since it holds no record that this flashtune can read."""


def sqlite_error(error: sqlite3.Error, url: str) -> StoreError:
    """What an SQLite error means for the person whose database it is."""
    where = describe(url)
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & PRIMARY_CODE
    if code == sqlite3.SQLITE_BUSY:
        return StoreError(f"another process keeps the database {where} locked: let it finish, then try again")
    # What happened, and what to do about it besides naming another database.
    sentences = {
        sqlite3.SQLITE_NOTADB: f"{where} is no SQLite database or is damaged: move it away",
        sqlite3.SQLITE_CORRUPT: f"the database {where} is damaged: put a copy in its place",
        sqlite3.SQLITE_READONLY: f"the database {where} or its folder is read-only: make it writable",
        sqlite3.SQLITE_CANTOPEN: f"the database {where} cannot be opened: check its folder and its rights",
        sqlite3.SQLITE_FULL: f"the disk is full, so nothing was written to {where}: free some space",
        sqlite3.SQLITE_IOERR: f"the disk failed under the database {where} ({error}): check it",
    }
    fallback = f"the database {where} cannot be used ({error}): move it away"
    return StoreError(f"{sentences.get(code, fallback)}, or {ELSEWHERE}")
