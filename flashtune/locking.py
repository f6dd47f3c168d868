"""One process of a host at a time, by a file that a process holds.

The locks are those that filelock takes on POSIX systems, so that the two keep each other out. Here they are
taken without importing filelock, which would cost a program's first call as much as the check of a kernel.
"""

from __future__ import annotations

import contextlib
import os
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

    def holds(file: int) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # Who releases a lock may remove its file: then this one keeps nobody out.
        return os.fstat(file).st_nlink > 0

    until = time.monotonic() + seconds
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while not holds(file):
            if time.monotonic() > until:
                raise TimeoutError(f"another process holds {path}")
            time.sleep(POLL_SECONDS)
            os.close(file)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        yield
    finally:
        os.close(file)
