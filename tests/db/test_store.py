"""Tests of the store, and of concurrent and killed processes that share a database."""

import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashtune.core.errors import StoreError, TableError
from flashtune.core.kernel import Specialization
from flashtune.core.record import Outcome, Provenance, Verdict
from flashtune.db.codec import Check
from flashtune.db.schema import RECORDS
from flashtune.db.store import Store, open_store
from flashtune.db.table import TunedTable
from tests.db.records import make_problem, make_record, passed_check, reader_of
from tests.support.values import present


def test_added_records_can_be_read(store: Store) -> None:
    first, second = make_record(ms=1.0), make_record(ms=2.0, outcome=Outcome.TIMEOUT, measurement=None)
    ids = [store.add(first), store.add(second)]
    entries = store.records()
    assert [stored.id for stored in entries] == ids
    assert [stored.record for stored in entries] == [first, second]
    assert entries[0].created_at <= entries[1].created_at
    assert entries[0].created_at.endswith("+00:00")


def test_equal_record_is_stored_once(store: Store) -> None:
    assert store.add(make_record(ms=1.0)) == store.add(make_record(ms=1.0)) != store.add(make_record(ms=2.0))
    assert len(store.records()) == 2


def test_records_that_differ_in_compile_time_are_stored_once(store: Store) -> None:
    record = make_record()
    resources = msgspec.structs.replace(present(record.resources), compile_seconds=9.0)
    again = msgspec.structs.replace(record, resources=resources)
    first = store.add(record)
    assert store.add(again) == first
    counts = store.merge_tables(TunedTable(target=record.target, records=(again,)))
    assert (counts.records_added, len(store.records())) == (0, 1)


def test_records_are_found_by_problem_target_and_family(store: Store) -> None:
    long = make_problem(seqlen_q=4096)
    baseline = make_record(family="unfused", config=None, kernel=None)
    records = [make_record(), make_record(problem=long), make_record(target="nvidia-a100"), baseline]
    for record in records:
        store.add(record)
    assert [stored.record for stored in store.records(problem=long)] == [records[1]]
    assert [stored.record for stored in store.records(target="nvidia-a100")] == [records[2]]
    assert [stored.record for stored in store.records(family="unfused")] == [baseline]
    assert store.records(problem=long, target="nvidia-a100") == []


def test_stores_see_records_of_other_connections(store: Store) -> None:
    with open_store(store.url) as other:
        other.add(make_record())
        assert len(store.records()) == 1


def test_pin_replaces_the_earlier_selection(store: Store) -> None:
    slow, fast = make_record(ms=2.0), make_record(ms=1.0)
    elsewhere = make_record(ms=3.0, target="nvidia-a100")
    for record in (slow, fast, elsewhere):
        store.pin(store.add(record))
    assert [stored.record for stored in store.selections()] == [elsewhere, fast]
    assert [stored.record for stored in store.selections("nvidia-h200")] == [fast]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"outcome": Outcome.LAUNCH_ERROR}, "its outcome is launch_error"),
        ({"verdict": Verdict(passed=False, worst_ratio=9.0, checks=1, failed="tail", device="x")}, "wrong"),
        ({"verdict": None}, "without being verified"),
        ({"kernel": None}, "names no kernel"),
    ],
)
def test_ineligible_record_is_not_pinned(store: Store, changes: dict[str, Any], reason: str) -> None:
    record_id = store.add(make_record(**changes))
    with pytest.raises(StoreError, match=reason):
        store.pin(record_id)
    assert store.selections() == []


def test_predictions_and_baselines_may_be_pinned(store: Store) -> None:
    store.pin(store.add(make_record(provenance=Provenance.PREDICTED, verdict=None)))
    store.pin(store.add(make_record(family="sdpa", config=None, kernel=None, verdict=None)))
    assert [stored.record.family for stored in store.selections()] == ["sdpa"]


def test_pin_of_a_missing_record_is_an_error(store: Store) -> None:
    with pytest.raises(StoreError, match="has no record 7"):
        store.pin(7)


def test_a_record_out_of_bounds_is_not_stored(store: Store) -> None:
    with pytest.raises(TableError):
        store.add(make_record(message="x" * 1000))
    assert store.records() == []


def test_columns_match_the_record(store: Store) -> None:
    record = make_record(ms=0.25, specialization=Specialization(lse=True))
    store.add(record)
    with store._engine.connect() as connection:
        row = connection.execute(RECORDS.select()).one()
    assert (row.problem_key, row.target, row.family) == (record.problem.key, record.target, record.family)
    assert (row.config, row.kernel, row.ms) == (present(record.config).label(), record.kernel, 0.25)
    assert (row.outcome, row.provenance) == ("ok", "measured")
    assert (row.triton, row.template) == (record.versions.triton, record.versions.template)


def test_last_check_is_used(store: Store) -> None:
    versions = make_record().versions
    for passed in (True, False):
        verdict = Verdict(passed=passed, worst_ratio=1.0, checks=3, failed="", device="NVIDIA H200")
        store.remember_check(Check(digest="a" * 32, target="nvidia-h200", versions=versions, verdict=verdict))
    reader = reader_of(store.url)
    assert passed_check(reader, "a" * 32, "nvidia-h200", versions) is False
    assert passed_check(reader, "b" * 32, "nvidia-h200", versions) is None


@pytest.mark.slow
def test_store_is_thread_safe(store: Store) -> None:
    def write(thread: int) -> None:
        for number in range(25):
            store.pin(store.add(make_record(ms=1 + thread + number / 100)))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.records()) == 100
    assert len(store.selections()) == 1


def test_a_closed_store_leaves_one_file(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "closed.sqlite")) as store:
        store.add(make_record())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["closed.sqlite", "closed.sqlite.lock"]


WRITER = Path(__file__).with_name("writer.py")
ENDLESS = 1_000_000


def start(path: Path, first: int, count: int) -> subprocess.Popen[str]:
    """A running writer process."""
    command = [sys.executable, str(WRITER), str(path), str(first), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def stored(path: Path) -> set[int]:
    """The times of all records."""
    with open_store(str(path)) as store:
        return {int(entry.record.ms or 0) for entry in store.records()}


def is_sound(path: Path) -> bool:
    """SQLite's own check."""
    with closing(sqlite3.connect(path)) as connection:
        return bool(connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)])


@pytest.mark.slow
def test_concurrent_creation_and_writes_lose_no_records(path: Path) -> None:
    writers = [start(path, 1000 * number, 40) for number in range(4)]
    said: set[int] = set()
    for writer in writers:
        out, errors = writer.communicate(timeout=1200)
        assert writer.returncode == 0, errors
        said |= {int(line) for line in out.split()}
    assert len(said) == 160
    assert stored(path) == said
    with open_store(str(path)) as store:
        assert len(store.selections()) == 1
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.slow
def test_killed_writers_lose_no_committed_records(path: Path) -> None:
    said: set[int] = set()
    writers = [start(path, ENDLESS * number, ENDLESS) for number in range(2)]
    for writer, lines in zip(writers, (7, 25), strict=True):
        said |= {int(present(writer.stdout).readline()) for _ in range(lines)}
    for writer in writers:
        writer.kill()
        out, _ = writer.communicate(timeout=1200)
        # The last line may be cut off: its record may or may not be stored.
        said |= {int(line) for line in out.splitlines(keepends=True) if line.endswith("\n")}
    assert is_sound(path)
    assert said <= stored(path)
    reader = reader_of(path)
    assert len(reader.selections("nvidia-h200")) == 1


@pytest.mark.slow
def test_kill_during_creation_leaves_a_usable_database(path: Path) -> None:
    for delay in (0.3, 0.6):
        writer = start(path, 0, ENDLESS)
        try:
            writer.wait(timeout=delay)
        except subprocess.TimeoutExpired:
            writer.kill()
        writer.communicate()
    with open_store(str(path)) as store:
        assert store.records() is not None
    assert is_sound(path)
