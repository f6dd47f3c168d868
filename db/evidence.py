"""The records of a table under the installed versions."""

from collections.abc import Callable

import msgspec

from flashtune.core.record import Measurement, Record, SharedTime, Versions
from flashtune.db.table import TunedTable


def under(table: TunedTable, versions_of: Callable[[str], Versions]) -> tuple[Record, ...]:
    """Returns the records of a table with its receipts and times for other versions than theirs.

    A record whose kernel passed and was timed under those versions gets them, the verdict and the time. If no
    baselines were timed again, the earlier times stay: Triton does not compile baselines. Times with shared
    masks stay too, the kernel's scaled in proportion to its other time.

    Every other record stays unchanged, with the time that selection and estimates need and its own versions.
    A receipt without a time still saves the kernel its self-check. `versions_of` returns the versions to look
    for, from a family's name.
    """
    receipts = {(receipt.digest, receipt.versions.makers): receipt for receipt in table.receipts}
    times = {
        (timing.problem, timing.kernel, timing.versions.makers): timing.measurement for timing in table.times
    }

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
    """Returns earlier times with shared masks, the kernel's scaled in proportion to its other time."""
    if not earlier.shared:
        return earlier.shared
    return tuple(msgspec.structs.replace(shared, ms=shared.ms * ms / earlier.ms) for shared in earlier.shared)
