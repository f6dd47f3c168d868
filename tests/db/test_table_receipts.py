"""Tests of receipts in tables."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashtune.core.errors import TableError
from flashtune.core.record import Measurement, Record, Verdict, Versions
from flashtune.db.codec import Check
from flashtune.db.store import open_store
from flashtune.db.table import TunedTable, dump_table, parse_table, table_hash
from flashtune.dispatch.versions import current_versions
from flashtune.runtime.self_check import SelfChecks
from flashtune.tuner.tables.table_receipts import with_receipts
from tests.db.records import make_record
from tests.support.families import Ship
from tests.support.runtime import forget_all

TARGET = "nvidia-h200"
FAMILY = "forward_q_outer"
PASSED = Verdict(True, 0.5, 100, "", "NVIDIA H200", probes=("random", "delays"))
FAILED = Verdict(False, 2.0, 100, "random", "NVIDIA H200")
MEASURED = Measurement(0.25, 0.24, 0.26, 50)


def newer(versions: Versions) -> Versions:
    return msgspec.structs.replace(versions, triton="3.9.0", ptxas="13.1")


def receipt_of(record: Record, versions: Versions, verdict: Verdict = PASSED, digest: str = "") -> Check:
    assert record.kernel is not None
    return Check(digest=digest or record.kernel, target=TARGET, versions=versions, verdict=verdict)


@pytest.fixture
def record() -> Record:
    return make_record()


@pytest.fixture
def table(record: Record) -> TunedTable:
    versions = newer(record.versions)
    receipts = (receipt_of(record, versions), receipt_of(record, versions, digest="e" * 32))
    return TunedTable(target=TARGET, records=(record,), receipts=receipts)


def test_table_with_receipts_round_trips(table: TunedTable) -> None:
    again = parse_table(dump_table(table), "here")
    assert again.records == table.records
    assert set(again.receipts) == set(table.receipts)
    assert dump_table(again) == dump_table(table)


def test_schema_4_is_read_without_its_times(table: TunedTable) -> None:
    raw = (
        dump_table(table).replace(b'"schema": 5', b'"schema": 4').replace(b'"source_receipts"', b'"receipts"')
    )
    earlier = raw.rstrip()[:-1].rstrip() + b', "times": [{"problem": "any"}]}'
    assert dump_table(parse_table(earlier, "here")) == dump_table(table)
    with pytest.raises(TableError, match="unknown field `times`"):
        parse_table(dump_table(table).rstrip()[:-1] + b', "times": []}', "here")


def test_the_order_of_receipts_changes_neither_bytes_nor_hash(table: TunedTable) -> None:
    turned = msgspec.structs.replace(table, receipts=table.receipts[::-1])
    assert dump_table(turned) == dump_table(table)
    assert table_hash(turned) == table_hash(table)
    assert table_hash(msgspec.structs.replace(table, receipts=())) != table_hash(table)


INTERPRETED = msgspec.structs.replace(PASSED, device="interpreter")
PCIE = msgspec.structs.replace(PASSED, device="NVIDIA H100 PCIe")


@pytest.mark.parametrize(
    "change", [{"verdict": FAILED}, {"target": "nvidia-h100"}, {"verdict": INTERPRETED}, {"verdict": PCIE}]
)
def test_receipt_that_is_no_pass_on_the_gpu_is_refused(record: Record, change: dict[str, Any]) -> None:
    receipt = msgspec.structs.replace(receipt_of(record, record.versions), **change)
    with pytest.raises(TableError, match=r"receipt 1 cannot .*: it is not a passed verdict on nvidia-h200"):
        dump_table(TunedTable(target=TARGET, records=(record,), receipts=(receipt,)))


def test_second_receipt_of_a_kernel_is_refused(record: Record) -> None:
    first = receipt_of(record, record.versions)
    # Neither torch nor flashtune makes a binary.
    second = receipt_of(record, msgspec.structs.replace(record.versions, torch="2.20"))
    with pytest.raises(TableError, match="receipt 2 cannot be used: an earlier receipt has the same kernel"):
        dump_table(TunedTable(target=TARGET, records=(record,), receipts=(first, second)))


@pytest.fixture
def shipped(ship: Ship, record: Record) -> Iterator[TunedTable]:
    """A shipped table whose kernel passed under the installed versions."""
    receipts = tuple(receipt_of(record, current_versions(FAMILY), digest=digest) for digest in ("", "e" * 32))
    table = TunedTable(target=TARGET, records=(record,), receipts=receipts)
    ship(table)
    forget_all()
    yield table
    forget_all()


def test_a_sibling_with_a_shipped_receipt_needs_no_self_check(shipped: TunedTable) -> None:
    checks = SelfChecks()
    assert ("e" * 32, current_versions(FAMILY).makers) in checks._shipped_receipts(TARGET)
    assert ("d" * 32, current_versions(FAMILY).makers) not in checks._shipped_receipts(TARGET)
    assert not checks._shipped_receipts("nvidia-h100")


def test_import_of_a_table_stores_its_receipts_as_self_checks(table: TunedTable, tmp_path: Path) -> None:
    with open_store(str(tmp_path / "flashtune.sqlite")) as store:
        assert store.merge_tables(table).checks_added == 2
        assert store.merge_tables(table).checks_added == 0


def test_verdicts_under_the_same_versions_replace_those_of_records(record: Record) -> None:
    table = TunedTable(target=TARGET, records=(record,))
    check, sibling = (receipt_of(record, record.versions, digest=digest) for digest in ("", "e" * 32))
    done = with_receipts(table, [(record, check)], [check, sibling])
    assert done.records[0].verdict == PASSED
    assert done.receipts == (sibling,)


def test_verdicts_under_other_versions_become_receipts(record: Record) -> None:
    table = TunedTable(target=TARGET, records=(record,))
    check = receipt_of(record, newer(record.versions))
    done = with_receipts(table, [(record, check)], [check])
    assert done.records == (record,)
    assert done.receipts == (check,)


def test_newer_receipts_replace_earlier_ones(table: TunedTable, record: Record) -> None:
    better = msgspec.structs.replace(PASSED, checks=200)
    check = receipt_of(record, newer(record.versions), better)
    done = with_receipts(table, [(record, check)], [check])
    assert set(done.receipts) == {check, table.receipts[1]}
