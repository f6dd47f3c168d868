"""Finds present kernels with the machine code of earlier kernels that have receipts.

A record names only its own kernel. For its sibling, a table has only receipts with the earlier digest. The
same is true of its own kernel under another Triton after a restamp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from flashtune.core.kernel import Kernel, canonical_source
from flashtune.core.record import Record
from flashtune.db.codec import Check
from flashtune.dispatch.versions import current_versions
from flashtune.launch.compilation import kernel_folder
from flashtune.templates.hashing import template_hash
from flashtune.templates.registry import families, find_family
from flashtune.templates.rendering import render
from flashtune.tuner.restamp.earlier_sources import EarlierSources
from flashtune.tuner.restamp.restamp import Progress, differences
from flashtune.tuner.tables.admission import facts_of
from flashtune.tuner.tables.table_receipts import sibling


def successors(
    receipts: Iterable[Check], records: Iterable[Record], folders: Iterable[Path], progress: Progress
) -> dict[str, Record]:
    """Returns a record of the present kernel for each earlier digest of the same machine code.

    Two kernels are compared at the problem of each record that has the present one, as its own or as its
    sibling. Receipts of compilers that are not installed are left out: equal code of one compiler does not
    imply equal code of another.

    Args:
        receipts: Receipts. Those of an installed template version are left out.
        records: Records that name the present kernels.
        folders: Folders with sources of earlier kernels, in addition to the kernel cache.
        progress: As in `restamp.restamp`.
    """
    digests = _earlier(receipts)
    users = _users(records) if digests else {}
    sources = EarlierSources([kernel_folder(), *folders])
    pairs: dict[str, tuple[Kernel, Kernel]] = {}
    for digest in digests:
        found = [(old, new) for new in users if (old := sources.kernel(digest, new))]
        if found:
            # Kernels with the same arguments and options may still differ, for example in a tile size.
            pairs[digest] = min(found, key=lambda pair: _differing_lines(*pair))
    jobs = {
        (digest, place): (old, new, record.problem, record.config, facts_of(record))
        for digest, (old, new) in pairs.items()
        for place, record in enumerate(users[new])
    }
    found_different = differences("comparing receipts", jobs, progress)
    different = {digest for (digest, _), why in found_different.items() if why}
    return {digest: users[new][0] for digest, (_, new) in pairs.items() if digest not in different}


def _earlier(receipts: Iterable[Check]) -> list[str]:
    """Returns the digests of receipts of the installed compilers and of other template versions."""
    names = [family.name for family in families()]
    templates, compilers = {template_hash(name) for name in names}, current_versions(names[0]).compilers
    earlier = (
        one.digest
        for one in receipts
        if one.versions.template not in templates and one.versions.compilers == compilers
    )
    return list(dict.fromkeys(earlier))


def _users(records: Iterable[Record]) -> dict[Kernel, list[Record]]:
    """Returns the kernels of records and of their siblings, each with its records."""
    users: dict[Kernel, list[Record]] = {}
    for record in records:
        if record.config is None or record.kernel is None:
            continue
        for specialization in (record.specialization, sibling(record)):
            kernel = render(find_family(record.family), record.problem, record.config, specialization)
            user = msgspec.structs.replace(
                record,
                specialization=specialization,
                kernel=kernel.digest,
                versions=current_versions(record.family),
            )
            users.setdefault(kernel, []).append(user)
    return users


def _differing_lines(old: Kernel, new: Kernel) -> int:
    """Returns the number of lines that only one of two kernels has."""
    before, after = (Counter(canonical_source(one.source).splitlines()) for one in (old, new))
    return (before - after).total() + (after - before).total()
