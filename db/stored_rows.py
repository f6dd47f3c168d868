"""Records of rows, independent of the library that read the rows."""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from flashtune.core.errors import TableError
from flashtune.core.record import Record
from flashtune.db.codec import Check, decode_check, decode_stored, raw_bytes
from flashtune.db.errors import UnreadableRecord


class StoredRecord(msgspec.Struct, frozen=True):
    """A record, its row, and the time of its insertion (ISO 8601, UTC)."""

    id: int
    created_at: str
    record: Record


def stored_text(value: object) -> str:
    """Returns a text column for printing and storing, with question marks for bytes that are not UTF-8."""
    return str(value).encode(errors="replace").decode()


def readable(rows: Iterable[Any], where: str) -> Iterator[StoredRecord]:
    """Returns the records of rows. One warning counts the rows without a readable record.

    Versions of flashtune share a database, and one may have a family that another lacks. Rows have the
    attributes `id`, `created_at`, `problem_key`, `target` and `payload`.
    """
    skipped = 0
    reason = ""
    for row in rows:
        try:
            record = decode_stored(row.payload, row.problem_key, row.target)
        except TableError as error:
            skipped += 1
            reason = reason or str(error)
            continue
        yield StoredRecord(row.id, stored_text(row.created_at), record)
    if skipped:
        warnings.warn(f"{skipped} rows of {where} were skipped: {reason}", UnreadableRecord, stacklevel=3)


def readable_check(payload: str | None, where: str) -> Check | None:
    """Returns the self-check of a row, or None with a warning if it cannot be read."""
    try:
        return decode_check(raw_bytes(payload))
    except TableError as error:
        message = f"a self-check of {where} was skipped: {error}"
        warnings.warn(message, UnreadableRecord, stacklevel=3)
        return None
