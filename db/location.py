"""Location of the database: a path or a URL from the user, the environment or the user's cache."""

import contextlib
import os
import re
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

from flashtune.core.errors import MachineError, StoreError, UsageError
from flashtune.core.files import lock_fault
from flashtune.core.machine import CONTROL_CODES, DATABASE_VARIABLE, cache_folder, user_path, variable

SQLITE = "sqlite:///"
FILE_NAME = "flashtune.sqlite"
# Everything that may have a password, so that it is never taken for a path. libpq also reads `password=...`.
SERVER = re.compile(r"(?!sqlite)[^/]*://|\s*postgres[^/]*:|.*\bpassword\s*=", re.IGNORECASE | re.DOTALL)
HOST = re.compile(r"[\w.,-]*|[\w.:%]+")
WRITE_URL = "write postgresql+psycopg://USER:PASSWORD@HOST/NAME"


def database_url(text: str | None) -> str:
    """Returns the database's URL: absolute and percent-encoded for SQLite, unchanged for servers.

    No error quotes a URL, which may have a password. `text` is a path or an SQLAlchemy URL. If it is None or
    empty, `FLASHTUNE_DB` names the database. Without this variable it is `flashtune.sqlite` in the user's
    cache folder.
    """
    chosen = text or variable(DATABASE_VARIABLE)
    if not chosen:
        return _sqlite_url(str(_cache_folder() / FILE_NAME))
    if SERVER.match(chosen):
        _require_unambiguous(chosen)
        return chosen
    if "://" not in chosen:
        return _sqlite_url(chosen)
    name = chosen.removeprefix(SQLITE)
    if not chosen.startswith(SQLITE) or name in ("", ":memory:") or "?" in name:
        raise UsageError("the database URL names no file: write sqlite:///FILE, or just FILE")
    return _sqlite_url(os.fsdecode(unquote_to_bytes(name)))


def _require_unambiguous(text: str) -> None:
    """Rejects server URLs in which programs would find different passwords."""
    from sqlalchemy import exc, make_url

    user, _, rest = text.partition("://")[2].rpartition("@")
    try:
        host = make_url(text).host or ""
    except (exc.ArgumentError, ValueError):
        # Its text may quote a part of the URL.
        raise UsageError(f"the database is not a URL: {WRITE_URL}") from None
    if re.search("[@/?#]", user) or "#" in rest or not HOST.fullmatch(host):
        raise UsageError(f"the database URL is ambiguous: {WRITE_URL}, with %23 for #, %2F for /, %40 for @")
    if CONTROL_CODES.search(text):
        raise UsageError(f"the database URL has control codes: {WRITE_URL}")


def sqlite_path(url: str) -> Path | None:
    """Returns the file of a URL that `database_url` made, or None for a server."""
    return _decoded(url.removeprefix(SQLITE)) if url.startswith(SQLITE) else None


def bundle_file(url: str, arch: str) -> Path:
    """Returns the file of a database's machine code for an architecture.

    It is next to the database. For a server it is in the user's cache folder.
    """
    path = sqlite_path(url) or _cache_folder() / "server"
    return path.with_name(f"{path.name}.{arch}.bundle")


def database_bundle(arch: str) -> Path | None:
    """Returns the bundle of the user's database, or None if it has no location, of which dispatch warns."""
    try:
        return bundle_file(database_url(None), arch)
    except (StoreError, UsageError):
        return None


def read_only_uri(path: Path) -> str:
    """Returns the URI with which SQLite opens a file for reading, and never creates it.

    Under write-ahead logging, even a reader creates files next to the database, which would shut out its
    owner. If there is no log, and this user may not write the database or files have no locks, the file is
    read as immutable.
    """
    log = path.with_name(path.name + "-wal")
    fault = lock_fault(path.parent)
    frozen = (fault or not (_writable(path) and _writable(path.parent))) and not _has_content(log)
    if fault and not frozen:
        raise _without_locks(path, fault)
    return f"file:{quote(os.fsencode(path))}?{'immutable=1' if frozen else 'mode=ro'}"


def read_write_uri(path: Path) -> str:
    """Returns the URI with which SQLite opens or creates a file."""
    fault = lock_fault(path.parent)
    if fault:
        raise _without_locks(path, fault)
    return f"file:{quote(os.fsencode(path))}?mode=rwc"


def make_file(path: Path) -> None:
    """Creates an empty database with the mode that the umask leaves. SQLite itself takes 0644 at most.

    SQLite gives its log the same mode. It also reports the error if the file cannot be created.
    """
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))


def _writable(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _has_content(log: Path) -> bool:
    try:
        return log.stat().st_size > 0
    except OSError:
        return False


def _without_locks(path: Path, fault: str) -> StoreError:
    return StoreError(
        f"the folder of the database {path} has no file locks ({fault}): mount it with locks, or name "
        "another with --db or FLASHTUNE_DB"
    )


def describe(url: str) -> str:
    """Returns the name of a database in messages: its file, or its URL without passwords and options."""
    path = sqlite_path(url)
    if path is not None:
        return str(path)
    from sqlalchemy import make_url

    return make_url(url).set(query={}).render_as_string(hide_password=True)


def without_password(argument: str) -> str:
    """Returns an argument of a command line, for messages and files: a URL in it has no password."""
    option, sign, value = argument.partition("=") if argument.startswith("--db=") else ("", "", argument)
    if not SERVER.match(value):
        return argument
    try:
        return option + sign + describe(database_url(value))
    except UsageError:
        return f"{option}{sign}***"


def without_secrets(text: str, url: str) -> str:
    """Returns the text of a driver's error without the passwords of a server's URL."""
    from sqlalchemy import make_url

    parts = make_url(url)
    secrets = [parts.password, *(value for name, value in parts.query.items() if "pass" in name.lower())]
    for secret in secrets:
        for value in (secret,) if isinstance(secret, str) else secret or ():
            text = text.replace(value, "***") if value else text
    return text


def _sqlite_url(text: str) -> str:
    return SQLITE + quote(os.fsencode(user_path(text, "the database (--db or FLASHTUNE_DB)")))


def _decoded(name: str) -> Path:
    return Path(os.fsdecode(unquote_to_bytes(name)))


def _cache_folder() -> Path:
    try:
        return cache_folder()
    except MachineError as error:
        raise StoreError(f"{error}, or name a database with --db or FLASHTUNE_DB") from None
