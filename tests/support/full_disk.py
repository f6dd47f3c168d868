"""A disk of a few kilobytes: a memory file system if possible, else a file size limit."""

import contextlib
import functools
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

SIZE = 256 << 10


@contextlib.contextmanager
def small_disk(folder: Path, left: int) -> Iterator[tuple[Path, Callable[[], None] | None]]:
    """A folder on a disk with so many bytes left.

    Mounting takes the rights of root. Without them a limit of a file's size takes its place: there a write
    fails in the same way, for want of room, but under every folder.

    Args:
        folder: Where it is to be; made here.
        left: Bytes that can still be written.

    Yields:
        The folder, and what a process must call before it uses it, if anything.
    """
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mounting, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        yield folder, functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (left, left))
        return
    try:
        space = os.statvfs(folder)
        (folder / "filling").write_bytes(bytes(space.f_bavail * space.f_frsize - left))
        yield folder, None
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
