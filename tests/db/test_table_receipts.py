"""Tests of receipts and times under further versions in tables."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashtune.core.errors import TableError
from flashtune.core.mask_sharing import MaskSharing
from flashtune.core.record import Measurement, PeerTime, Record, SharedTime, Verdict, Versions
from flashtune.db.codec import Check
from flashtune.db.evidence import under
from flashtune.db.store import open_store
from flashtune.db.table import Timing, TunedTable, dump_table, parse_table, table_hash
from flashtune.dispatch import tables
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


def timing_of(record: Record, versions: Versions) -> Timing:
    assert record.kernel is not None
    return Timing(problem=record.problem.key, kernel=record.kernel, versions=versions, measurement=MEASURED)


@pytest.fixture
def record() -> Record:
    return make_record()


@pytest.fixture
def table(record: Record) -> TunedTable:
    versions = newer(record.versions)
    receipts = (receipt_of(record, versions), receipt_of(record, versions, digest="e" * 32))
    return TunedTable(
        target=TARGET, records=(record,), receipts=receipts, times=(timing_of(record, versions),)
    )


def test_table_with_receipts_round_trips(table: TunedTable) -> None:
    again = parse_table(dump_table(table), "here")
    assert again.records == table.records
    assert set(again.receipts) == set(table.receipts)
    assert again.times == table.times
    assert dump_table(again) == dump_table(table)


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


def test_time_without_a_record_is_refused(record: Record) -> None:
    timing = msgspec.structs.replace(timing_of(record, record.versions), kernel="f" * 32)
    with pytest.raises(TableError, match="time 1 cannot be used"):
        dump_table(TunedTable(target=TARGET, records=(record,), times=(timing,)))


def test_record_takes_the_receipt_and_time_of_the_given_versions(table: TunedTable, record: Record) -> None:
    here = newer(record.versions)
    (updated,) = under(table, lambda family: here)
    assert (updated.versions, updated.verdict, updated.measurement) == (here, PASSED, MEASURED)
    assert updated.is_proven(here)
    assert not record.is_proven(here)


def test_record_with_a_receipt_but_no_time_is_not_changed(table: TunedTable, record: Record) -> None:
    untimed = msgspec.structs.replace(table, times=())
    assert under(untimed, lambda family: newer(record.versions)) == (record,)
    unproven = msgspec.structs.replace(table, receipts=())
    assert under(unproven, lambda family: newer(record.versions)) == (record,)


def test_time_without_baselines_keeps_those_of_the_record(table: TunedTable, record: Record) -> None:
    assert record.measurement is not None
    peers = (PeerTime("sdpa-cudnn", 0.3),)
    timed = msgspec.structs.replace(
        record, measurement=msgspec.structs.replace(record.measurement, peers=peers)
    )
    (updated,) = under(
        msgspec.structs.replace(table, records=(timed,)), lambda family: newer(record.versions)
    )
    assert updated.measurement == msgspec.structs.replace(MEASURED, peers=peers)


def test_shared_mask_times_replace_those_of_the_record(table: TunedTable, record: Record) -> None:
    peers = (PeerTime("sdpa-cudnn", 0.3),)
    shared = (SharedTime(MaskSharing.HEADS, 0.4, peers),)
    earlier = Measurement(0.5, 0.4, 0.6, 50, shared=shared)
    timed = msgspec.structs.replace(record, measurement=earlier)
    (updated,) = under(
        msgspec.structs.replace(table, records=(timed,)), lambda family: newer(record.versions)
    )
    # The kernel takes half of its earlier time, and the peers' times are kept.
    kept = (SharedTime(MaskSharing.HEADS, 0.2, peers),)
    assert updated.measurement == msgspec.structs.replace(MEASURED, shared=kept)


def test_record_without_evidence_of_the_versions_is_not_changed(table: TunedTable, record: Record) -> None:
    other = msgspec.structs.replace(record.versions, triton="3.8.0")
    assert under(table, lambda family: other) == (record,)
    assert under(table, lambda family: record.versions) == (record,)


@pytest.fixture
def shipped(ship: Ship, record: Record) -> Iterator[TunedTable]:
    """A shipped table whose kernel passed under the installed versions."""
    receipts = tuple(receipt_of(record, current_versions(FAMILY), digest=digest) for digest in ("", "e" * 32))
    times = (timing_of(record, current_versions(FAMILY)),)
    table = TunedTable(target=TARGET, records=(record,), receipts=receipts, times=times)
    ship(table)
    forget_all()
    yield table
    forget_all()


def test_shipped_receipt_verifies_a_record_under_newer_versions(shipped: TunedTable) -> None:
    ((_, (record,)),) = tables.tuned_records(TARGET).shipped.items()
    assert record.is_proven(current_versions(FAMILY))
    assert not shipped.records[0].is_proven(current_versions(FAMILY))


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


def test_newer_receipts_and_times_replace_earlier_ones(table: TunedTable, record: Record) -> None:
    versions = newer(record.versions)
    better = msgspec.structs.replace(PASSED, checks=200)
    check = receipt_of(record, versions, better)
    timing = msgspec.structs.replace(timing_of(record, versions), measurement=Measurement(0.2, 0.2, 0.2, 50))
    done = with_receipts(table, [(record, check)], [check], [timing])
    assert set(done.receipts) == {check, table.receipts[1]}
    assert done.times == (timing,)
