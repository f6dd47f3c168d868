"""The databases of the store's contract tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flashtune.db.store import Store, open_store
from tests.db.records import make_record


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


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, path: Path) -> Iterator[Store]:
    """An empty store of each engine."""
    url = str(path) if request.param == "sqlite" else request.getfixturevalue("postgres")
    with open_store(url) as opened:
        yield opened
