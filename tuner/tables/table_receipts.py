"""Receipts of a table: adds verdicts and times of this machine's GPU to a verified table."""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from flashtune.core.errors import FlashtuneError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.record import Measurement, Record, Resources
from flashtune.db.codec import Check
from flashtune.db.table import TunedTable
from flashtune.dispatch.versions import current_versions
from flashtune.templates.registry import families, template_hash
from flashtune.tuner.tables.admission import digest_of


def sibling(record: Record) -> Specialization:
    """Returns the specialization of a record's sibling, which has the opposite setting of `lse`.

    In a backward pass `lse` means that the kernel takes the gradient of the log-sum-exp.
    """
    return msgspec.structs.replace(record.specialization, lse=not record.specialization.lse)


def with_receipts(
    table: TunedTable,
    passed: Iterable[tuple[Record, Check]],
    receipts: Iterable[Check],
    times: Mapping[Record, Measurement] | None = None,
    failed: Iterable[Check] = (),
    resources: Mapping[str, Resources] | None = None,
) -> TunedTable:
    """Returns a table with the verdicts and times of its GPU.

    - A record of the versions here gets the verdict of its kernel and the times with shared masks. Its own
      time does not change.
    - A record with the same kernel under another template version gets that version and the verdict.
    - Another record gets the kernel, versions, verdict and time of this machine, if it passed and was timed.

    Earlier receipts of the same kernels and versions are replaced. Stray receipts are left out.

    Args:
        table: The table.
        passed: Records of the table, each with the check of its own kernel.
        receipts: Passed checks of kernels of records and of their siblings.
        times: Times of kernels of records under the versions here.
        failed: Checks of kernels that failed. Their earlier receipts are left out.
        resources: Resources of timed kernels that differ from those of their records, by digest.
    """
    times = times or {}
    wrong = {(check.digest, check.versions.makers) for check in failed}
    proven = {(check.digest, check.versions.makers): check for check in table.receipts}
    proven = {binary: check for binary, check in proven.items() if binary not in wrong}
    checks = dict(passed)
    for record in times.keys() - checks.keys():
        # An earlier run verified the kernel.
        if check := proven.get((digest_of(record), current_versions(record.family).makers)):
            checks[record] = check
    records = tuple(
        _renewed(record, checks.get(record), times.get(record), resources or {}) for record in table.records
    )
    makers: dict[str | None, set[tuple[str, ...]]] = {}
    for record in records:
        if record.verdict is not None and record.verdict.passed:
            makers.setdefault(record.kernel, set()).add(record.versions.makers)
    proven |= {(check.digest, check.versions.makers): check for check in receipts}
    # Records with the verdict need no receipt.
    kept = (check for binary, check in proven.items() if makers.get(binary[0]) != {binary[1]})
    return without_strays(msgspec.structs.replace(table, records=records, receipts=tuple(kept)))


def _renewed(
    record: Record, check: Check | None, time: Measurement | None, resources: Mapping[str, Resources]
) -> Record:
    """Returns a record with the verdict and time of its kernel."""
    own = record.kernel, record.versions.builders
    if time is not None and own == (digest_of(record), current_versions(record.family).builders):
        assert record.measurement is not None
        shared = time.shared or record.measurement.shared
        measurement = msgspec.structs.replace(record.measurement, shared=shared)
        record = msgspec.structs.replace(record, measurement=measurement)
    if check is not None and own == (check.digest, check.versions.builders):
        # Another version of the template renders the same kernel, so its time stays valid.
        versions = msgspec.structs.replace(record.versions, template=check.versions.template)
        return msgspec.structs.replace(record, versions=versions, verdict=check.verdict)
    if check is None or time is None:
        return record
    return msgspec.structs.replace(
        record,
        kernel=check.digest,
        versions=check.versions,
        verdict=check.verdict,
        measurement=time,
        resources=resources.get(check.digest),
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


def without_strays(table: TunedTable) -> TunedTable:
    """Returns a table without stray receipts."""
    strays = stray_receipts(table)
    receipts = tuple(receipt for receipt in table.receipts if receipt not in strays)
    return msgspec.structs.replace(table, receipts=receipts)


def part_of(table: TunedTable, problems: Collection[Problem]) -> TunedTable:
    """Returns a table of the records of some problems, with the receipts of their kernels."""
    records = tuple(record for record in table.records if record.problem in problems)
    kernels = {kernel for record in records for kernel, _ in _kernels(record)}
    kernels |= {record.kernel for record in records if record.kernel is not None}
    receipts = tuple(receipt for receipt in table.receipts if receipt.digest in kernels)
    return msgspec.structs.replace(table, records=records, receipts=receipts)
