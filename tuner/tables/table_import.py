"""Import of table files into a database, in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from flashtune.core.errors import TableError
from flashtune.db.table import load_table
from flashtune.templates.hashing import template_hash
from flashtune.tuner.tables.admission import require_admissible
from flashtune.tuner.tables.table_receipts import stray_receipts

if TYPE_CHECKING:
    from pathlib import Path

    from flashtune.core.record import Record
    from flashtune.db.store import MergeCounts
    from flashtune.db.table import TunedTable

# Called with a phase, the number of its finished steps, and the number of all its steps.
Watch = Callable[[str, int, int], None]
# Number of records between two reports of progress.
COUNTED = 50


def import_tables(
    paths: Sequence[Path], db: str | None, watch: Watch = lambda phase, done, total: None
) -> MergeCounts:
    """Stores the records and selections of table files in a database.

    All files are read and checked before the database is opened. They are then stored in one
    transaction. If a table and the database both have a selection, the faster measured one stays for
    equal versions, else the database's. Receipts of installed template versions become self-checks.

    Raises:
        TableError: A file is not a table, or verification would reject one of its records or receipts.
        StoreError: The database cannot be written. It is then unchanged.
    """
    from flashtune.db.store import open_store

    tables = [_checked(path, watch) for path in paths]
    taken, total = 0, sum(len(table.records) for table in tables)

    def count(records: int) -> None:
        nonlocal taken
        taken += records
        watch("storing records", taken, total)

    with open_store(db) as store:
        return store.merge_tables(*tables, progress=count)


def _checked(path: Path, watch: Watch) -> TunedTable:
    table = load_table(path)
    require_admissible(_counted(table.records, f"checking {path.name}", watch), str(path))
    strays = stray_receipts(table)
    if strays:
        position = table.receipts.index(strays[0]) + 1
        raise TableError(f"{path}, receipt {position} cannot be used: no record has its kernel")
    # Kernels of other template versions do not render here, so they cannot be matched with records.
    known = {template_hash(record.family) for record in table.records if record.config is not None}
    receipts = tuple(one for one in table.receipts if one.versions.template in known)
    return msgspec.structs.replace(table, receipts=receipts)


def _counted(records: tuple[Record, ...], phase: str, watch: Watch) -> Iterator[Record]:
    """Yields the records, and reports their number to `watch` every `COUNTED` records."""
    for number, record in enumerate(records):
        if number % COUNTED == 0:
            watch(phase, number, len(records))
        yield record
    watch(phase, len(records), len(records))
