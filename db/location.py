"""Location of the database: a path or a URL from the user, the environment or the user's cache."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes, urlsplit

from flashtune.core.errors import MachineError, StoreError, UsageError
from flashtune.core.machine import cache_folder

SQLITE = "sqlite:///"
FILE_NAME = "flashtune.sqlite"


def database_url(text: str | None) -> str:
    """Returns the database's URL: absolute and percent-encoded for SQLite, unchanged for servers.

    Args:
        text: A path or an SQLAlchemy URL. If it is None or empty, `FLASHTUNE_DB` names the database, else it
            is `flashtune.sqlite` in the user's cache folder.

    Raises:
        UsageError: An SQLite URL without a file, or with options.
        StoreError: No database is named, and the user has no home folder.
    """
    chosen = text or os.environ.get("FLASHTUNE_DB") or str(_cache_folder() / FILE_NAME)
    if "://" not in chosen:
        return _sqlite_url(Path(chosen))
    if not chosen.startswith("sqlite"):
        return chosen
    name = chosen.removeprefix(SQLITE)
    if not chosen.startswith(SQLITE) or name in ("", ":memory:") or "?" in name:
        raise UsageError(f"the database URL {chosen!r} names no file: write sqlite:///FILE, or just FILE")
    return _sqlite_url(_decoded(name))


def sqlite_path(url: str) -> Path | None:
    """Returns the file of a URL that `database_url` made, or None for a server."""
    return _decoded(url.removeprefix(SQLITE)) if url.startswith(SQLITE) else None


def read_only_uri(path: Path) -> str:
    """Returns the URI with which SQLite opens a file for reading, and never creates it.

    Under write-ahead logging, even a reader creates a file next to the database. If the folder forbids this
    and there is no log, no process is writing, and the file can be read as immutable.
    """
    log = path.with_name(path.name + "-wal")
    effective = os.access in os.supports_effective_ids
    frozen = not os.access(path.parent, os.W_OK, effective_ids=effective) and not log.exists()
    return f"file:{quote(os.fsencode(path))}?{'immutable=1' if frozen else 'mode=ro'}"


def read_write_uri(path: Path) -> str:
    """Returns the URI with which SQLite opens or creates a file."""
    return f"file:{quote(os.fsencode(path))}?mode=rwc"


def describe(url: str) -> str:
    """Returns the name of a database in messages: its file, or its URL without the password."""
    path = sqlite_path(url)
    if path is not None:
        return str(path)
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=user.partition(":")[0] + at + host, query="").geturl()


def _sqlite_url(path: Path) -> str:
    return SQLITE + quote(os.fsencode(path.expanduser().absolute()))


def _decoded(name: str) -> Path:
    return Path(os.fsdecode(unquote_to_bytes(name)))


def _cache_folder() -> Path:
    try:
        return cache_folder()
    except MachineError as error:
        raise StoreError(f"{error}, or name a database with --db or FLASHTUNE_DB") from None
