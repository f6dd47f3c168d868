"""Receipts of a table: adds verdicts and times of this machine's GPU to a verified table."""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from flashtune.core.errors import FlashtuneError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.record import Record, Resources
from flashtune.db.codec import Check
from flashtune.db.table import Timing, TunedTable
from flashtune.templates.registry import families, template_hash
from flashtune.tuner.tables.admission import digest_of

# Keys: a kernel digest with its versions, and a problem key with the digest of the timed kernel.
_Proven = tuple[str, tuple[str, str, str, str]]
_Timed = tuple[str, str]


def sibling(record: Record) -> Specialization:
    """Returns the specialization of a record's sibling, which has the opposite setting of `lse`.

    In a backward pass `lse` means that the kernel takes the gradient of the log-sum-exp.
    """
    return msgspec.structs.replace(record.specialization, lse=not record.specialization.lse)


def with_receipts(
    table: TunedTable,
    passed: Iterable[tuple[Record, Check]],
    receipts: Iterable[Check],
    times: Iterable[Timing] = (),
    failed: Iterable[Check] = (),
    resources: Mapping[str, Resources] | None = None,
) -> TunedTable:
    """Returns a table with the verdicts and times of its GPU.

    - A record of the same versions gets the verdict of its kernel and the times with shared masks. Its own
      time does not change.
    - A record with the same kernel under another template version gets that version and the verdict.
    - A record that now renders another kernel gets the digest, versions, verdict and time of that kernel,
      if it passed and was timed.

    Earlier receipts and times of the same kernels and versions are replaced. Stray receipts are left out.

    Args:
        table: The table.
        passed: Records of the table, each with the check of its own kernel.
        receipts: Passed checks of kernels of records and of their siblings.
        times: Times of kernels of records under the versions here.
        failed: Checks of kernels that failed. Their earlier receipts are left out.
        resources: Resources of kernels that differ from their records' kernels, by digest.
    """
    times = tuple(times)
    wrong = {(check.digest, check.versions.makers) for check in failed}
    proven = {(check.digest, check.versions.makers): check for check in table.receipts}
    proven = {binary: check for binary, check in proven.items() if binary not in wrong}
    measured = {(timing.problem, timing.kernel): timing for timing in times}
    checks = dict(passed)
    records = tuple(
        _renewed(
            record, checks.get(record) or _earlier_check(record, measured, proven), measured, resources or {}
        )
        for record in table.records
    )
    makers: dict[str | None, set[tuple[str, ...]]] = {}
    for record in records:
        if record.verdict is not None and record.verdict.passed:
            makers.setdefault(record.kernel, set()).add(record.versions.makers)
    proven |= {(check.digest, check.versions.makers): check for check in receipts}
    # Records with the verdict need no receipt.
    proven = {binary: check for binary, check in proven.items() if makers.get(binary[0]) != {binary[1]}}
    timed = {
        (timing.problem, timing.kernel, timing.versions.makers): timing
        for listed in (table.times, times)
        for timing in listed
    }
    # Records with the time need no entry in the table's times.
    own = {(record.problem.key, record.kernel, record.versions.makers) for record in records}
    return without_strays(
        msgspec.structs.replace(
            table,
            records=records,
            receipts=tuple(proven.values()),
            times=tuple(timing for key, timing in timed.items() if key not in own),
        )
    )


def _earlier_check(
    record: Record, measured: Mapping[_Timed, Timing], proven: Mapping[_Proven, Check]
) -> Check | None:
    """Returns the receipt of an earlier run for the kernel that a record renders now, if any."""
    if all(problem != record.problem.key for problem, _ in measured):
        return None
    own = _kernels(record)[:1]
    timing = measured.get((record.problem.key, own[0][0])) if own else None
    return proven.get((timing.kernel, timing.versions.makers)) if timing else None


def _renewed(
    record: Record,
    check: Check | None,
    measured: Mapping[_Timed, Timing],
    resources: Mapping[str, Resources],
) -> Record:
    """Returns a record with the verdict of its kernel, if the record has a time under the same versions."""
    record = _with_shared_times(record, measured)
    if check is None:
        return record
    if check.versions.makers == record.versions.makers:
        return msgspec.structs.replace(record, verdict=check.verdict)
    if check.digest == record.kernel and check.versions.builders == record.versions.builders:
        # Another version of the template renders the same kernel, so its time stays valid.
        versions = msgspec.structs.replace(record.versions, template=check.versions.template)
        return msgspec.structs.replace(record, versions=versions, verdict=check.verdict)
    timing = measured.get((record.problem.key, check.digest))
    if check.digest == record.kernel or timing is None:
        return record
    return msgspec.structs.replace(
        record,
        kernel=check.digest,
        versions=check.versions,
        verdict=check.verdict,
        measurement=timing.measurement,
        resources=resources.get(check.digest),
    )


def _with_shared_times(record: Record, measured: Mapping[_Timed, Timing]) -> Record:
    """Returns a record with the times with shared masks that were measured under its versions, if any."""
    again = measured.get((record.problem.key, record.kernel or ""))
    if again is None or again.versions.builders != record.versions.builders or record.measurement is None:
        return record
    shared = again.measurement.shared or record.measurement.shared
    return msgspec.structs.replace(
        record, measurement=msgspec.structs.replace(record.measurement, shared=shared)
    )


def stray_receipts(table: TunedTable) -> tuple[Check, ...]:
    """Returns receipts of installed template versions for kernels that no record of the table has.

    The kernels of a record are its own one and its sibling, as they render here.
    """
    versions = {template_hash(family.name) for family in families()}
    current = [receipt for receipt in table.receipts if receipt.versions.template in versions]
    if not current:
        return ()
    kernels = {kernel for record in table.records for kernel in _kernels(record)}
    return tuple(receipt for receipt in current if (receipt.digest, receipt.versions.template) not in kernels)


def _kernels(record: Record) -> tuple[tuple[str, str], ...]:
    """Returns the digests of a record's own kernel and its sibling, each with its template version."""
    if record.config is None:
        return ()
    both = (record, msgspec.structs.replace(record, specialization=sibling(record)))
    try:
        return tuple((digest_of(variant), template_hash(variant.family)) for variant in both)
    except FlashtuneError:
        # Other checks report records that cannot be rendered here.
        return ()


def rendered_digests(records: Iterable[Record]) -> set[str]:
    """Returns the digests of the records' own kernels and of their siblings, as they render here."""
    return {kernel for record in records for kernel, _ in _kernels(record)}


def without_strays(table: TunedTable) -> TunedTable:
    """Returns a table without stray receipts, and without times of kernels that no record names."""
    strays = {(receipt.digest, receipt.versions.makers) for receipt in stray_receipts(table)}
    named = {(record.problem.key, record.kernel) for record in table.records}
    return msgspec.structs.replace(
        table,
        receipts=tuple(
            receipt for receipt in table.receipts if (receipt.digest, receipt.versions.makers) not in strays
        ),
        times=tuple(timing for timing in table.times if (timing.problem, timing.kernel) in named),
    )


def part_of(table: TunedTable, problems: Collection[Problem]) -> TunedTable:
    """Returns a table of the records of some problems, with the receipts and times of their kernels."""
    records = tuple(record for record in table.records if record.problem in problems)
    kernels = rendered_digests(records)
    kernels |= {record.kernel for record in records if record.kernel is not None}
    keys = {problem.key for problem in problems}
    return msgspec.structs.replace(
        table,
        records=records,
        receipts=tuple(receipt for receipt in table.receipts if receipt.digest in kernels),
        times=tuple(timing for timing in table.times if timing.problem in keys),
    )
