"""Locks that are free in a forked child."""

import os
import threading
from types import TracebackType
from typing import Any


class ModuleLock:
    """A reentrant lock. A forked child has a new one: a thread that is not there may hold the old one.

    The registration for forks is permanent, so only modules and objects that stay make one.
    """

    def __init__(self) -> None:
        self._acquired: list[Any] = []  # Once for each block that is entered.
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def __enter__(self) -> None:
        lock = self._lock
        lock.acquire()
        self._acquired.append(lock)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not always the present lock: the thread may have forked since.
        self._acquired.pop().release()

    def _renew(self) -> None:
        self._lock = threading.RLock()
