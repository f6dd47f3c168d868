"""Tests of merging parts of a table that several processes verified."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flashtune.core.record import Measurement, Record, Verdict
from flashtune.db.codec import Check
from flashtune.db.table import TunedTable, shipped_table
from flashtune.dispatch.versions import current_versions
from flashtune.tuner.tables.admission import digest_of
from flashtune.tuner.tables.table_receipts import sibling
from scripts.merge_receipts import merged, parts_of

VERDICT = Verdict(True, 0.4, 12, "", "NVIDIA H200")


def check(record: Record, digest: str, driver: str) -> Check:
    versions = msgspec.structs.replace(current_versions(record.family), driver=driver)
    return Check(digest=digest, target=record.target, versions=versions, verdict=VERDICT)


def sibling_digest(record: Record) -> str:
    return digest_of(msgspec.structs.replace(record, specialization=sibling(record)))


@pytest.fixture
def base() -> TunedTable:
    """A table of two problems with one kernel, whose sibling has a receipt."""
    shipped = shipped_table("nvidia-h200")
    assert shipped is not None
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


def test_parts_have_all_records_and_the_receipts_of_their_kernels(base: TunedTable) -> None:
    parts = parts_of(base, 2)
    assert tuple(record for part in parts for record in part.records) == base.records
    assert [part.receipts for part in parts] == [base.receipts] * 2
    assert merged(base, base, parts) == (base, [])


def test_records_with_another_kernel_are_renewed(base: TunedTable) -> None:
    first, second = parts_of(base, 2)
    record = renewed(second.records[0])
    added = check(record, sibling_digest(record), "2.0")
    verified = msgspec.structs.replace(second, records=(record,), receipts=(*second.receipts, added))
    table, skipped = merged(base, base, [first, verified])
    assert table.records == (base.records[0], record)
    assert set(table.receipts) == {*base.receipts, added}
    assert skipped == []


def test_receipts_of_kernels_that_failed_are_left_out(base: TunedTable) -> None:
    first, second = parts_of(base, 2)
    table, _ = merged(base, base, [first, msgspec.structs.replace(second, receipts=())])
    assert table.receipts == ()


def test_records_of_searches_since_the_split_are_kept(base: TunedTable) -> None:
    first, second = parts_of(base, 2)
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
