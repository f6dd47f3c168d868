"""A kernel that nobody proved here is proven before its first use, once per machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashtune.errors import StoreError
from flashtune.notices import tell_once
from flashtune.versions import current_versions

if TYPE_CHECKING:
    from flashtune.config import Config
    from flashtune.kernel import Kernel
    from flashtune.problem import Problem
    from flashtune.record import Verdict
    from flashtune.target import Target

# What this process found or read, by (digest, target's name).
_known: dict[tuple[str, str], bool] = {}


def known_verdict(kernel: Kernel, target: Target) -> bool | None:
    """Whether a kernel passed its self-check on this machine under these versions; None if it had none.

    Raises:
        StoreError: The database is damaged, locked or out of reach.
    """
    from flashtune.db.reader import open_reader

    key = (kernel.digest, target.name)
    if key not in _known:
        reader = open_reader()
        passed = reader.check(kernel.digest, target.name, current_versions(kernel.family)) if reader else None
        if passed is None:
            return None
        _known[key] = passed
    return _known[key]


def passes_self_check(
    kernel: Kernel, problem: Problem, config: Config, target: Target, device: torch.device
) -> bool:
    """Whether a kernel is right on this GPU, by memory or by a check of well under a second.

    The verdict is remembered in the user's database; where that cannot be read or written, a warning
    says so and this process alone remembers.

    Raises:
        KernelError: It does not compile, load or launch.
    """
    try:
        known = known_verdict(kernel, target)
    except StoreError as error:
        tell_once("database", f"{error} (until then kernels are checked again in every process)")
        known = None
    if known is not None:
        return known
    from flashtune.proof.cases import Level
    from flashtune.proof.check import check_rendered

    verdict = check_rendered(kernel, problem, config, target, device, Level.QUICK)
    _known[kernel.digest, target.name] = verdict.passed
    _remember(kernel, target, verdict)
    return verdict.passed


def forget_verdicts() -> None:
    """The database is asked again."""
    _known.clear()


def _remember(kernel: Kernel, target: Target, verdict: Verdict) -> None:
    from flashtune.db.checks import Check
    from flashtune.db.store import open_store

    check = Check(
        digest=kernel.digest, target=target.name, versions=current_versions(kernel.family), verdict=verdict
    )
    try:
        with open_store() as store:
            store.remember_check(check)
    except StoreError as error:
        tell_once("database", f"{error} (until then kernels are checked again in every process)")
