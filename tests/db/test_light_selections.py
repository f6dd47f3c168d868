"""Tests of reading the selections of a file without SQLAlchemy."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from flashtune.core.errors import StoreError
from flashtune.core.problem import Problem
from flashtune.core.record import Record
from flashtune.db.errors import UnreadableRecord
from flashtune.db.light.selections import chosen_in_file
from flashtune.db.location import database_url
from flashtune.db.store import open_store
from flashtune.db.stored_rows import StoredRecord
from tests.db.files.hostile import execute

MakeRecord = Callable[..., Record]
MakeProblem = Callable[..., Problem]


@pytest.fixture(name="file")
def file_of_selections(path: Path, make_record: MakeRecord, make_problem: MakeProblem) -> Path:
    """A database with three selections, and a fallback of one of them."""
    longer = make_problem(seqlen_q=1024)
    with open_store(str(path)) as store:
        for record in (make_record(problem=longer), make_record(target="nvidia-a100"), make_record()):
            store.pin(store.add(record))
    execute(path, "INSERT INTO fallbacks SELECT * FROM selections WHERE record_id = 1")
    return path


def read(path: Path) -> tuple[StoredRecord, ...] | None:
    return chosen_in_file(path, database_url(str(path)))


def by_store(path: Path) -> tuple[StoredRecord, ...]:
    with open_store(str(path)) as store:
        return (*store.selections(), *store.fallbacks())


def test_reader_returns_the_selections_of_the_store_in_order(file: Path) -> None:
    assert read(file) == by_store(file)
    assert [stored.id for stored in by_store(file)] == [2, 1, 3, 1]


@pytest.mark.parametrize("column", ["payload", "created_at"])
def test_damaged_rows_cause_the_same_warnings_as_in_the_store(file: Path, column: str) -> None:
    execute(file, f"UPDATE records SET {column} = CAST(x'ff' AS TEXT) WHERE id = 3")
    told = []
    for way in (read, by_store):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UnreadableRecord)
            found = way(file)
        told.append((found, [str(one.message) for one in caught]))
    assert told[0] == told[1]


def test_oversize_value_is_read_by_the_store(file: Path) -> None:
    execute(file, "UPDATE records SET payload = CAST(zeroblob(2000000) AS TEXT) WHERE id = 3")
    assert read(file) is None


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE alembic_version SET version_num = '0003'", "older schema: run `flashtune db upgrade --db "),
        ("UPDATE alembic_version SET version_num = '9999'", "has schema '9999', .*: upgrade flashtune, or "),
        ("DROP TABLE alembic_version", "contains other tables and is not a flashtune database"),
        ("CREATE TRIGGER t AFTER INSERT ON records BEGIN SELECT 1; END", "has a trigger"),
    ],
)
def test_other_schema_versions_are_refused(file: Path, statement: str, message: str) -> None:
    execute(file, statement)
    with pytest.raises(StoreError, match=message):
        read(file)


def test_database_in_creation_has_no_selections(path: Path) -> None:
    path.touch()
    assert read(path) == ()


def test_file_that_is_not_a_database_is_refused(path: Path) -> None:
    path.write_bytes(b"no database, and long enough to be read as one" * 100)
    with pytest.raises(StoreError, match="is no SQLite database or is damaged"):
        read(path)


def test_reading_imports_no_sqlalchemy(file: Path) -> None:
    code = (
        "import sys\n"
        "from flashtune.tuner.tables.lookup import database_selections\n"
        f"assert len(database_selections({str(file)!r})) == 4\n"
        "print('sqlalchemy' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
