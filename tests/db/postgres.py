"""A PostgreSQL server from the system's binaries, and fixtures for tests: `postgres` is a new database.

`postgres_server` runs once for all processes of pytest-xdist. A test that stops servers makes its own
`Server`. Without binaries or psycopg, tests that need a server are skipped.
"""

import contextlib
import functools
import itertools
import json
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from filelock import FileLock

USER = "flashtune"
# Every URL has a password, so that a test sees it wherever it is printed.
PASSWORD = "s3cret-word"
# Nothing is lost unless the machine itself fails: a killed server has written to the system's cache.
SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "max_connections": "100",
    "listen_addresses": "127.0.0.1",
    "log_min_messages": "warning",
}


@functools.cache
def binaries() -> Path | None:
    """The folder of `initdb`, `pg_ctl` and `postgres`, None if they are not installed."""
    found = shutil.which("pg_ctl")
    folders = [Path(found).resolve().parent] if found else []
    packages = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdigit()]
    folders += sorted(packages, key=lambda path: int(path.parent.name), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


def require() -> None:
    """Skips a test that needs a server where there can be none."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'flashtune[postgres]'")
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")


class Server:
    """A server with its data in a temporary folder.

    Attributes:
        port: The TCP port on 127.0.0.1.
        folder: The folder of data, the log and the Unix socket.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port

    @classmethod
    def make(cls) -> Self:
        """Creates and starts a server."""
        require()
        # pytest's own temporary folders are closed to other users.
        folder = Path(tempfile.mkdtemp(prefix="flashtune-postgres-"))
        if account := _account():
            os.chown(folder, account.pw_uid, -1)
        with socket.create_server(("127.0.0.1", 0)) as free:
            server = cls(folder, free.getsockname()[1])
        server._run("initdb", "--no-sync", "--auth=trust", "--username", USER, "-E", "UTF8", "--locale=C")
        server.start()
        return server

    def start(self) -> None:
        """Starts the server and waits until it accepts connections."""
        self._control("start", *self._options())

    def stop(self, mode: str = "immediate") -> None:
        """Stops the server; by default as a crash would."""
        self._control("stop", "--mode", mode)

    def restart(self, mode: str = "immediate") -> None:
        """Stops the server as a crash would, and starts it."""
        self._control("restart", "--mode", mode, *self._options())

    def remove(self) -> None:
        """Stops the server and deletes its data."""
        with contextlib.suppress(subprocess.CalledProcessError):  # it is stopped already
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, database: str = "postgres", user: str = USER, password: str = PASSWORD) -> str:
        """Returns the URL of a database, with a password."""
        return f"postgresql+psycopg://{user}:{password}@127.0.0.1:{self.port}/{database}"

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Executes statements with all rights, and returns the rows of one that has rows."""
        import psycopg

        address = self.url(database).replace("+psycopg", "")
        with psycopg.connect(address, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def new_database(self, name: str) -> str:
        """Creates an empty database and returns its URL."""
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def drop(self, name: str) -> None:
        """Deletes a database, also while it is used."""
        self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def kill_backends(self, database: str) -> int:
        """Ends the connections of a database, and returns their number."""
        rows = self.execute(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'"
        )
        return len(rows)

    def _options(self) -> tuple[str, ...]:
        settings = {**SETTINGS, "port": str(self.port), "unix_socket_directories": str(self.folder)}
        text = " ".join(f"-c {name}={value}" for name, value in settings.items())
        return "--log", str(self.folder / "log"), "--options", text

    def _control(self, *arguments: str) -> None:
        self._run("pg_ctl", *arguments, "--silent", "--wait", "--timeout", "60")

    def _run(self, name: str, *arguments: str) -> None:
        folder = binaries()
        assert folder is not None
        command = [str(folder / name), *arguments, "--pgdata", str(self.folder / "data")]
        account = _account()
        # The server keeps these files open, so they are not pipes.
        with (self.folder / f"{name}.out").open("ab") as out:
            subprocess.run(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                check=True,
                user=account and account.pw_uid,
                group=account and account.pw_gid,
                extra_groups=[] if account else None,
            )


def _account() -> pwd.struct_passwd | None:
    """Another account for root, as which the server refuses to run."""
    if os.getuid() != 0:
        return None
    users = {user.pw_name: user for user in pwd.getpwall()}
    return users.get("postgres") or users["nobody"]


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all processes of a test run. Tests must not stop it."""
    require()
    base = tmp_path_factory.getbasetemp()
    state = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "postgres.json"
    lock = FileLock(state.with_suffix(".lock"))
    with lock:
        if state.exists():
            folder, port, users = json.loads(state.read_text())
            server = Server(Path(folder), port)
        else:
            server, users = Server.make(), 0
        state.write_text(json.dumps([str(server.folder), server.port, users + 1]))
    yield server
    with lock:
        folder, port, users = json.loads(state.read_text())
        state.write_text(json.dumps([folder, port, users - 1]))
        if users == 1:
            state.unlink()
            server.remove()


_numbers = itertools.count()


@pytest.fixture(name="postgres")
def postgres_database(postgres_server: Server) -> Iterator[str]:
    """The URL of a new and empty database on `postgres_server`."""
    name = f"test_{os.getpid()}_{next(_numbers)}"
    yield postgres_server.new_database(name)
    postgres_server.drop(name)


@pytest.fixture
def own_postgres() -> Iterator[Server]:
    """A server that a test may stop."""
    server = Server.make()
    yield server
    server.remove()
