"""Bundles of selections that were verified here."""

from collections import defaultdict
from collections.abc import Iterable

from flashtune.bundle.bundle_file import bundle_of, dump_bundle, merged
from flashtune.core import VERSION
from flashtune.core.errors import FlashtuneError
from flashtune.core.record import Record
from flashtune.db.eligibility import by_problem
from flashtune.db.table import TunedTable
from flashtune.dispatch.tables import Tables
from flashtune.dispatch.versions import current_versions
from flashtune.tuner.tables.admission import facts_of
from flashtune.tuner.tables.bundles import build
from flashtune.tuner.tables.warm import Watch


def verified_bundles(records: Iterable[Record], watch: Watch) -> dict[str, bytes]:
    """Returns the machine code of verified kernels as a bundle for each architecture of NVIDIA.

    Kernels that another Triton or ptxas compiled are left out. The installed one may make other machine code.
    """
    by_target: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        passed = record.config is not None and record.verdict is not None and record.verdict.passed
        if passed and record.versions.compilers == current_versions(record.family).compilers:
            by_target[record.target].append(record)
    parts = defaultdict(list)
    for name, own in sorted(by_target.items()):
        target = facts_of(own[0])
        if target is not None and target.is_nvidia:
            calls = [(record.problem, record.specialization) for record in own]
            tables = Tables(database=by_problem(own), shipped={})
            built = build(calls, target, tables, [TunedTable(target=name, records=tuple(own))], watch=watch)
            parts[target.arch].append(dump_bundle(target.arch, VERSION, built.entries, built.codes))
    return {arch: _merged(arch, contents) for arch, contents in parts.items()}


def _merged(arch: str, contents: list[bytes]) -> bytes:
    if len(contents) == 1:
        return contents[0]
    return dump_bundle(arch, VERSION, *merged(bundle_of(content, arch) for content in contents))


def the_bundle(bundles: dict[str, bytes]) -> bytes:
    """Returns the bundle of the only architecture."""
    if not bundles:
        raise FlashtuneError(
            "the installed Triton compiled none of these selections on an NVIDIA GPU: search here"
        )
    if len(bundles) > 1:
        raise FlashtuneError(
            f"a bundle holds one architecture, and these are {' and '.join(bundles)}: name a GPU by --target"
        )
    return next(iter(bundles.values()))
