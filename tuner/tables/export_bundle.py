"""Bundles of selections that were verified here."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from flashtune.bundle.bundle_file import dump_bundle, open_bundle, united
from flashtune.bundle.records import Entry
from flashtune.core import VERSION
from flashtune.core.errors import FlashtuneError
from flashtune.core.record import Record
from flashtune.db.eligibility import by_problem
from flashtune.dispatch.tables import Tables
from flashtune.launch.bundle_entries import TAIL
from flashtune.tuner.tables.admission import facts_of
from flashtune.tuner.tables.bundles import build
from flashtune.tuner.tables.warm import Watch


def verified_bundles(
    records: Iterable[Record], watch: Watch, stored: Callable[[str], Path | None] = lambda arch: None
) -> dict[str, bytes]:
    """Returns the verified machine code of kernels as a bundle for each architecture of NVIDIA.

    Code of the bundle `stored` of an architecture is taken as it is. Other code is compiled, and left out
    without a receipt of the repository for it: a second compilation may give other machine code.
    """
    by_target: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.config is not None:
            by_target[record.target].append(record)
    entries: dict[str, list[Entry]] = defaultdict(list)
    codes: dict[str, bytes] = {}
    for name, own in sorted(by_target.items()):
        target = facts_of(own[0])
        if target is not None and target.is_nvidia:
            calls = [(record.problem, record.specialization) for record in own]
            base = stored(target.arch)
            if base is not None and base.exists():
                open_bundle(base, own=True)  # Refuses a file that another user can have written.
            else:
                base = None
            tables = Tables(database=by_problem(own), shipped={})
            built = build(calls, target, tables, base, watch)
            verified = [entry for entry in built.entries if name in entry.verified_on]
            if verified:
                tails = (entry for entry in built.entries if entry.family == TAIL)
                entries[target.arch] += (*verified, *tails)
                codes |= built.codes
    return {arch: dump_bundle(arch, VERSION, united(own), codes) for arch, own in entries.items()}


def the_bundle(bundles: dict[str, bytes]) -> bytes:
    """Returns the bundle of the only architecture."""
    if not bundles:
        raise FlashtuneError(
            "none of these selections has verified machine code of the installed Triton: search here"
        )
    if len(bundles) > 1:
        raise FlashtuneError(
            f"a bundle holds one architecture, and these are {' and '.join(bundles)}: name a GPU by --target"
        )
    return next(iter(bundles.values()))
