"""The report of a running search. Another process writes it, so that the search does not wait."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flashtune.core.errors import FlashtuneError
from flashtune.core.machine import DATABASE_VARIABLE
from flashtune.tuner.cli.output import note

# Seconds between two reports, and between two loads of an open page.
INTERVAL = 10


@contextlib.contextmanager
def live_report(out: Path, target: str, url: str) -> Iterator[Callable[[], None]]:
    """Gives a function that renews the report of a GPU's records if it is old. At the end it is complete.

    Raises:
        FlashtuneError: The complete report cannot be written.
    """
    running: list[subprocess.Popen[bytes]] = []
    due = 0.0

    def start(*options: str) -> subprocess.Popen[bytes]:
        command = (sys.executable, "-m", "flashtune.tuner.cli", "report", "--target", target, "--out", out)
        # A URL may have a password, and other users see the arguments of a process.
        environment = os.environ | {DATABASE_VARIABLE: url}
        # Ctrl-C ends the search, and not the report.
        return subprocess.Popen(
            [*command, *options], env=environment, stderr=subprocess.PIPE, start_new_session=True
        )

    def renew() -> None:
        nonlocal due
        if time.monotonic() >= due and all(process.poll() is not None for process in running):
            running[:] = [start("--refresh", str(INTERVAL))]
            due = time.monotonic() + INTERVAL

    try:
        yield renew
    finally:
        for process in running:
            process.communicate()
        last = start()
        _, message = last.communicate()
        if last.returncode:
            raise FlashtuneError(f"the report of the search failed: {message.decode()}")
        note(f"wrote {out / 'index.html'}")
