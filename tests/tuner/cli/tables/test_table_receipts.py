"""Tests of receipts in imported tables: only those of the table's kernels are accepted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashtune.core.record import Record, Verdict
from flashtune.db.codec import Check
from flashtune.db.table import TunedTable, load_table
from flashtune.dispatch.versions import NO_DRIVER, current_versions
from flashtune.tuner.tables import listing
from flashtune.tuner.tables.admission import digest_of
from flashtune.tuner.tables.table_receipts import sibling, without_strays
from flashtune.tuner.workloads.shapes import parse_shape
from flashtune.verification.probes import EVERY_LEVEL
from tests.support.families import Ship
from tests.support.records import MakeRecord, write_table
from tests.tuner.cli.conftest import SHAPE, Run

STRAY = "e" * 32
VERDICT = Verdict(True, 0.4, 12, "", "NVIDIA H200", probes=tuple(EVERY_LEVEL))


def receipt(record: Record, digest: str, **versions: Any) -> Check:
    here = msgspec.structs.replace(current_versions(record.family), driver="999.1", **versions)
    return Check(digest=digest, target=record.target, versions=here, verdict=VERDICT)


def sibling_digest(record: Record) -> str:
    return digest_of(msgspec.structs.replace(record, specialization=sibling(record)))


@pytest.fixture
def record(make_record: MakeRecord) -> Record:
    return make_record()


@pytest.fixture
def write(tmp_path: Path, record: Record) -> Callable[..., Path]:
    def written(*receipts: Check) -> Path:
        return write_table(tmp_path / "table.json", record, receipts=receipts)

    return written


def test_receipts_of_records_and_siblings_become_self_checks(
    run: Run, write: Callable[..., Path], record: Record, tmp_path: Path
) -> None:
    path = write(receipt(record, str(record.kernel)), receipt(record, sibling_digest(record)))
    done = run("import", path, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["checks_added"] == 2


def test_receipt_without_a_record_is_refused(run: Run, write: Callable[..., Path], record: Record) -> None:
    done = run("import", write(receipt(record, str(record.kernel)), receipt(record, STRAY)))
    assert done.exit_code == 2
    assert "cannot be used: no record has its kernel" in done.stderr
    assert done.stderr.count("\n") == 1


def test_receipts_of_other_template_versions_are_not_imported(
    run: Run, write: Callable[..., Path], record: Record, tmp_path: Path
) -> None:
    done = run("import", write(receipt(record, STRAY, template="0" * 32)), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["checks_added"] == 0


@pytest.mark.usefixtures("quick_jobs")
def test_verify_fails_on_receipts_without_records(
    run: Run, write: Callable[..., Path], record: Record
) -> None:
    good = receipt(record, str(record.kernel)), receipt(record, sibling_digest(record))
    assert run("verify", "--table", write(*good)).exit_code == 0
    done = run("verify", "--table", write(*good, receipt(record, STRAY)))
    assert done.exit_code == 1
    assert f"1 receipts are of kernels that no record has, the first of {STRAY}" in done.stderr
    assert run("verify", "--table", write(receipt(record, STRAY, template="0" * 32))).exit_code == 0


def test_written_table_omits_receipts_without_records(record: Record) -> None:
    good = receipt(record, str(record.kernel))
    old = receipt(record, STRAY, template="0" * 32)
    table = TunedTable(target=record.target, records=(record,), receipts=(good, receipt(record, STRAY), old))
    assert without_strays(table).receipts == (good, old)


def test_shipped_records_of_all_drivers_count_without_a_driver(
    run: Run, monkeypatch: pytest.MonkeyPatch, ship: Ship, record: Record
) -> None:
    other = msgspec.structs.replace(current_versions(record.family), driver="999.1")
    ship(TunedTable(target=record.target, records=(msgspec.structs.replace(record, versions=other),)))
    standings = {}
    for driver in (NO_DRIVER, "999.2", "998.1"):
        here = msgspec.structs.replace(other, driver=driver)
        monkeypatch.setattr(listing, "current_versions", lambda family, here=here: here)
        (row,) = json.loads(run("show", "--shipped", "--json").stdout)
        standings[driver] = row["standing"]
    assert standings == {NO_DRIVER: "timed", "999.2": "timed", "998.1": "unproven"}


def test_exported_part_of_a_shipped_table_contains_its_evidence(
    run: Run, ship: Ship, record: Record, make_record: MakeRecord, tmp_path: Path
) -> None:
    (wider,) = parse_shape("heads=8,kv_heads=2,seqlen=1024,head_dim=128,dtype=bf16,causal,batch=2")
    other = make_record(of=wider)
    part = tuple(receipt(record, digest) for digest in (str(record.kernel), sibling_digest(record)))
    table = TunedTable(
        target=record.target,
        records=(record, other),
        receipts=(*part, receipt(other, str(other.kernel))),
    )
    ship(table)
    path = tmp_path / "part.json"
    done = run("export", "--shipped", "--shape", SHAPE, "--out", path)
    assert done.exit_code == 0, done.output
    exported = load_table(path)
    assert (exported.records, set(exported.receipts)) == ((record,), set(part))
