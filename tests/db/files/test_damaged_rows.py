"""Tests of damaged rows, which are skipped, and of the limits on the time that they can take."""

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from flashtune.core.errors import StoreError
from flashtune.db.errors import UnreadableRecord
from flashtune.db.forgetting import Forgettable
from flashtune.db.light.self_checks import remember_check
from flashtune.db.limits import Deadline, restrict, statement_seconds
from flashtune.db.store import open_store
from tests.db.files.hostile import CHECK, TARGET, execute, merge_into, refused, repeat_rows
from tests.db.records import make_problem, make_record, passed_check, reader_of

NOT_UTF8 = "CAST(x'ff' AS TEXT)"


@pytest.fixture
def damaged(filled: Path) -> Path:
    """A database with the selections 1, to be damaged, and 2, and a self-check."""
    with open_store(str(filled)) as store:
        store.pin(store.add(make_record(problem=make_problem(seqlen_kv=1024))))
    remember_check(CHECK, str(filled))
    execute(filled, "INSERT INTO fallbacks SELECT * FROM selections")
    return filled


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ("CAST(replace(CAST(payload AS BLOB), 'NVIDIA H200', x'ff') AS TEXT)", "invalid "),
        ("CAST(zeroblob(300000) AS TEXT)", "too large for a record|invalid "),
        ("zeroblob(300000)", "holds bytes where|invalid "),
        ("7", "invalid "),
        ("'{}'", "invalid "),
        ("'null'", "invalid "),
        ("'__import__(''os'').abort()'", "invalid "),
        ("""'{"family": "of_a_later_flashtune"}'""", "invalid "),
    ],
)
def test_damaged_payload_skips_its_row(damaged: Path, payload: str, reason: str) -> None:
    lost, whole = make_record(), make_record(problem=make_problem(seqlen_kv=1024))
    execute(
        damaged,
        f"UPDATE records SET payload = {payload} WHERE id = 1",
        f"UPDATE checks SET payload = {payload}",
    )
    reader = reader_of(damaged)
    with open_store(str(damaged)) as store:
        for rows, read in (
            (1, lambda: reader.selections(TARGET)),
            # A selection and a fallback.
            (2, lambda: [row.record for row in reader.stored()[:1]]),
            (1, lambda: [row.record for row in store.selections()]),
            (1, lambda: [row.record for row in store.records()]),
        ):
            with pytest.warns(UnreadableRecord, match=f"{rows} rows of {damaged} were skipped: .*({reason})"):
                assert list(read()) == [whole]
    with pytest.warns(UnreadableRecord, match=reason):
        assert reader.selection(lost.problem.key, TARGET) is None
    assert reader.selection(whole.problem.key, TARGET) == whole
    with pytest.warns(UnreadableRecord, match="a self-check of .* was skipped: invalid "):
        assert passed_check(reader, CHECK.digest, TARGET, CHECK.versions) is None
    with pytest.warns(UnreadableRecord, match=reason):
        counts = merge_into(damaged.with_name("ours.sqlite"), damaged)
    assert (counts.records_added, counts.selections_added, counts.checks_added) == (1, 1, 0)


@pytest.mark.parametrize("key", ["problem_key", "target"])
def test_damaged_key_skips_its_row(damaged: Path, key: str) -> None:
    whole = make_record(problem=make_problem(seqlen_kv=1024))
    reasons = "1 rows of .* were skipped: .*stored under another problem or target"
    for table in ("selections", "fallbacks"):
        execute(damaged, f"UPDATE {table} SET {key} = {NOT_UTF8} WHERE record_id = 1")
    with open_store(str(damaged)) as store:
        for read in (store.selections, store.fallbacks):
            with pytest.warns(UnreadableRecord, match=reasons):
                assert [stored.record for stored in read()] == [whole]
    with pytest.warns(UnreadableRecord, match=reasons):
        counts = merge_into(damaged.with_name("ours.sqlite"), damaged)
    assert (counts.records_added, counts.selections_added) == (2, 1)


def test_other_columns_that_are_not_utf8_are_merged(damaged: Path) -> None:
    execute(
        damaged,
        f"UPDATE records SET created_at = {NOT_UTF8}, family = {NOT_UTF8} WHERE id = 1",
        f"UPDATE selections SET pinned_at = {NOT_UTF8}",
        f"UPDATE checks SET created_at = {NOT_UTF8}, digest = {NOT_UTF8}",
    )
    with open_store(str(damaged)) as store:
        groups, _ = store.preview(Forgettable())
    assert [group.records for group in groups] == [1, 1]
    ours = damaged.with_name("ours.sqlite")
    counts = merge_into(ours, damaged)
    assert (counts.records_added, counts.selections_added, counts.checks_added) == (2, 2, 1)
    assert passed_check(reader_of(ours), CHECK.digest, TARGET, CHECK.versions) is True


READ = """
import resource, sys
from flashtune.core.errors import StoreError
from flashtune.db.light.reader import open_reader
from flashtune.db.store import open_store
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
reader = open_reader(sys.argv[1])
with open_store(sys.argv[2]) as ours, open_store(sys.argv[1]) as store:
    for use in (
        lambda: reader.selections("nvidia-h200"), store.selections, store.records,
        lambda: ours.merge_from(sys.argv[1]),
    ):
        try:
            use()
            sys.exit("a value was read")
        except StoreError as error:
            assert "holds a value that is too large: move it away" in str(error), error
    assert ours.records() == []
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000
"""


@pytest.mark.slow
@pytest.mark.parametrize("value", ["zeroblob(100000000)", "CAST(zeroblob(2000000) AS TEXT)"])
def test_value_that_is_too_large_is_an_error_and_not_loaded(filled: Path, value: str) -> None:
    execute(filled, f"UPDATE records SET payload = {value}")
    command = [sys.executable, "-c", READ, str(filled), str(filled.with_name("ours.sqlite"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr


def test_value_that_is_too_large_is_skipped_without_a_limit_of_the_database(
    damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_limit(connection: sqlite3.Connection, seconds: float) -> Deadline:
        # As a server, which has none.
        deadline = restrict(connection, seconds)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1 << 30)
        return deadline

    for module in ("light.reader", "engine"):
        monkeypatch.setattr(f"flashtune.db.{module}.restrict", without_limit)
    whole = make_record(problem=make_problem(seqlen_kv=1024))
    value = "hex(zeroblob(1000000))"
    execute(
        damaged, f"UPDATE records SET payload = {value} WHERE id = 1", f"UPDATE checks SET payload = {value}"
    )
    reader = reader_of(damaged)
    reason = "a row has a value of more than 1048576 bytes"
    with open_store(str(damaged)) as store:
        for read in (reader.stored, store.selections, store.fallbacks, store.records):
            with pytest.warns(UnreadableRecord, match=reason):
                assert read()[0].record == whole
    with pytest.warns(UnreadableRecord, match=f"a self-check of .* was skipped: {reason}"):
        assert passed_check(reader, CHECK.digest, TARGET, CHECK.versions) is None
    with pytest.warns(UnreadableRecord, match=reason) as caught:
        counts = merge_into(damaged.with_name("ours.sqlite"), damaged)
    assert (counts.records_added, counts.selections_added, counts.checks_added) == (1, 1, 0)
    assert [reason in str(warning.message) for warning in caught] == [True] * 4


@pytest.mark.parametrize("table", ["records", "selections"])
def test_key_that_is_too_large_is_an_error(damaged: Path, table: str) -> None:
    execute(damaged, f"UPDATE {table} SET target = CAST(zeroblob(2000000) AS TEXT)")
    with pytest.raises(StoreError, match="holds a value that is too large"):
        merge_into(damaged.with_name("ours.sqlite"), damaged)


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
