"""Locks that are free in a forked child."""

import os
import threading
from types import TracebackType


class ModuleLock:
    """A reentrant lock. A forked child has a new one: a thread that is not there may hold the old one.

    The registration for forks is permanent, so only modules and objects that stay make one. The thread that
    holds it must not fork.
    """

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def _renew(self) -> None:
        self._lock = threading.RLock()
