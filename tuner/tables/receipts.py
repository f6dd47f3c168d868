"""Receipts: verdicts of a GPU, stored with a record and valid for one kernel digest."""

from __future__ import annotations

import msgspec

from flashtune.core.record import Outcome, Provenance, Record
from flashtune.core.target import names_gpu
from flashtune.dispatch.versions import current_versions

# The device of verdicts by the interpreter, which are not receipts.
INTERPRETER = "interpreter"


class Receipt(msgspec.Struct, frozen=True):
    """The stored result of a verification on a GPU.

    Attributes:
        device: The GPU.
        driver, triton, ptxas, torch: Versions of that run.
        kernel: Digest of the kernel: source and specialization.
        worst_ratio: Largest ratio of a row's error to its tolerance.
        checks: Number of compared problems and probes.
        probes: The passed probes; empty in old receipts without a list.
    """

    device: str
    driver: str
    triton: str
    ptxas: str
    torch: str
    kernel: str
    worst_ratio: float
    checks: int
    probes: tuple[str, ...]


def receipt_of(record: Record) -> Receipt:
    """Returns the receipt of a record that passes `receipt_fault`."""
    verdict, versions = record.verdict, record.versions
    assert verdict is not None
    assert record.kernel is not None
    return Receipt(
        device=verdict.device,
        driver=versions.driver,
        triton=versions.triton,
        ptxas=versions.ptxas,
        torch=versions.torch,
        kernel=record.kernel,
        worst_ratio=verdict.worst_ratio,
        checks=verdict.checks,
        probes=() if verdict.probes is msgspec.UNSET else verdict.probes,
    )


def never_verified(record: Record) -> bool:
    """Returns whether a record's kernel was never verified on a GPU."""
    return record.verdict is None or record.verdict.device == INTERPRETER


def receipt_flaw(record: Record) -> str:
    """Returns why a measured record cannot come from a search on its GPU; empty if it can.

    A search verifies the kernels that it selects, and stores the verdict with the name of its GPU.
    """
    if record.provenance is not Provenance.MEASURED or record.outcome is not Outcome.OK:
        return ""
    if record.verdict is None or never_verified(record):
        return "has no receipt: no GPU ever verified it"
    if not names_gpu(record.target, record.verdict.device):
        return f"has a receipt of another GPU: {record.verdict.device!r}"
    return ""


def receipt_fault(record: Record, digest: str, same_triton: bool) -> str:
    """Returns why a record's receipt is invalid for a kernel; empty if it is valid.

    Args:
        record: The record.
        digest: Digest of the kernel that renders here. It must equal that of the receipt.
        same_triton: Whether a receipt of another Triton version counts as stale.
    """
    here = current_versions(record.family)
    if record.verdict is None or never_verified(record):
        return "has no receipt: no GPU ever verified it"
    if not names_gpu(record.target, record.verdict.device):
        return f"has a receipt of another GPU: {record.verdict.device!r}"
    if not record.verdict.passed:
        return f"has a receipt of failure: {record.verdict.failed}"
    if record.kernel != digest or record.versions.template != here.template:
        return "has a stale receipt: the kernel that renders here is another than the one that was verified"
    if same_triton and record.versions.triton != here.triton:
        return (
            f"has a stale receipt: verified with Triton {record.versions.triton}, and here is {here.triton}"
        )
    return ""
