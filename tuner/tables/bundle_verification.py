"""Verifies the machine code of a bundle on a GPU, and writes receipts."""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import torch

from flashtune.bundle.bundle_file import Bundle
from flashtune.bundle.driver import Driver
from flashtune.bundle.records import Entry, Receipt
from flashtune.core.errors import FlashtuneError, KernelError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.record import Record
from flashtune.core.target import Target
from flashtune.dispatch.lookup import select
from flashtune.dispatch.tables import Tables
from flashtune.dispatch.versions import driver_version
from flashtune.launch.bundle_binding import BundledBinary, load_entry
from flashtune.launch.bundles import bundled_kernel, recipe_of
from flashtune.tuner.tables.warm import Call, Watch
from flashtune.verification.cases import Level
from flashtune.verification.check import check_rendered


class Use(NamedTuple):
    """A problem that a kernel serves, by its record."""

    problem: Problem
    record: Record
    specialization: Specialization


def uses_of(bundle: Bundle, calls: Iterable[Call], target: Target, tables: Tables) -> dict[str, Use]:
    """Returns a use of each kernel of a bundle that dispatch chooses for calls, by the kernel's digest."""
    uses: dict[str, Use] = {}
    for problem, specialization in dict.fromkeys(calls):
        try:
            record = select(problem, target, tables, specialization, generated=True).record
        except FlashtuneError:
            continue  # no kernel computes it, as the build reported
        kernel = bundle.index.recipes.get(recipe_of(record, specialization))
        if kernel is not None:
            same = msgspec.structs.replace(problem, causal=record.problem.causal)
            uses.setdefault(kernel, Use(same, record, specialization))
    return uses


def verified(
    bundle: Bundle,
    uses: dict[str, Use],
    target: Target,
    device: torch.device,
    level: Level = Level.FULL,
    part: tuple[int, int] = (0, 1),
    watch: Watch = lambda phase, done, total: None,
) -> Iterator[tuple[Entry, str]]:
    """Yields all entries, with a new receipt for this GPU if they have none and pass, and why others fail.

    With `part`, only every n-th kernel from the first number on is verified. Stops after an error of the GPU.
    """
    driver, failure = Driver(), ""
    first, step = part
    checked = set(itertools.islice(sorted(uses), first, None, step))
    for number, kernel in enumerate(bundle.index.entries):
        watch("verifying", number, len(bundle.index.entries))
        entry = bundle.entry(kernel)
        assert entry is not None
        held = any(
            (receipt.machine, receipt.target) == (entry.machine, target.name) for receipt in entry.receipts
        )
        reason = ""
        if kernel in checked and not held and not failure:
            problem, record, specialization = uses[kernel]
            assert record.config is not None
            try:
                binary = BundledBinary(entry, load_entry(entry, bundle.code, driver, device), driver)
                whole = bundled_kernel(entry, record, specialization)
                verdict = check_rendered(
                    whole, problem, record.config, target, device, level, compiled=binary
                )
            except KernelError as error:
                reason = str(error)
                failure = _failure(device)
            else:
                receipt = Receipt(entry.machine, target.name, driver_version(), verdict)
                if verdict.passed:
                    entry = msgspec.structs.replace(entry, receipts=(*entry.receipts, receipt))
                reason = "" if verdict.passed else f"its results are wrong: {verdict.failed}"
        yield entry, f"{record.family} {kernel}: {reason}" if reason else ""
    if failure:
        raise KernelError(
            f"the GPU failed after the last kernel ({failure}): verify the rest in a new process"
        )


def _failure(device: torch.device) -> str:
    """Returns the error of a GPU that a kernel made unusable, or an empty text."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""
