"""File locks between processes of one host, and bounded reading of files that a user named.

The locks are those of filelock on POSIX systems, so that both exclude each other. Importing filelock would
take as much of a program's first call as the check of a kernel.
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
    """Holds a file, which is made where there is none, for the length of a block.

    Args:
        path: The file; its folder exists.
        seconds: How long another holder is waited for.

    Raises:
        TimeoutError: Another one held it for so long.
        OSError: It cannot be opened or held.
    """
    try:
        import fcntl
    except ImportError:  # no POSIX system
        from filelock import FileLock

        with FileLock(path, timeout=seconds):  # its Timeout is a TimeoutError
            yield
        return

    file = _held(path, time.monotonic() + seconds)
    try:
        yield
    finally:
        # A process that was forked meanwhile has the file open as well, and would go on holding it.
        fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _held(path: Path, until: float) -> int:
    """The open file, once no other process holds it."""
    import fcntl

    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Who releases a lock may remove its file: then this one keeps nobody out.
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
    """The first `most` bytes of a regular file.

    Raises:
        OSError: It cannot be read, or is a pipe, a socket or a device, which might never end.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "it is a pipe or a device and no regular file, so copy it to one")
    with path.open("rb") as file:
        return file.read(most)
