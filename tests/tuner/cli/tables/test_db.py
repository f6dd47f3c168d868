import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flashtune.core.record import Record
from flashtune.db.store import open_store
from tests.tuner.cli.conftest import Run


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
