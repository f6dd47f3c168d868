"""Tests of merging parts of a table that several processes verified."""

from typing import Any

import msgspec
import pytest

from flashtune.core.record import Measurement, Record, Verdict
from flashtune.db.codec import Check
from flashtune.db.table import TunedTable
from flashtune.dispatch.versions import current_versions
from flashtune.tuner.tables.admission import digest_of
from flashtune.tuner.tables.table_receipts import part_of, rendered_digests, sibling
from scripts.merge_receipts import merged, parts_of
from tests.support.records import shipped_table_of

VERDICT = Verdict(True, 0.4, 12, "", "NVIDIA H200", ("random",))


def check(record: Record, digest: str, driver: str) -> Check:
    versions = msgspec.structs.replace(current_versions(record.family), driver=driver)
    return Check(digest=digest, target=record.target, versions=versions, verdict=VERDICT)


def sibling_digest(record: Record) -> str:
    return digest_of(msgspec.structs.replace(record, specialization=sibling(record)))


@pytest.fixture
def base() -> TunedTable:
    """A table of two problems with one kernel, whose sibling has a receipt."""
    shipped = shipped_table_of("nvidia-h200")
    named = (record for record in shipped.records if record.family == "forward_q_outer")
    first = next(record for record in named if record.kernel == digest_of(record))
    problem = msgspec.structs.replace(first.problem, seqlen_q=2 * first.problem.seqlen_q)
    second = msgspec.structs.replace(first, problem=problem)
    receipts = (check(first, sibling_digest(first), "1.0"),)
    return TunedTable(target=first.target, records=(first, second), receipts=receipts)


def renewed(record: Record, **changes: Any) -> Record:
    """A record that was verified again, as another kernel with another time."""
    return msgspec.structs.replace(
        record, kernel="f" * 32, measurement=Measurement(0.5, 0.5, 0.5, 21), verdict=VERDICT, **changes
    )


def separate(base: TunedTable) -> list[TunedTable]:
    """Parts of one problem each, as older splits made them although the records share a kernel."""
    return [part_of(base, {record.problem}) for record in base.records]


def with_entries(part: TunedTable, *receipts: Check, **changes: Any) -> TunedTable:
    return msgspec.structs.replace(part, receipts=receipts, **changes)


def test_records_that_share_a_kernel_stay_together(base: TunedTable) -> None:
    (part,) = parts_of(base, 2)
    assert part == base
    assert merged(base, base, [part]) == (base, [])


@pytest.mark.slow
def test_parts_have_all_records_and_the_receipts_of_their_kernels() -> None:
    shipped = shipped_table_of("nvidia-h200")
    few = part_of(shipped, {record.problem for record in shipped.records[:40]})
    parts = parts_of(few, 3)
    assert len(parts) == 3
    assert {record for part in parts for record in part.records} == {*few.records}
    assert sum(len(part.records) for part in parts) == len(few.records)
    kernels = [rendered_digests(part.records) for part in parts]
    assert sum(map(len, kernels)) == len(set.union(*kernels))
    assert {receipt for part in parts for receipt in part.receipts} == {*few.receipts}


def test_records_with_another_kernel_are_renewed(base: TunedTable) -> None:
    first, second = separate(base)
    record = renewed(second.records[0])
    verified = msgspec.structs.replace(second, records=(record,))
    assert merged(base, base, [first, verified]) == (
        msgspec.structs.replace(base, records=(base.records[0], record)),
        [],
    )


def test_new_receipts_need_a_pass_in_every_part_with_the_kernel(base: TunedTable) -> None:
    first, second = separate(base)
    added = check(second.records[0], sibling_digest(second.records[0]), "2.0")
    added = msgspec.structs.replace(
        added, versions=msgspec.structs.replace(added.versions, triton="9.9.9"), seconds=None
    )
    other = msgspec.structs.replace(added, verdict=Verdict(True, 0.7, 5, "", "NVIDIA H200", ("random",)))
    verified = with_entries(second, *second.receipts, added)
    # The first part did not reach the kernel, or the kernel failed there.
    assert merged(base, base, [first, verified])[0] == base
    table, _ = merged(base, base, [with_entries(first, *first.receipts, other), verified])
    (whole,) = set(table.receipts) - set(base.receipts)
    assert (whole.verdict.worst_ratio, whole.verdict.checks) == (0.7, 17)


def test_receipts_of_kernels_that_failed_are_left_out(base: TunedTable) -> None:
    first, second = separate(base)
    table, _ = merged(base, base, [first, with_entries(second)])
    assert table.receipts == ()


def test_records_of_searches_since_the_split_are_kept(base: TunedTable) -> None:
    first, second = separate(base)
    record = second.records[0]
    assert record.config is not None
    searched = msgspec.structs.replace(
        record, config=msgspec.structs.replace(record.config, num_warps=16), measurement=None
    )
    table = msgspec.structs.replace(base, records=(base.records[0], searched))
    verified = msgspec.structs.replace(second, records=(renewed(record),))
    result, skipped = merged(base, table, [first, verified])
    assert result.records == table.records
    assert skipped == [renewed(record)]
    # Parts that changed nothing leave the table's newer records.
    assert merged(base, table, [first, second])[0].records == table.records
