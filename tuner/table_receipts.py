"""Receipts of a table: the verdicts of a GPU here enter the table that was verified."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from flashtune.db.checks import Check
from flashtune.db.table import TunedTable
from flashtune.record import Record


def with_receipts(table: TunedTable, passed: Iterable[tuple[Record, tuple[Check, ...]]]) -> TunedTable:
    """Returns a table with the verdicts of records that passed on its GPU.

    A record that was measured under the same versions takes the verdict. Under other versions the verdict
    becomes a receipt. The verdicts of siblings are receipts always. An earlier receipt of the same kernel and
    versions is replaced.

    Args:
        table: The table.
        passed: Records of the table, each with the check of its kernel and then of its sibling.
    """
    verdicts: dict[Record, Check] = {}
    receipts = {(one.digest, one.versions.makers): one for one in table.receipts}
    for record, checks in passed:
        for place, check in enumerate(checks):
            if place == 0 and check.versions.makers == record.versions.makers:
                verdicts[record] = check
            elif check.verdict.passed:
                receipts[check.digest, check.versions.makers] = msgspec.structs.replace(check, seconds=None)
    records = tuple(
        msgspec.structs.replace(record, verdict=verdicts[record].verdict) if record in verdicts else record
        for record in table.records
    )
    return msgspec.structs.replace(table, records=records, receipts=tuple(receipts.values()))


def tritons(table: TunedTable) -> tuple[str, ...]:
    """The Triton versions under which kernels of a table were verified, in order."""
    proven = (one.versions.triton for one in table.receipts)
    measured = (
        one.versions.triton for one in table.records if one.verdict is not None and one.verdict.passed
    )
    return tuple(sorted({*proven, *measured}))
