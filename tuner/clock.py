"""What tells a search the time and lets it wait: the wall, or in a replay a simulation."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

# How long to wait for something to finish before the observer hears that time passes, in seconds.
HEARTBEAT = 0.25


class Clock(Protocol):
    """Tells the time and waits for futures."""

    def now(self) -> float:
        """Seconds since some moment in the past."""
        ...

    def wait_for_any(self, pending: Collection[Future[Any]]) -> None:
        """Returns when one of these is done, or some time has passed."""
        ...

    def wait_for_all(self, pending: Collection[Future[Any]]) -> None:
        """Returns when all of these are done."""
        ...


class WallClock:
    """The clock of a search on real equipment."""

    def now(self) -> float:
        """Seconds of the machine's own clock, which never goes back."""
        return time.monotonic()

    def wait_for_any(self, pending: Collection[Future[Any]]) -> None:
        """Returns when one of these is done, at the latest after a heartbeat."""
        wait(pending, timeout=HEARTBEAT, return_when=FIRST_COMPLETED)

    def wait_for_all(self, pending: Collection[Future[Any]]) -> None:
        """Returns when all of these are done."""
        wait(pending, return_when=ALL_COMPLETED)
