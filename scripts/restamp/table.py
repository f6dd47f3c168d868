"""Restamps the records of a table, with receipts and times of their kernels."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from flashtune.core.canonical_source import canonical_source
from flashtune.core.kernel import Kernel
from flashtune.core.record import Record, Versions
from flashtune.db.codec import Check
from flashtune.db.table import TunedTable, dump_table, load_table
from flashtune.dispatch.versions import current_versions
from flashtune.templates.registry import families, find_family, template_hash
from flashtune.templates.rendering import render
from flashtune.tuner.tables.admission import digest_of, facts_of
from flashtune.tuner.tables.table_files import write_file
from flashtune.tuner.tables.table_receipts import sibling
from scripts.restamp.restamp import EarlierSources, Fate, Progress, Restamped, differences, quiet, restamp


def successors(
    receipts: Iterable[Check], records: Iterable[Record], folders: Iterable[Path], progress: Progress
) -> dict[str, Record]:
    """Returns a record of the present kernel for each earlier digest of the same machine code.

    Two kernels are compared at the problem of each record that has the present one, as its own or as its
    sibling. Receipts of compilers that are not installed are left out: equal code of one compiler does not
    imply equal code of another. Receipts of an installed template version are left out too.
    """
    digests = _earlier(receipts)
    users = _users(records) if digests else {}
    sources = EarlierSources(folders)
    pairs: dict[str, tuple[Kernel, Kernel]] = {}
    for digest in digests:
        candidates = [(old, new) for new in users if (old := sources.kernel(digest, new))]
        if candidates:
            # Kernels with the same arguments and options may still differ, for example in a tile size.
            pairs[digest] = min(candidates, key=lambda pair: _differing_lines(*pair))
    jobs = {
        (digest, number): (old, new, record.problem, record.config, facts_of(record))
        for digest, (old, new) in pairs.items()
        for number, record in enumerate(users[new])
    }
    reasons = differences("comparing receipts", jobs, progress)
    different = {digest for (digest, _), why in reasons.items() if why}
    return {digest: users[new][0] for digest, (_, new) in pairs.items() if digest not in different}


def _earlier(receipts: Iterable[Check]) -> list[str]:
    """Returns the digests of receipts of the installed compilers and of other template versions."""
    names = [family.name for family in families()]
    templates, compilers = {template_hash(name) for name in names}, current_versions(names[0]).compilers
    earlier = (
        receipt.digest
        for receipt in receipts
        if receipt.versions.template not in templates and receipt.versions.compilers == compilers
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
    before, after = (Counter(canonical_source(kernel.source).splitlines()) for kernel in (old, new))
    return (before - after).total() + (after - before).total()


class RestampedTable(NamedTuple):
    """The restamped records of a table, and the number of moved receipts."""

    records: tuple[Restamped, ...]  # The table's records after the comparison.
    receipts: int  # The number of moved receipts.


def restamp_table(path: Path, folders: Iterable[Path] = (), progress: Progress = quiet) -> RestampedTable:
    """Restamps the records of a table file in place, and the receipts of their kernels and siblings.

    Raises:
        TableError: The file is not a table.
        FlashtuneError: The file cannot be written.
    """
    table = load_table(path)
    folders = tuple(folders)
    done = restamp(table.records, folders, progress)
    carried = {
        str(before.kernel)
        for before, entry in zip(table.records, done, strict=True)
        if entry.fate is Fate.CARRIED
    }
    current = [entry.record for entry in done if entry.fate in (Fate.CARRIED, Fate.CURRENT)]
    others = [receipt for receipt in table.receipts if receipt.digest not in carried]
    after = _restamped(table, done, successors(others, current, folders, progress))
    if after != table:
        write_file(path, dump_table(after))
    return RestampedTable(done, len({*after.receipts} - {*table.receipts}))


def _restamped(
    table: TunedTable, done: tuple[Restamped, ...], successors: Mapping[str, Record]
) -> TunedTable:
    """Returns the table with its restamped records, and moves receipts and times of their kernels.

    `_moved` decides which can be moved. A receipt also remains if a record still names its kernel. A time
    that cannot be moved is left out.
    """
    pairs = zip(table.records, done, strict=True)
    carried = [(before, entry.record) for before, entry in pairs if entry.fate is Fate.CARRIED]
    siblings = [msgspec.structs.replace(after, specialization=sibling(after)) for _, after in carried]
    same = [msgspec.structs.replace(record, kernel=digest_of(record)) for record in siblings]
    kernels = {
        **{str(record.kernel): record for record in same},
        **{str(before.kernel): after for before, after in carried},
        **successors,
    }
    places = {(before.problem.key, before.kernel): after for before, after in carried}
    records = tuple(entry.record for entry in done)
    kept = {entry.record.kernel for entry in done if entry.fate is not Fate.CARRIED}
    receipts: dict[tuple[str, tuple[str, ...]], Check] = {}
    for receipt in table.receipts:
        after = kernels.get(receipt.digest)
        versions = _moved(receipt.digest, receipt.versions, after)
        if after is None or versions is None or receipt.digest in kept:
            receipts.setdefault((receipt.digest, receipt.versions.makers), receipt)
        if after is not None and versions is not None:
            moved = msgspec.structs.replace(receipt, digest=str(after.kernel), versions=versions)
            receipts.setdefault((moved.digest, versions.makers), moved)
    times = []
    for time in table.times:
        after = places.get((time.problem, time.kernel))
        versions = _moved(time.kernel, time.versions, after)
        if after is None:
            times.append(time)
        elif versions is not None:
            times.append(msgspec.structs.replace(time, kernel=str(after.kernel), versions=versions))
    return msgspec.structs.replace(
        table, records=records, receipts=tuple(receipts.values()), times=tuple(times)
    )


def _moved(kernel: str, versions: Versions, after: Record | None) -> Versions | None:
    """Returns the versions of a receipt or time after its move to a record; None if it cannot be moved.

    Kernels of two digests were compared only under the record's compilers.
    """
    if after is None or (kernel != after.kernel and versions.compilers != after.versions.compilers):
        return None
    return msgspec.structs.replace(versions, template=after.versions.template)
