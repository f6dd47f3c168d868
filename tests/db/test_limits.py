"""A database that is damaged or hostile costs neither time nor memory, and is one sentence."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from flashtune.db.checks import Check
from flashtune.db.failures import UnreadableRecord
from flashtune.db.limits import Deadline
from flashtune.db.migrate import upgrade
from flashtune.db.reader import Reader, open_reader
from flashtune.db.remembering import remember_check
from flashtune.db.store import open_store
from flashtune.errors import StoreError
from flashtune.record import Record

MakeRecord = Callable[..., Record]
TARGET = "nvidia-h200"
# Rows without end.
ENDLESS = (
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
    "SELECT 'k' AS problem_key, 't' AS target, 0 AS record_id, 'x' AS digest, count(*) AS passed FROM n"
)


@pytest.fixture
def filled(path: Path, make_record: MakeRecord) -> Path:
    """A database with one selection."""
    with open_store(str(path)) as store:
        store.pin(store.add(make_record()))
    return path


def execute(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def reader_of(path: Path) -> Reader:
    reader = open_reader(str(path))
    assert reader is not None
    return reader


def check_of(record: Record) -> Check:
    assert record.verdict is not None
    return Check(digest="a" * 32, target=TARGET, versions=record.versions, verdict=record.verdict)


@pytest.mark.parametrize(
    "statements",
    [
        ("DROP VIEW selected_records", f"CREATE VIEW selected_records AS {ENDLESS}"),
        ("DROP TABLE stand_ins", f"CREATE VIEW stand_ins AS {ENDLESS}"),
        ("DROP VIEW known_checks", f"CREATE VIEW known_checks AS {ENDLESS}"),
    ],
)
def test_no_view_is_read(filled: Path, make_record: MakeRecord, statements: tuple[str, ...]) -> None:
    execute(filled, *statements)
    start = time.monotonic()
    reader = reader_of(filled)
    if "CREATE VIEW stand_ins" in statements[1]:
        with pytest.raises(StoreError, match="a view in place of a table"):
            reader.stand_ins(TARGET)
        with pytest.raises(StoreError, match="a view in place of a table"):
            open_store(str(filled))
        with pytest.raises(StoreError, match="a view in place of a table"):
            remember_check(check_of(make_record()), str(filled))
    else:
        assert reader.selections(TARGET) == (make_record(),)
        assert reader.check("a" * 32, TARGET, make_record().versions) is None
    assert time.monotonic() - start < 5


def test_a_trigger_is_refused_before_anything_is_written(filled: Path, make_record: MakeRecord) -> None:
    execute(filled, f"CREATE TRIGGER t AFTER INSERT ON checks BEGIN {ENDLESS}; END")
    for use in (open_store, upgrade, lambda path: remember_check(check_of(make_record()), path)):
        with pytest.raises(StoreError, match="has a trigger"):
            use(str(filled))


def test_a_computed_column_that_takes_too_long_is_stopped(
    filled: Path, make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Seconds for all rows.
    execute(
        filled,
        "DROP TABLE records",
        "CREATE TABLE records (n INTEGER, payload TEXT)",
        "INSERT INTO records (n) WITH RECURSIVE n(i) AS "
        "(SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000) SELECT i FROM n",
        "ALTER TABLE records ADD COLUMN id AS (length(hex(zeroblob(400000 + n % 2))))",
    )
    monkeypatch.setattr("flashtune.db.reader.READ_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(StoreError, match="takes too long to answer"):
        reader_of(filled).selections(TARGET)
    assert time.monotonic() - start < 60


def test_a_deadline_stops_a_statement_and_can_be_restarted() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        deadline = Deadline(connection, 0.05)
        with pytest.raises(sqlite3.OperationalError, match="interrupted"):
            connection.execute(ENDLESS)
        with pytest.raises(sqlite3.OperationalError, match="interrupted"):
            connection.execute(
                "SELECT count(*) FROM (WITH RECURSIVE n(i) AS "
                "(SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000) SELECT i FROM n)"
            )
        deadline.restart()
        assert connection.execute("SELECT 1").fetchone() == (1,)


MEASURE = """
import resource, sys, warnings
from flashtune.db.reader import open_reader
from flashtune.db.store import open_store
from flashtune.errors import StoreError
warnings.simplefilter("ignore")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
reader = open_reader(sys.argv[1])
found = []
for use in (lambda: reader.selections("nvidia-h200"), lambda: open_store(sys.argv[1]).selections()):
    try:
        found.append(len(use()))
    except StoreError as error:
        found.append(str(error).partition(":")[0].rpartition(" holds ")[2])
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert grown < 60_000, grown
print(*found, sep=";")
"""


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("zeroblob(100000000)", "0;0"),
        ("CAST(zeroblob(100000000) AS TEXT)", "a value that is too large"),
        ("CAST(zeroblob(300000) AS TEXT)", "0;0"),
    ],
    ids=["blob", "text", "small"],
)
def test_a_payload_of_a_hundred_megabytes_is_not_read(filled: Path, value: str, found: str) -> None:
    execute(filled, f"UPDATE records SET payload = {value}")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(filled)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.strip().split(";")) == set(found.split(";"))


def test_a_large_payload_is_skipped_with_a_warning(filled: Path) -> None:
    execute(filled, "UPDATE records SET payload = zeroblob(2000000)")
    with pytest.warns(UnreadableRecord, match="was skipped"):
        assert reader_of(filled).selections(TARGET) == ()
    with open_store(str(filled)) as store, pytest.warns(UnreadableRecord, match="were skipped"):
        assert store.selections() == []


def test_a_schema_that_is_not_utf8_is_a_damaged_database(filled: Path, make_record: MakeRecord) -> None:
    execute(filled, "PRAGMA journal_mode = DELETE")
    raw = filled.read_bytes()
    damaged = raw.replace(b"CREATE TABLE records", b"CREATE T\xffBLE records")
    assert damaged != raw
    filled.write_bytes(damaged)
    with pytest.raises(StoreError, match="damaged"):
        reader_of(filled).selections(TARGET)
    for use in (open_store, upgrade, lambda path: remember_check(check_of(make_record()), path)):
        with pytest.raises(StoreError, match="damaged"):
            use(str(filled))
    with (
        open_store(str(filled.with_name("ours.sqlite"))) as store,
        pytest.raises(StoreError, match="damaged"),
    ):
        store.merge_from(str(filled))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_named_pipe_is_no_database(path: Path, make_record: MakeRecord) -> None:
    os.mkfifo(path)
    for use in (
        lambda: reader_of(path).selections(TARGET),
        lambda: open_store(str(path)),
        lambda: remember_check(check_of(make_record()), str(path)),
    ):
        with pytest.raises(StoreError, match="is not a file"):
            use()
