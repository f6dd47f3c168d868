"""The databases of the store's contract tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashtune.db.store import Store, open_store
from tests.db.records import make_record

# A server for the contract tests, such as postgresql+psycopg://user@host/name; emptied by them.
SERVER_VARIABLE = "FLASHTUNE_TEST_SERVER"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a new database."""
    return tmp_path / "records.sqlite"


@pytest.fixture
def filled(path: Path) -> Path:
    """A database with one selection."""
    with open_store(str(path)) as store:
        store.pin(store.add(make_record()))
    return path


@pytest.fixture(params=["sqlite", *(["server"] if SERVER_VARIABLE in os.environ else [])])
def store(request: pytest.FixtureRequest, path: Path) -> Iterator[Store]:
    """An empty store of each available engine."""
    url = str(path)
    if request.param == "server":
        url = os.environ[SERVER_VARIABLE]
        _empty(url)
    with open_store(url) as opened:
        yield opened


def _empty(url: str) -> None:
    from sqlalchemy import create_engine, text

    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
