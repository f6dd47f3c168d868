"""File locks between processes of one host, and bounded reads of files.

The locks are compatible with those of filelock on POSIX systems. An import of filelock would take as long
as the self-check of a kernel in a first call.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

POLL_SECONDS = 0.02


@contextlib.contextmanager
def alone_with(path: Path, seconds: float) -> Iterator[None]:
    """Holds an exclusive lock on a file during a block. Creates the file if it is missing.

    Waits up to `seconds` for another holder.

    Raises:
        TimeoutError: Another holder did not release it in time.
        OSError: The file cannot be opened or locked.
    """
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        from filelock import FileLock

        with FileLock(path, timeout=seconds):  # its Timeout is a TimeoutError
            yield
        return

    file = _held(path, time.monotonic() + seconds)
    try:
        yield
    finally:
        # A forked child has the file open too, and would keep the lock.
        fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _held(path: Path, until: float) -> int:
    """Returns the open, locked file."""
    import fcntl

    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A process that releases the lock may remove the file. A lock on a removed file is useless.
                if os.fstat(file).st_nlink:
                    return file
            if time.monotonic() > until:
                raise TimeoutError(f"another process holds {path}")
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        time.sleep(POLL_SECONDS)


def read_bounded(path: Path, most: int) -> bytes:
    """Returns the first `most` bytes of a regular file.

    Raises:
        OSError: The file cannot be read, or is a pipe, socket or device, which may never end.
    """
    return _read(path, most, 0)[0]


def read_own(path: Path, most: int) -> bytes:
    """Returns the first `most` bytes of a regular file that only this user and root can have written.

    The folder does not matter: another user can move such a file, but not write its content.

    Raises:
        OSError: The file cannot be read, is a link or no regular file, or another user can have written it.
    """
    content, status = _read(path, most, os.O_NOFOLLOW)
    if status.st_uid not in {0, os.geteuid()} or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(errno.EPERM, "another user can have written it")
    return content


def _read(path: Path, most: int, flags: int) -> tuple[bytes, os.stat_result]:
    # The opened file is checked, because the path may lead to another one later. A pipe is opened at once.
    flags |= os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device and no regular file, so copy it to one")
        return file.read(most), status
