"""Repeats transactions that a server did not finish, so that its restart does not end a search."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from flashtune.core.notices import warn_once
from flashtune.db.errors import ServerUnavailableError
from flashtune.db.location import describe

Result = TypeVar("Result")

RETRY_SECONDS = 60.0
# A restart takes less, and needs no message.
QUIET_SECONDS = 3.0
FIRST_PAUSE = 0.05
MAX_PAUSE = 1.0


class Retries:
    """Repeats the transactions of one database while its server is unavailable."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stopped = threading.Event()
        self._latest: ServerUnavailableError | None = None

    def stop(self) -> None:
        """Ends the waits of all threads. Later transactions are tried once."""
        self._stopped.set()

    def run(self, transaction: Callable[[], Result]) -> Result:
        """Returns the result of a transaction, repeated for at most `RETRY_SECONDS`.

        The server may have stored a transaction before the connection ended. It is repeated all the same.

        Raises:
            ServerUnavailableError: The server stayed unavailable, or `stop` or Ctrl-C ended a wait.
        """
        if self._stopped.is_set() and self._latest is not None:
            raise self._latest
        start, pause = time.monotonic(), FIRST_PAUSE
        try:
            while True:
                try:
                    result = transaction()
                    self._latest = None
                    return result
                except ServerUnavailableError as error:
                    # Without the traceback, which would keep the transaction's objects alive.
                    self._latest = ServerUnavailableError(*error.args)
                    seconds = time.monotonic() - start
                    if seconds + pause > RETRY_SECONDS:
                        raise
                if seconds > QUIET_SECONDS:
                    # With the time, because Python shows equal warnings once.
                    fault = f"{time.strftime('%X')}: the database {describe(self._url)} is not available"
                    warn_once(f"server {start}", f"{fault}; trying again for {RETRY_SECONDS:.0f} s")
                if self._stopped.wait(pause):
                    raise self._latest
                pause = min(2 * pause, MAX_PAUSE)
        except KeyboardInterrupt:
            # The program may still store its results before it ends. It must not wait again.
            self.stop()
            raise
