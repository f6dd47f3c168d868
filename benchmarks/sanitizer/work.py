"""One process under a sanitizer: launches compiled kernels, and stores the result of each.

Processes share a folder. A process claims a kernel by creating a file. If a process dies, its last claim
shows which kernel it was running.
"""

from __future__ import annotations

import faulthandler
import pickle
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.sanitizer.sanitizing import Subject
from flashtune.core.errors import KernelError

# A launch of a small problem takes a moment even under a tool.
KERNEL_SECONDS = 60.0
WAIT_SECONDS = 0.1
# Whoever finds no kernel for so long ends, and tells what it found.
IDLE_SECONDS = 5.0
LOST = 3


class Note(NamedTuple):
    """The outcome of one kernel in a process; empty while it runs."""

    digest: str
    ended: bool = False
    failed: str = ""


class WorkQueue(NamedTuple):
    """The folder that the processes of an examination share.

    Attributes:
        folder: The folder.
    """

    folder: Path

    def open(self, listed: Mapping[str, Subject]) -> None:
        """Lays out all kernels by their digests, none of them to be taken yet."""
        for name in ("ready", "taken", "notes"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "kernels").write_bytes(pickle.dumps(dict(listed)))

    def listed(self) -> dict[str, Subject]:
        """All kernels by their digests, in order."""
        # Written by the process that started this one, a moment ago.
        kernels: dict[str, Subject] = pickle.loads((self.folder / "kernels").read_bytes())  # noqa: S301
        return kernels

    def offer(self, digest: str) -> None:
        """A kernel may be taken, for the first time or again."""
        (self.folder / "taken" / digest).unlink(missing_ok=True)
        (self.folder / "ready" / digest).touch()

    def offered(self) -> set[str]:
        """The kernels that no worker has taken."""
        taken = {path.name for path in (self.folder / "taken").iterdir()}
        return {path.name for path in (self.folder / "ready").iterdir()} - taken

    def close(self) -> None:
        """Nothing may be taken any more."""
        (self.folder / "closed").touch()

    @property
    def is_closed(self) -> bool:
        """Whether nothing may be taken any more."""
        return (self.folder / "closed").exists()

    def take(self, digest: str) -> bool:
        """Whether a kernel is this process's from now on."""
        try:
            (self.folder / "taken" / digest).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def write(self, worker: str, note: Note) -> None:
        """Adds to a process's notes."""
        words = " ".join(note.failed.split())
        with (self.folder / "notes" / worker).open("a", encoding="utf-8") as file:
            file.write(f"{note.digest} {'ended' if note.ended else 'begun'} {words}\n")

    def read(self, worker: str) -> dict[str, Note]:
        """The last note of each kernel that a process took."""
        path = self.folder / "notes" / worker
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        split = (line.split(" ", 2) for line in lines)
        return {digest: Note(digest, state == "ended", words) for digest, state, words in split}


def work(desk: WorkQueue, worker: str, until: float, launch: Callable[[Subject], None]) -> int:
    """Runs queued kernels in the order of the list, and returns an exit code.

    Args:
        desk: The queue.
        worker: The number of this worker.
        until: Time after which no kernel starts, by `time.time`.
        launch: Runs a kernel on all of its cases.
    """
    known = desk.listed()
    idle_since = time.time()
    while time.time() < until and not desk.is_closed:
        offered = desk.offered()
        mine = next((digest for digest in known if digest in offered and desk.take(digest)), None)
        if mine is None:
            if time.time() - idle_since > IDLE_SECONDS:
                break
            time.sleep(WAIT_SECONDS)
            continue
        desk.write(worker, Note(mine))
        # Not even a hang of the driver keeps it from ending the process.
        faulthandler.dump_traceback_later(KERNEL_SECONDS, exit=True)
        failed = _failure(known[mine], launch)
        faulthandler.cancel_dump_traceback_later()
        desk.write(worker, Note(mine, ended=True, failed=failed))
        if failed:
            # What follows a failure on a device fails too.
            return LOST
        idle_since = time.time()
    return 0


def _failure(subject: Subject, launch: Callable[[Subject], None]) -> str:
    try:
        launch(subject)
    except (KernelError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
