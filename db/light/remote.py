"""Sends the queries of end users' programs to a database server, through SQLAlchemy.

A reader waits for one second in total. A server that fails is not asked again in this process.
"""

import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import text

from flashtune.core.errors import StoreError
from flashtune.db.creation import has_tables
from flashtune.db.engine import make_engine, reading
from flashtune.db.server import Result, within

Rows = list[tuple[Any, ...]]
Values = dict[str, str | int]
# Arguments: a SELECT statement, its values, and whether it reads all of the database.
Query = Callable[[str, Values, bool], Rows]

SECONDS = 1.0

# The errors of servers that failed, by URL.
_failed: dict[str, StoreError] = {}


class Server:
    """A server with a limit of time for all its answers."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._seconds = SECONDS

    def ask(self, run: Callable[[], Result]) -> Result:
        """Returns the result of a function that uses the server."""
        if self._url in _failed:
            raise StoreError(*_failed[self._url].args)
        start = time.monotonic()
        try:
            return within(max(self._seconds, 0.0), self._url, run)
        except StoreError as error:
            # Without the traceback, which would keep the tensors of a call alive.
            _failed[self._url] = StoreError(*error.args)
            raise
        finally:
            self._seconds -= time.monotonic() - start


def server_query(url: str) -> Query:
    """Returns a function that sends a server the reader's SQL."""
    engine = make_engine(url)
    server = Server(url)

    def query(question: str, values: Values, _: bool) -> Rows:
        def run() -> Rows:
            with reading(engine, url) as connection:
                if not has_tables(connection, url):
                    return []
                return [tuple(row) for row in connection.execute(text(question), values)]

        return server.ask(run)

    return query
