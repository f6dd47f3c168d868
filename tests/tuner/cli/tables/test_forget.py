"""Tests of flashtune db: its counts, and the deletion of records and selections."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashtune.core.errors import UsageError
from flashtune.core.record import Outcome, Provenance, Record
from flashtune.db.store import open_store
from flashtune.tuner.cli import main
from flashtune.tuner.cli.commands.db import moment
from tests.support.records import MakeRecord
from tests.tuner.cli.conftest import Run


def kept(tmp_path: Path) -> list[str]:
    with open_store(str(tmp_path / "flashtune.sqlite")) as store:
        return [entry.record.outcome.value for entry in store.records()]


def selected(tmp_path: Path) -> list[float | None]:
    with open_store(str(tmp_path / "flashtune.sqlite")) as store:
        return [entry.record.ms for entry in store.selections()]


def test_records_of_an_outcome_are_deleted_without_the_selection(
    run: Run, stored: tuple[Record, ...], tmp_path: Path
) -> None:
    done = run("db", "forget", "--outcome", "wrong_result", "--outcome", "infeasible", "--yes")
    assert done.exit_code == 0, done.output
    assert "2 records were deleted, and 0 selections taken back" in done.stdout
    assert kept(tmp_path) == ["ok"] * 3
    assert selected(tmp_path) == [0.5]


def test_deleted_selection_is_replaced_by_the_next_best_record(
    run: Run, stored: tuple[Record, ...], tmp_path: Path
) -> None:
    # The selection alone is old.
    with closing(sqlite3.connect(tmp_path / "flashtune.sqlite")) as connection, connection:
        connection.execute("UPDATE records SET created_at = '2020-01-01' WHERE ms = 0.5")
    done = run("db", "forget", "--older-than", "52w", "--yes", "--json")
    told = json.loads(done.stdout)
    assert (told["deleted"], told["records"]) == (True, 1)
    assert "block_m=64" in told["selections"][0]["config"]
    assert selected(tmp_path) == [0.7]


def test_no_selection_remains_without_eligible_records(
    run: Run, stored: tuple[Record, ...], make_record: MakeRecord, tmp_path: Path
) -> None:
    done = run("db", "forget", "--outcome", "ok", "--yes")
    assert "nothing is selected now" in done.stdout
    assert selected(tmp_path) == []
    assert sorted(kept(tmp_path)) == ["infeasible", "wrong_result"]


def test_candidate_with_a_later_failure_is_not_selected(
    run: Run, stored: tuple[Record, ...], make_record: MakeRecord, tmp_path: Path
) -> None:
    with open_store(str(tmp_path / "flashtune.sqlite")) as store:
        store.add(make_record("block_m=64", ms=None, outcome=Outcome.WRONG_RESULT, message="delays"))
        predicted = make_record("block_n=32", ms=0.1, provenance=Provenance.PREDICTED)
        store.add(predicted)
    with closing(sqlite3.connect(tmp_path / "flashtune.sqlite")) as connection, connection:
        connection.execute("UPDATE records SET created_at = '2020-01-01' WHERE ms = 0.5")
    assert run("db", "forget", "--older-than", "52w", "--yes").exit_code == 0
    assert selected(tmp_path) == [0.9]


def test_deletion_requires_confirmation(run: Run, stored: tuple[Record, ...], tmp_path: Path) -> None:
    for answer in ("n\n", ""):
        done = CliRunner().invoke(main, ["db", "forget", "--target", "h200"], input=answer)
        assert done.exit_code == 1
        assert "5" in done.output
        assert "Delete 5 records and take back 1 selections?" in done.output
        assert "nothing was deleted" in done.output
    assert len(kept(tmp_path)) == 5
    done = CliRunner().invoke(main, ["db", "forget", "--target", "h200"], input="y\n")
    assert done.exit_code == 0
    assert kept(tmp_path) == []


def test_filters_by_shape_family_and_target_are_combined(
    run: Run, two_gpus: tuple[Record, ...], shape: str, tmp_path: Path
) -> None:
    assert "0 records" in run("db", "forget", "--family", "forward_kv_outer", "--yes").stdout
    assert run("db", "forget", "--shape", shape, "--target", "h100", "--yes").exit_code == 0
    with open_store(str(tmp_path / "flashtune.sqlite")) as store:
        assert [entry.record.target for entry in store.records()] == ["nvidia-h200"] * 2
        assert len(store.selections()) == 2


def test_valid_filter_is_required(run: Run, stored: tuple[Record, ...], tmp_path: Path) -> None:
    assert run("db", "forget", "--yes").exit_code == 2
    assert run("db", "forget", "--older-than", "soon", "--yes").exit_code == 2
    assert run("db", "forget", "--target", "h900", "--yes").exit_code == 2
    assert len(kept(tmp_path)) == 5
    missing = run("db", "forget", "--outcome", "ok", "--db", tmp_path / "none.sqlite")
    assert missing.exit_code == 1
    assert not (tmp_path / "none.sqlite").exists()


def test_ages_are_times_in_the_past() -> None:
    now = datetime(2026, 11, 23, 12, tzinfo=UTC)
    assert moment("90m", now) == "2026-11-23T10:30:00.000000+00:00"
    assert moment("2d", now) == "2026-11-21T12:00:00.000000+00:00"
    for text in ("", "3", "3y", "-3d", "999999w"):
        with pytest.raises(UsageError):
            moment(text, now)


def test_path_uses_the_environment_variable_and_the_option(run: Run, tmp_path: Path) -> None:
    assert run("db", "path").stdout.strip() == str(tmp_path / "flashtune.sqlite")
    told = json.loads(run("db", "path", "--db", tmp_path / "x.sqlite", "--json").stdout)
    assert told == {"database": str(tmp_path / "x.sqlite"), "exists": False}


def test_path_never_shows_a_password(run: Run) -> None:
    told = run("db", "path", "--db", "postgresql://me:secret@host/tuning").stdout
    assert "secret" not in told
    assert "host" in told


def test_upgrade_creates_the_database_and_is_idempotent(run: Run, tmp_path: Path) -> None:
    first = run("db", "upgrade")
    assert first.exit_code == 0, first.output
    assert (tmp_path / "flashtune.sqlite").exists()
    assert "was created with schema" in first.stdout
    assert " has schema" in run("db", "upgrade").stdout
    assert json.loads(run("db", "upgrade", "--json").stdout)["after"]


def test_merge_adds_records_and_selections(
    run: Run, stored: tuple[Record, ...], make_record: Callable[..., Record], tmp_path: Path
) -> None:
    other = tmp_path / "other.sqlite"
    with open_store(str(other)) as store:
        store.pin(store.add(make_record("block_m=64,block_n=32,num_warps=4", ms=0.4)))
    counts = json.loads(run("db", "merge", other, "--json").stdout)
    assert (counts["records_added"], counts["selections_replaced"]) == (1, 1)
    assert "1 were known" in run("db", "merge", other).stdout
    (row,) = json.loads(run("show", "--json").stdout)
    assert row["found"]["record"]["measurement"]["ms"] == 0.4


@pytest.mark.parametrize("name", ["missing.sqlite", "damaged.sqlite"])
def test_merge_of_an_invalid_database_changes_nothing(
    run: Run, stored: tuple[Record, ...], tmp_path: Path, name: str
) -> None:
    (tmp_path / "damaged.sqlite").write_bytes(b"not a database at all, and long enough to tell" * 100)
    before = run("show", "--json").stdout
    result = run("db", "merge", tmp_path / name)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert run("show", "--json").stdout == before


def test_db_requires_a_subcommand(run: Run) -> None:
    assert run("db").exit_code == 2
