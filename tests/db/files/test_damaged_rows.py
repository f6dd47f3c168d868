"""Tests of damaged rows: each is skipped, and the others are read. A value that is too large is an error."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from flashtune.core.errors import StoreError
from flashtune.db.errors import UnreadableRecord
from flashtune.db.forgetting import Forgettable
from flashtune.db.light.self_checks import remember_check
from flashtune.db.limits import Deadline, restrict
from flashtune.db.store import open_store
from tests.db.files.hostile import CHECK, TARGET, execute, merge_into
from tests.db.records import make_problem, make_record, reader_of

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
        assert reader.check(CHECK.digest, TARGET, CHECK.versions) is None
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
    assert reader_of(ours).check(CHECK.digest, TARGET, CHECK.versions) is True


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
        assert reader.check(CHECK.digest, TARGET, CHECK.versions) is None
    with pytest.warns(UnreadableRecord, match=reason) as caught:
        counts = merge_into(damaged.with_name("ours.sqlite"), damaged)
    assert (counts.records_added, counts.selections_added, counts.checks_added) == (1, 1, 0)
    assert [reason in str(warning.message) for warning in caught] == [True] * 4


@pytest.mark.parametrize("table", ["records", "selections"])
def test_key_that_is_too_large_is_an_error(damaged: Path, table: str) -> None:
    execute(damaged, f"UPDATE {table} SET target = CAST(zeroblob(2000000) AS TEXT)")
    with pytest.raises(StoreError, match="holds a value that is too large"):
        merge_into(damaged.with_name("ours.sqlite"), damaged)
