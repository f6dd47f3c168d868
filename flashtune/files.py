"""Reading files that a user named: bounded, and never from a pipe that may have no writer."""

from __future__ import annotations

import errno
import stat
from pathlib import Path


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
