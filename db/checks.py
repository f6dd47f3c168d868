"""`Check`: the remembered verdict of a self-check, so that a kernel is proven once per machine."""

from __future__ import annotations

import msgspec

from flashtune.record import Digest, Seconds, Verdict, Versions
from flashtune.target import TargetName


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a self-check said of one kernel on one GPU under one set of versions.

    Attributes:
        digest: The kernel's digest.
        target: Name of the GPU that it ran on.
        versions: What was installed.
        verdict: What the check found.
        seconds: What a self-check of the loaded kernel took; None where another command made the verdict.
    """

    digest: Digest
    target: TargetName
    versions: Versions
    verdict: Verdict
    seconds: Seconds | None = None
