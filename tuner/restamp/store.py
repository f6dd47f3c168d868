"""Restamps the records of a table or a database, with receipts and times of their kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from flashtune.core.record import Record, Versions
from flashtune.db.codec import Check
from flashtune.db.store import open_store
from flashtune.db.table import TunedTable, dump_table, load_table
from flashtune.tuner.restamp.receipts import successors
from flashtune.tuner.restamp.restamp import Fate, Progress, Restamped, quiet, restamp
from flashtune.tuner.tables.admission import digest_of
from flashtune.tuner.tables.export import write_file
from flashtune.tuner.tables.table_receipts import sibling


class RestampedTable(NamedTuple):
    """The restamped records of a table, and the number of moved receipts.

    Attributes:
        records: The table's records after the comparison.
        receipts: The number of moved receipts.
    """

    records: tuple[Restamped, ...]
    receipts: int


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
        for before, one in zip(table.records, done, strict=True)
        if one.fate is Fate.CARRIED
    }
    current = [one.record for one in done if one.fate in (Fate.CARRIED, Fate.CURRENT)]
    others = [one for one in table.receipts if one.digest not in carried]
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
    carried = [(before, one.record) for before, one in pairs if one.fate is Fate.CARRIED]
    siblings = [msgspec.structs.replace(after, specialization=sibling(after)) for _, after in carried]
    same = [msgspec.structs.replace(one, kernel=digest_of(one)) for one in siblings]
    kernels = {
        **{str(one.kernel): one for one in same},
        **{str(before.kernel): after for before, after in carried},
        **successors,
    }
    places = {(before.problem.key, before.kernel): after for before, after in carried}
    records = tuple(one.record for one in done)
    kept = {one.record.kernel for one in done if one.fate is not Fate.CARRIED}
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


def restamp_database(
    db: str | None, folders: Iterable[Path] = (), progress: Progress = quiet
) -> tuple[Restamped, ...]:
    """Restamps the records of a database. Selections then refer to the restamped ones.

    Raises:
        StoreError: The database cannot be read or written.
    """
    with open_store(db) as store:
        stored = store.records()
        done = restamp((entry.record for entry in stored), folders, progress)
        carried = {
            entry.id: one.record for entry, one in zip(stored, done, strict=True) if one.fate is Fate.CARRIED
        }
        store.replace_records(carried)
    return done
