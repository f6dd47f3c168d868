"""Lists of stored selections with TFLOP/s, the best SDPA time and the verification status."""

from collections.abc import Iterable

import msgspec

from flashtune.core.machine import triton_version
from flashtune.core.record import Outcome, Provenance, Record, VerificationStatus
from flashtune.dispatch.versions import NO_DRIVER, current_versions
from flashtune.tuner.tables.lookup import Found
from flashtune.tuner.workloads.work import operations

SDPA = "sdpa-"


class Listed(msgspec.Struct, frozen=True):
    """A selection with its derived figures."""

    found: Found  # The record and its source.
    tflops: float | None  # TFLOP/s by `work.operations`; None without a time.
    # Time of the fastest SDPA backend in the same run; None if none was timed.
    best_sdpa_ms: float | None
    standing: VerificationStatus  # Verification status under the versions installed here.
    # Whether it is the fallback for tensors that the selection before it cannot address.
    is_fallback: bool = False


def list_selections(entries: Iterable[Found]) -> tuple[Listed, ...]:
    """Returns the selections with their figures, in the same order. A fallback follows its selection."""
    listed: list[Listed] = []
    seen: set[tuple[str, str, str]] = set()
    for entry in entries:
        record = entry.record
        key = entry.source, record.target, record.problem.key
        listed.append(
            Listed(
                entry,
                tflops(record),
                best_sdpa_ms(record),
                standing(record),
                key in seen,
            )
        )
        seen.add(key)
    return tuple(listed)


def ranked(entries: Iterable[Found]) -> tuple[Found, ...]:
    """Sorts records by problem and target, then successful ones by time, then failures."""
    return tuple(sorted(entries, key=_order))


def tflops(record: Record) -> float | None:
    """Returns TFLOP/s by `work.operations`; None without a time."""
    return operations(record.problem) / record.ms / 1e9 if record.ms else None


def best_sdpa_ms(record: Record) -> float | None:
    """Returns the time of the fastest SDPA backend in the run of a record, in ms."""
    peers = record.measurement.peers if record.measurement else ()
    return min((peer.ms for peer in peers if peer.name.startswith(SDPA)), default=None)


def standing(record: Record) -> VerificationStatus:
    """Returns the verification status of a record at its own shape, under the versions installed here.

    The driver's version is not compared on a machine without a driver.
    """
    if record.config is None:
        return (
            VerificationStatus.TIMED
            if record.provenance is Provenance.MEASURED
            else VerificationStatus.UNPROVEN
        )
    # Compare this first: reading the version of ptxas, as below, imports Triton.
    if record.versions.triton != triton_version():
        return VerificationStatus.UNPROVEN
    here = current_versions(record.family)
    if here.driver == NO_DRIVER:
        here = msgspec.structs.replace(here, driver=record.versions.driver)
    if not record.is_proven(here):
        return VerificationStatus.UNPROVEN
    return (
        VerificationStatus.TIMED if record.provenance is Provenance.MEASURED else VerificationStatus.VERIFIED
    )


def _order(entry: Found) -> tuple[str, str, bool, bool, float, str, int]:
    record = entry.record
    return (
        record.problem.key,
        record.target,
        record.outcome is not Outcome.OK,
        record.provenance is Provenance.PREDICTED,
        record.ms or 0.0,
        record.outcome.value,
        entry.id,
    )
