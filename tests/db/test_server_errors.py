"""Tests of servers that refuse a database, a user or a statement. No error shows a password."""

import sys
import traceback
from pathlib import Path

import pytest
from sqlalchemy import text

from flashtune.core.errors import StoreError
from flashtune.db import server as connections
from flashtune.db.engine import reading, writing
from flashtune.db.errors import RowError
from flashtune.db.retries import Retries
from flashtune.db.server import server_engine
from flashtune.db.store import open_store
from tests.db.postgres import PASSWORD, Server
from tests.db.records import make_record, reader_of


def refusal(url: str) -> str:
    """The error for a database that cannot be opened."""
    with pytest.raises(StoreError) as caught:
        open_store(url)
    assert PASSWORD not in "".join(traceback.format_exception(caught.value))
    return str(caught.value)


def test_wrong_addresses_are_told_apart(postgres_server: Server, postgres: str) -> None:
    assert 'database "missing" does not exist): check the server' in refusal(postgres_server.url("missing"))
    assert 'role "nobody" does not exist' in refusal(postgres_server.url(user="nobody"))
    port = str(postgres_server.port)
    assert "Connection refused" in refusal(postgres.replace(port, "1"))
    assert 'invalid connection option "nosuch"' in refusal(f"{postgres}?nosuch={PASSWORD}")


def test_wrong_password_is_not_shown(own_postgres: Server) -> None:
    rules = own_postgres.folder / "data" / "pg_hba.conf"
    rules.write_text("host all guest all scram-sha-256\n" + rules.read_text())
    own_postgres.execute("CREATE ROLE guest LOGIN PASSWORD 'another'; SELECT pg_reload_conf()")
    own_postgres.restart()
    assert "password authentication failed" in refusal(own_postgres.url(user="guest"))
    # It is not tried again.
    with pytest.raises(StoreError, match="password authentication failed"):
        Retries("").run(lambda: open_store(own_postgres.url(user="guest")))


def test_reader_without_rights_to_write(postgres_server: Server, postgres: str) -> None:
    with open_store(postgres) as store:
        store.pin(store.add(make_record()))
    name = postgres.rpartition("/")[2]
    postgres_server.execute(f"CREATE ROLE {name} LOGIN", name)
    guest = postgres_server.url(name, user=name)
    try:
        assert "refuses its user (permission denied for table alembic_version): grant" in refusal(guest)
        postgres_server.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}", name)
        assert "refuses its user (it can only be read): grant the right" in refusal(guest)
        assert len(reader_of(guest).selections("nvidia-h200")) == 1
    finally:
        postgres_server.execute(f"DROP OWNED BY {name}; DROP ROLE {name}", name)


def test_old_servers_and_missing_drivers(
    postgres: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(connections, "MIN_VERSION", 990000)
        assert "and flashtune needs 99 or newer: upgrade it" in refusal(postgres)
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    assert "needs a driver" in refusal(postgres.replace("psycopg", "psycopg2"))


@pytest.mark.parametrize(
    "statement",
    ["INSERT INTO records (id) VALUES (1)", "SELECT 1 / 0", "SELECT repeat('x', 1 << 30)"],
)
def test_errors_of_a_row_are_no_errors_of_the_server(postgres: str, statement: str) -> None:
    with open_store(postgres) as store:
        with pytest.raises(RowError, match="refuses a row"), writing(store._engine, postgres) as connection:
            connection.execute(text(statement))
        with pytest.raises(RowError, match="NUL"), writing(store._engine, postgres) as connection:
            connection.execute(text("SELECT CAST(:value AS text)"), {"value": "\0"})


def test_kept_connections_are_made_again_after_the_server_was_away(own_postgres: Server) -> None:
    url = own_postgres.url()
    engine = server_engine(url, keep=True)
    query = text("SELECT 1")
    with reading(engine, url) as connection:
        assert connection.execute(query).scalar_one() == 1
    own_postgres.stop()
    for _ in range(3):
        with pytest.raises(StoreError, match="database"), reading(engine, url) as connection:
            connection.execute(query)
    own_postgres.start()
    with reading(engine, url) as connection:
        assert connection.execute(query).scalar_one() == 1
    engine.dispose()
