"""Tests of `flashtune db pull`: selections of one GPU, their checks and their machine code."""

import json
from pathlib import Path

import msgspec
import pytest

from flashtune.bundle.bundle_file import dump_bundle, open_bundle
from flashtune.core.record import Record
from flashtune.db.location import bundle_file, database_url
from flashtune.db.store import open_store
from flashtune.launch.bundles import recipe_of
from tests.bundle.conftest import make_entry
from tests.db.postgres import PASSWORD
from tests.support.records import MakeRecord
from tests.tuner.cli.conftest import Run


@pytest.fixture(params=["sqlite", "postgres"])
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of another database, on each engine."""
    return str(tmp_path / "fleet") if request.param == "sqlite" else request.getfixturevalue("postgres")


def fill(url: str, *records: Record) -> None:
    with open_store(url) as store:
        for record in records:
            store.pin(store.add(record))


def selected(url: str | None = None) -> list[Record]:
    with open_store(url) as store:
        return [row.record for row in store.selections()]


def test_selections_of_one_gpu_are_copied_once(run: Run, fleet: str, make_record: MakeRecord) -> None:
    here, there = make_record(), make_record("block_n=32", target="nvidia-h100")
    fill(fleet, make_record("block_m=64", ms=0.9), here, there)
    first = run("db", "pull", fleet, "--target", "h200", "--json")
    assert first.exit_code == 0, first.output
    told = json.loads(first.stdout)
    assert (told["target"], told["kernels"]) == ("nvidia-h200", 0)
    assert (told["counts"]["records_added"], told["counts"]["selections_added"]) == (1, 1)
    assert selected() == [here]
    again = run("db", "pull", fleet, "--target", "h200")
    assert "0 records are new and 1 were known; 0 selections are new" in again.stdout
    assert PASSWORD not in first.output + again.output


def test_records_that_an_import_refuses_are_left_out(run: Run, fleet: str, make_record: MakeRecord) -> None:
    impossible = make_record(ms=1e-6)
    fill(fleet, impossible)
    result = run("db", "pull", fleet, "--target", "h200")
    assert result.exit_code == 0, result.output
    assert "1 selections of" in result.stderr
    assert selected() == []


def test_machine_code_of_selections_is_copied(run: Run, fleet: str, make_record: MakeRecord) -> None:
    record = make_record()
    fill(fleet, record)
    path = bundle_file(database_url(fleet), "sm_90")
    (own, codes), (other, more) = make_entry(1, b"own"), make_entry(2, b"other")
    own = msgspec.structs.replace(own, recipes=(recipe_of(record, record.specialization),))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(dump_bundle("sm_90", "1.0", (own, other), codes | more))
    path.chmod(0o644)
    for new in (1, 0):
        told = json.loads(run("db", "pull", fleet, "--target", "h200", "--json").stdout)
        assert told["kernels"] == new
    copied = open_bundle(bundle_file(database_url(None), "sm_90"), own=True)
    assert list(copied.entries()) == [own]
    path.write_bytes(b"FTBUNDLE")
    bundle_file(database_url(None), "sm_90").unlink()
    result = run("db", "pull", fleet, "--target", "h200")
    assert (result.exit_code, "machine code was not copied" in result.stderr) == (0, True)


def test_a_pull_without_a_source_is_refused(run: Run, tmp_path: Path, make_record: MakeRecord) -> None:
    missing, own = tmp_path / "missing.sqlite", tmp_path / "flashtune.sqlite"
    assert "there is no database" in run("db", "pull", missing, "--target", "h200").stderr
    assert not own.exists()
    fill(str(own), make_record())
    assert "is the database itself" in run("db", "pull", own, "--target", "h200").stderr
    fill(str(missing), make_record())
    assert "has no selections of nvidia-a100" in run("db", "pull", missing, "--target", "a100").stderr
