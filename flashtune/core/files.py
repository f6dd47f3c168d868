"""Files that other processes or users may change meanwhile: locks, checked reads, atomic writes.

The locks hold between processes of one host and are compatible with those of filelock. An import of filelock
would take as long as the self-check of a kernel in a first call.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

POLL_SECONDS = 0.02
OPENED = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

# The open lock files of `alone_with`.
_lock_files: set[int] = set()


@contextlib.contextmanager
def alone_with(path: Path, seconds: float) -> Iterator[None]:
    """Holds an exclusive lock on a file during a block. Creates the file if it is missing.

    Waits up to `seconds` for another holder.
    """
    file = _held(path, time.monotonic() + seconds)
    process = os.getpid()
    _lock_files.add(file)
    try:
        yield
    finally:
        # A child forked in the block does not release its parent's lock.
        if os.getpid() == process:
            _lock_files.remove(file)
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)


def _close_lock_files() -> None:
    """Closes the files that a forked child has open too. It would keep the locks after its parent's end."""
    for file in _lock_files:
        os.close(file)
    _lock_files.clear()


os.register_at_fork(after_in_child=_close_lock_files)


def _held(path: Path, until: float) -> int:
    """Returns the open, locked file."""
    while True:
        file = _opened(path)
        try:
            if _is_locked(file) and os.fstat(file).st_nlink:
                # A process that releases the lock may remove the file. A lock on a removed file is useless.
                return file
            if time.monotonic() > until:
                raise TimeoutError(f"another process holds {path}")
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        time.sleep(POLL_SECONDS)


def _opened(path: Path) -> int:
    """Opens a lock file, with the mode that the umask leaves. A link is not followed."""
    try:
        file = os.open(path, os.O_RDWR | OPENED | os.O_CREAT, 0o666)
    except PermissionError:
        # A lock needs no right to write, and the file may be another user's.
        file = os.open(path, os.O_RDONLY | OPENED)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, f"{path} is a symbolic link, which no lock file is") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, f"{path} is no regular file, as a lock file is")
    return file


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise OSError(error.errno, f"its file system has no file locks: {error.strerror}") from error
    return True


def lock_fault(folder: Path) -> str | None:
    """Returns why a database in a folder cannot be locked. None if it can, or if nothing can be written."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        try:
            # SQLite's locks are these, and not those of `alone_with`.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.strerror
    return None


def read_bounded(path: Path, most: int) -> bytes:
    """Returns the first `most` bytes of a regular file."""
    return _read(path, most, 0)[0]


def read_own(path: Path, most: int) -> bytes:
    """Returns the first `most` bytes of a regular file that only this user and root can have written.

    The folder does not matter: another user can move such a file, but not write its content.
    """
    content, status = _read(path, most, os.O_NOFOLLOW)
    if not is_own(status):
        raise OSError(errno.EPERM, "another user can have written it")
    return content


def is_own(status: os.stat_result) -> bool:
    """Returns whether only this user and root can have written an open file."""
    return status.st_uid in {0, os.geteuid()} and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read(path: Path, most: int, flags: int) -> tuple[bytes, os.stat_result]:
    # The opened file is checked, because the path may lead to another one later. A pipe is opened at once.
    flags |= os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device and no regular file, so copy it to one")
        return file.read(most), status


def replace_file(path: Path, content: bytes, mode: int | None = None) -> None:
    """Replaces a file atomically: on an error, the old content stays. Creates a missing file.

    A link, pipe or device is replaced and not followed. By default, a replaced file keeps its mode. The
    folder exists. `mode` is the file's mode, less that of the umask; without it, all may read and write a new
    file.
    """
    # No other process can have made a file or link of this random name.
    fresh = path.with_name(f".flashtune-{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    number = os.open(fresh, flags, 0o666 if mode is None else mode)
    try:
        with os.fdopen(number, "wb") as file:
            if mode is None and path.is_file() and not path.is_symlink():
                os.fchmod(number, stat.S_IMODE(path.stat().st_mode))
            file.write(content)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
