"""Tests of the limits on the time that a damaged database can take."""

import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from flashtune.core.errors import StoreError
from flashtune.db.light.self_checks import remember_check
from flashtune.db.limits import Deadline, restrict, statement_seconds
from flashtune.db.store import open_store
from tests.db.files.hostile import CHECK, TARGET, execute, merge_into, refused, repeat_rows
from tests.db.records import make_record, reader_of

# Rows without end.
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sqlite_autoindex_selections_1", "records"])
def test_endless_rows_are_stopped_by_the_statement_limit(
    filled: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("limits.STATEMENT_SECONDS", "light.reader.READ_SECONDS"):
        monkeypatch.setattr(f"flashtune.db.{limit}", 0.5)
    repeat_rows(filled, name)
    ours = filled.with_name("ours.sqlite")
    with open_store(str(ours)):
        pass
    uses: dict[str, Callable[[], object]] = {
        "sqlite_autoindex_selections_1": lambda: reader_of(filled).selections(TARGET),
        "records": lambda: merge_into(ours, filled),
    }
    start = time.process_time()
    with pytest.raises(StoreError, match="takes too long to answer"):
        uses[name]()
    assert time.process_time() - start < 1.5


@pytest.mark.slow
def test_merge_may_exceed_the_statement_limit(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 0.2
    monkeypatch.setattr("flashtune.db.limits.STATEMENT_SECONDS", seconds)
    with open_store(str(filled)) as store:
        for i in range(1, 1000):
            store.add(make_record(ms=1 + i / 4096))
    start = time.monotonic()
    assert merge_into(filled.with_name("ours.sqlite"), filled).records_added == 1000
    assert time.monotonic() - start > seconds


def test_statement_limit_grows_with_database_size(path: Path) -> None:
    path.write_bytes(bytes(range(1, 256)) * 160_000)
    assert statement_seconds(path) == pytest.approx(6, abs=0.1)
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a file of holes
    assert statement_seconds(path) == pytest.approx(4, abs=0.1)


def test_runtime_has_a_constant_limit_and_listing_one_that_grows(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def limited(connection: sqlite3.Connection, seconds: float) -> Deadline:
        limits.append(seconds)
        return restrict(connection, seconds)

    monkeypatch.setattr("flashtune.db.light.reader.restrict", limited)
    monkeypatch.setattr("flashtune.db.light.reader.statement_seconds", lambda path: 77.0)
    reader = reader_of(filled)
    assert reader.selections(TARGET)
    # One connection, so that selections and fallbacks are of one state of the file.
    assert reader.stored()
    assert limits == [4.0, 77.0]


def test_a_deadline_stops_a_statement_and_can_be_restarted() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        deadline = Deadline(connection, 0.05)
        for statement in (ENDLESS, ENDLESS.replace("FROM n)", "FROM n WHERE i < 100000)")):
            with pytest.raises(sqlite3.OperationalError, match="interrupted"):
                connection.execute(statement)
        deadline.restart()
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_schema_that_is_not_utf8_is_reported_as_damage(filled: Path) -> None:
    execute(filled, "PRAGMA journal_mode = DELETE")
    raw = filled.read_bytes()
    damaged = raw.replace(b"CREATE TABLE records", b"CREATE T\xffBLE records")
    assert damaged != raw
    filled.write_bytes(damaged)
    refused(filled, "damaged")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_named_pipe_is_refused(path: Path) -> None:
    os.mkfifo(path)
    for use in (
        lambda: reader_of(path).selections(TARGET),
        lambda: open_store(str(path)),
        lambda: remember_check(CHECK, str(path)),
    ):
        with pytest.raises(StoreError, match="is not a file"):
            use()
