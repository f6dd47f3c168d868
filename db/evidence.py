"""The records of a table as they stand under the versions that are installed."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from flashtune.core.record import Measurement, Record, SharedTime, Versions
from flashtune.db.table import TunedTable


def under(table: TunedTable, versions_of: Callable[[str], Versions]) -> tuple[Record, ...]:
    """The records of a table with the evidence that it has for other versions than theirs.

    A record whose kernel passed and was timed under those versions takes them, the verdict and the time. If
    no peers were timed again, the earlier ones stay: Triton does not compile them. So do times with shared
    masks, the kernel's in proportion to its other time.

    Every other record stays as it is, with the time that choices and forecasts need and the versions that it
    was measured under. A receipt without a time still saves the kernel its self-check.

    Args:
        table: The table.
        versions_of: The versions to look for, by a family's name.
    """
    receipts = {(one.digest, one.versions.makers): one for one in table.receipts}
    times = {(one.problem, one.kernel, one.versions.makers): one.measurement for one in table.times}

    def known(record: Record) -> Record:
        if record.config is None or record.kernel is None or record.measurement is None:
            return record
        makers = versions_of(record.family).makers
        receipt = receipts.get((record.kernel, makers))
        time = times.get((record.problem.key, record.kernel, makers))
        if receipt is None or time is None or record.versions.makers == makers:
            return record
        time = msgspec.structs.replace(
            time,
            peers=time.peers or record.measurement.peers,
            shared=time.shared or _under_other_compiler(record.measurement, time.ms),
        )
        return msgspec.structs.replace(
            record, versions=receipt.versions, verdict=receipt.verdict, measurement=time
        )

    return tuple(known(record) for record in table.records)


def _under_other_compiler(earlier: Measurement, ms: float) -> tuple[SharedTime, ...] | msgspec.UnsetType:
    """Returns earlier times with shared masks, the kernel's in proportion to its time now."""
    if not earlier.shared:
        return earlier.shared
    return tuple(msgspec.structs.replace(one, ms=one.ms * ms / earlier.ms) for one in earlier.shared)
