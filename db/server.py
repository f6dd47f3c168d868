"""Connections to a PostgreSQL server. Each step has a time limit, so that no server blocks a program."""

import os
import queue
import re
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, Dialect, Engine, NullPool, create_engine, event, exc, make_url, text
from sqlalchemy.engine.interfaces import DBAPIConnection, ExceptionContext
from sqlalchemy.pool import ConnectionPoolEntry

from flashtune.core.errors import StoreError
from flashtune.db.errors import ELSEWHERE, RowError, ServerUnavailableError
from flashtune.db.limits import SCANNED_BYTES_PER_SECOND, STATEMENT_SECONDS
from flashtune.db.location import describe, without_secrets

Result = TypeVar("Result")

CONNECT_SECONDS = 3.0
KEPT_SECONDS = 60
# Executions of a statement before the server keeps its plan.
PREPARED_AFTER = 5
LOCK_SECONDS = 3.0
# A server reports its own limit first. A server that is stopped reports nothing.
GRACE_SECONDS = 0.5
# The drivers that use PostgreSQL's own library.
DRIVERS = ("psycopg", "psycopg2")
WATCH = "flashtune_watch"
# PostgreSQL 13. Its makers fix no older version.
MIN_VERSION = 130000
# Codes of statements that a user may not execute, and of writes to a server that can only be read.
FORBIDDEN = ("42501", "25006")
# Whether a user may write.
WRITABLE = text("""
SELECT has_table_privilege('records', 'INSERT') AND has_table_privilege('selections', 'UPDATE')
    AND current_setting('transaction_read_only') = 'off'
""")
# Codes of PostgreSQL: lost connections, shutdowns, too many connections, limits of locks, deadlocks. The same
# transaction may succeed later.
PASSING = re.compile("08...|57P0[123]|53300|55P03|40P01|40001")
# Codes of values that violate types or constraints, or exceed limits of the server. 22023 is of a setting.
OF_A_ROW = re.compile("(?!22023)2[123]...|54...")
# A refused connection has no code, and its text may have any language.
LASTING = re.compile("authentication|does not exist|permission denied|not permitted|pg_hba|SSL|certificate")
# Limits of one transaction, which poolers of connections pass on. A large database takes longer to scan.
LIMITS = text("""
SELECT ms, pg_backend_pid(), set_config('lock_timeout', :lock, true),
    set_config('statement_timeout', ms::text, true)
FROM (SELECT :least + pg_database_size(current_database()) / :bytes AS ms) AS time
""").bindparams(
    lock=f"{LOCK_SECONDS:g}s", least=int(1000 * STATEMENT_SECONDS), bytes=int(SCANNED_BYTES_PER_SECOND / 1000)
)


def server_engine(url: str, *, keep: bool = False) -> Engine:
    """Returns an engine for a server's URL, without connecting.

    A connection is made for each transaction: a kept one may be closed by the server, or by a fork. With
    `keep`, it is kept for a minute, because a new one costs a server more than a transaction.
    """
    where = describe(url)
    address = make_url(url)
    if address.get_backend_name() != "postgresql":
        raise StoreError(f"records are kept in SQLite or PostgreSQL, and {where} is neither: {ELSEWHERE}")
    if "+" not in address.drivername:
        address = address.set(drivername="postgresql+psycopg")
    if address.get_driver_name() not in DRIVERS:
        raise StoreError(
            f"{where} has another driver than psycopg: write postgresql+psycopg://, or {ELSEWHERE}"
        )
    try:
        pool: dict[str, Any] = (
            {"pool_recycle": KEPT_SECONDS, "max_overflow": -1} if keep else {"poolclass": NullPool}
        )
        engine = create_engine(address, **pool)
    except ImportError as error:
        raise StoreError(f"{where} needs a driver ({error}): install psycopg, or {ELSEWHERE}") from error

    def connect(
        dialect: Dialect, entry: ConnectionPoolEntry, arguments: list[Any], options: dict[str, Any]
    ) -> DBAPIConnection:
        # The limit below names the cause.
        options["connect_timeout"] = int(CONNECT_SECONDS) + 1
        if keep and dialect.driver == "psycopg":
            options["prepare_threshold"] = None  # Until `_on_begin` knows whether there is a pooler.
        try:
            connection = within(CONNECT_SECONDS, url, lambda: dialect.connect(*arguments, **options))
        except (ValueError, TypeError, OSError) as error:  # options or a host that the driver cannot use
            raise server_error(error, url) from None
        _require_version(connection, url)
        entry.info[WATCH] = watch = Watch(connection)
        watch.start()
        return connection

    event.listen(engine, "do_connect", connect)
    event.listen(engine, "begin", _on_begin)
    for name in ("before_cursor_execute", "commit", "rollback"):
        event.listen(engine, name, _start)
    event.listen(engine, "after_cursor_execute", _stop)
    for name in ("close", "checkin"):
        event.listen(engine, name, _end)
    event.listen(engine, "handle_error", lambda context: _on_error(context, url))
    return engine


class Watch:
    """Closes the socket of a connection whose server does not answer: the driver then raises an error."""

    def __init__(self, connection: Any) -> None:
        self._socket = connection.fileno()
        self._timer: threading.Timer | None = None
        self.seconds = STATEMENT_SECONDS
        self.is_over = False
        self.has_limit = False  # Whether `seconds` depends on the size of the database already.

    def start(self) -> None:
        """Gives the next step its full time."""
        self.stop()
        self._timer = threading.Timer(self.seconds + GRACE_SECONDS, self._cut)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """Ends the present step."""
        if self._timer is not None:
            self._timer.cancel()

    def _cut(self) -> None:
        self.is_over = True
        with socket.socket(fileno=os.dup(self._socket)) as connected:
            connected.shutdown(socket.SHUT_RDWR)


def _require_version(connection: Any, url: str) -> None:
    version = connection.info.server_version
    if version < MIN_VERSION:
        connection.close()
        raise StoreError(
            f"the server of {describe(url)} is PostgreSQL {version // 10000}, and flashtune needs "
            f"{MIN_VERSION // 10000} or newer: upgrade it, or {ELSEWHERE}"
        )


def _start(connection: Connection, *_: Any) -> None:
    # A lost connection is rolled back without the server.
    if not connection.invalidated:
        connection.info[WATCH].start()


def _stop(connection: Connection, *_: Any) -> None:
    connection.info[WATCH].stop()


def _end(_: DBAPIConnection | None, entry: ConnectionPoolEntry) -> None:
    """Ends the watch of a returned connection. A connection that could not be made again has none."""
    watch: Watch | None = entry.info.get(WATCH)
    if watch is not None:
        watch.stop()


def _on_begin(connection: Connection) -> None:
    watch = connection.info[WATCH]
    # Later transactions of a kept connection have only the limit of the watch, which costs a server nothing.
    if not watch.has_limit:
        ms, process, *_ = connection.execute(LIMITS).one()
        watch.seconds, watch.has_limit = ms / 1000, True
        driver: Any = connection.connection.driver_connection
        # The number differs behind a pooler, which may not pass prepared statements on.
        if getattr(driver, "prepare_threshold", 0) is None and process == driver.info.backend_pid:
            driver.prepare_threshold = PREPARED_AFTER


def _on_error(context: ExceptionContext, url: str) -> None:
    error: BaseException | None = context.original_exception
    while error is not None:
        # psycopg raises another error if it cannot cancel a statement after Ctrl-C.
        if isinstance(error, KeyboardInterrupt):
            raise error
        error = error.__context__
    connection = context.connection
    if connection is not None and connection.info[WATCH].is_over:
        raise silent(url)


def within(seconds: float, url: str, run: Callable[[], Result]) -> Result:
    """Returns the result of a function, which runs in a thread of its own."""
    answers: queue.SimpleQueue[tuple[Result | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put((run(), None))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            answers.put((None, error))

    threading.Thread(target=work, name="flashtune-server", daemon=True).start()
    try:
        result, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise silent(url) from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value] # the function's, as there is no error


def silent(url: str) -> StoreError:
    """Returns the error for a server that does not answer in time."""
    return ServerUnavailableError(
        f"the database {describe(url)} does not answer: check the server, or {ELSEWHERE}"
    )


def server_error(error: BaseException, url: str) -> StoreError:
    """Returns the error to raise for an error of a server or its driver, without passwords."""
    cause = error.orig or error if isinstance(error, exc.DBAPIError) else error
    reason = without_secrets(str(cause).strip().partition("\n")[0], url)
    if _code(cause) in FORBIDDEN:
        return forbidden(url, reason)
    # The driver refuses some values itself, without a code.
    if OF_A_ROW.fullmatch(_code(cause)) or (isinstance(error, exc.DataError) and not _code(cause)):
        return row_error(reason, url)
    kind = ServerUnavailableError if _is_passing(error) else StoreError
    return kind(f"the database {describe(url)} cannot be used ({reason}): check the server, or {ELSEWHERE}")


def row_error(reason: str, url: str) -> RowError:
    """Returns the error for values that cannot be stored."""
    return RowError(f"the database {describe(url)} refuses a row ({reason}): report it")


def forbidden(url: str, reason: str) -> StoreError:
    """Returns the error for a user without rights."""
    return StoreError(
        f"the database {describe(url)} refuses its user ({reason}): grant the right there, or {ELSEWHERE}"
    )


def _code(error: BaseException | None) -> str:
    """Returns PostgreSQL's code of a driver's error, empty without one."""
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or ""


def _is_passing(error: BaseException) -> bool:
    """Returns whether the same transaction may succeed later."""
    if isinstance(error, exc.DBAPIError) and error.connection_invalidated:
        return True
    if not isinstance(error, exc.OperationalError):
        return False
    code = _code(error.orig)
    return PASSING.fullmatch(code) is not None if code else LASTING.search(str(error.orig)) is None
