"""Tests of receipts in imported tables: only those of the table's kernels are accepted."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashtune.core.record import Measurement, Record, Verdict
from flashtune.db.codec import Check
from flashtune.db.table import Timing, TunedTable, load_table
from flashtune.dispatch import tables
from flashtune.dispatch.versions import NO_DRIVER, current_versions
from flashtune.tuner.tables import listing, lookup
from flashtune.tuner.tables.admission import digest_of
from flashtune.tuner.tables.listing import standing
from flashtune.tuner.tables.lookup import tables_of
from flashtune.tuner.tables.table_receipts import sibling, without_strays
from flashtune.tuner.workloads.shapes import parse_shape
from flashtune.verification.probes import EVERY_LEVEL
from tests.support.families import Ship
from tests.support.records import MakeRecord, write_table
from tests.support.runtime import forget_all
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


def test_written_table_omits_receipts_and_times_without_records(
    write: Callable[..., Path], record: Record
) -> None:
    good, stray, old = (
        receipt(record, str(record.kernel)),
        receipt(record, STRAY),
        receipt(record, STRAY, template="0" * 32),
    )
    times = tuple(
        Timing(
            problem=record.problem.key,
            kernel=kernel,
            versions=good.versions,
            measurement=Measurement(0.3, 0.3, 0.3, 9),
        )
        for kernel in (str(record.kernel), STRAY)
    )
    table = TunedTable(target=record.target, records=(record,), receipts=(good, stray, old), times=times)
    done = without_strays(table)
    assert (done.receipts, done.times) == ((good, old), times[:1])


@pytest.fixture
def shipped(ship: Ship, record: Record) -> Iterator[TunedTable]:
    """A shipped table of another driver, with a receipt and a time of the current versions."""
    here = current_versions(record.family)
    other = msgspec.structs.replace(record, versions=msgspec.structs.replace(here, driver="999.1"))
    check = Check(digest=str(record.kernel), target=record.target, versions=here, verdict=VERDICT)
    time = Timing(
        problem=record.problem.key,
        kernel=str(record.kernel),
        versions=here,
        measurement=Measurement(0.3, 0.3, 0.3, 9),
    )
    table = TunedTable(target=record.target, records=(other,), receipts=(check,), times=(time,))
    ship(table)
    forget_all()
    yield table
    forget_all()


def test_shipped_receipt_without_a_time_verifies_a_record(
    run: Run, monkeypatch: pytest.MonkeyPatch, ship: Ship, shipped: TunedTable
) -> None:
    def standings() -> list[str]:
        return [row["standing"] for row in json.loads(run("show", "--shipped", "--json").stdout)]

    # The table's receipt and time are of the driver here, and the record is of another one.
    monkeypatch.setattr(listing, "NO_DRIVER", "nothing")
    assert standings() == ["timed"]
    ship(msgspec.structs.replace(shipped, times=()))
    assert standings() == ["verified"]
    ship(msgspec.structs.replace(shipped, times=(), receipts=()))
    assert standings() == ["unproven"]


def test_shipped_receipts_of_all_drivers_count_without_a_driver(
    run: Run, monkeypatch: pytest.MonkeyPatch, ship: Ship, record: Record
) -> None:
    other = msgspec.structs.replace(record.versions, triton="99.0")
    table = TunedTable(
        target=record.target,
        records=(msgspec.structs.replace(record, versions=other),),
        receipts=(receipt(record, str(record.kernel)),),
    )
    ship(table)
    standings = {}
    for driver in (NO_DRIVER, "999.2", "998.1"):
        here = msgspec.structs.replace(record.versions, driver=driver)
        for module_ in (lookup, listing):
            monkeypatch.setattr(module_, "current_versions", lambda family, here=here: here)
        (row,) = json.loads(run("show", "--shipped", "--json").stdout)
        standings[driver] = row["standing"]
    assert standings == {NO_DRIVER: "verified", "999.2": "verified", "998.1": "unproven"}


def test_exported_part_of_a_shipped_table_contains_its_evidence(
    run: Run, ship: Ship, record: Record, make_record: MakeRecord, tmp_path: Path
) -> None:
    (wider,) = parse_shape("heads=8,kv_heads=2,seqlen=1024,head_dim=128,dtype=bf16,causal,batch=2")
    other = make_record(of=wider)
    part = tuple(receipt(record, digest) for digest in (str(record.kernel), sibling_digest(record)))
    time = Timing(
        problem=record.problem.key,
        kernel=str(record.kernel),
        versions=part[0].versions,
        measurement=Measurement(0.3, 0.3, 0.3, 9),
    )
    table = TunedTable(
        target=record.target,
        records=(record, other),
        receipts=(*part, receipt(other, str(other.kernel))),
        times=(time,),
    )
    ship(table)
    path = tmp_path / "part.json"
    done = run("export", "--shipped", "--shape", SHAPE, "--out", path)
    assert done.exit_code == 0, done.output
    exported = load_table(path)
    assert (exported.records, set(exported.receipts), exported.times) == ((record,), set(part), (time,))


def test_commands_and_dispatch_read_shipped_tables_alike(shipped: TunedTable, tmp_path: Path) -> None:
    (seen,) = tables_of(shipped.target, str(tmp_path / "none.sqlite")).effective()
    assert seen in tables.tuned_records(shipped.target).effective()
    assert seen.ms == 0.3
    assert standing(seen) == "timed"
