"""Receipts: a GPU's verdict that is stored with a record and bound to one kernel by its digest."""

from __future__ import annotations

import msgspec

from flashtune.core.record import Outcome, Provenance, Record
from flashtune.core.target import names_gpu
from flashtune.dispatch.versions import current_versions

# A verdict of the interpreter is no receipt.
INTERPRETER = "interpreter"


class Receipt(msgspec.Struct, frozen=True):
    """What a GPU's verification left with a record.

    Attributes:
        device: The GPU.
        driver, triton, ptxas, torch: What ran there.
        kernel: Digest of the kernel that ran, source and specialisation.
        worst_ratio: Largest row error over what the gate allows for the row.
        checks: Problems and probes compared.
        probes: The probes that were passed; empty in receipts older than their list.
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
    """The receipt of a record in which `receipt_fault` finds no fault."""
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
    """Whether no GPU ever verified a record's kernel."""
    return record.verdict is None or record.verdict.device == INTERPRETER


def receipt_flaw(record: Record) -> str:
    """Says why a measured record cannot have come from a search on its GPU, empty if it can.

    A search verifies what it selects. It stores the verdict of the GPU that it ran on.
    """
    if record.provenance is not Provenance.MEASURED or record.outcome is not Outcome.OK:
        return ""
    if record.verdict is None or never_verified(record):
        return "has no receipt: no GPU ever verified it"
    if not names_gpu(record.target, record.verdict.device):
        return f"has a receipt of another GPU: {record.verdict.device!r}"
    return ""


def receipt_fault(record: Record, digest: str, same_triton: bool) -> str:
    """What is wrong with a record's receipt for a kernel, empty if it is good.

    Args:
        record: The record.
        digest: Of the kernel as it renders here: a receipt is for the very same one.
        same_triton: Whether a receipt of another Triton than the one installed here counts as stale.
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
