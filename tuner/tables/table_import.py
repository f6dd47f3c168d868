"""Tables from elsewhere into a database: all of what was asked, or nothing."""

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

# A phase, how many of its steps are done, and how many there are.
Watch = Callable[[str, int, int], None]
# Records that are checked between two reports.
COUNTED = 50


def import_tables(
    paths: Sequence[Path], db: str | None, watch: Watch = lambda phase, done, total: None
) -> MergeCounts:
    """Brings the records and selections of table files into a database.

    All files are read and checked before the database is opened, and their content then enters it
    in one transaction. Where a table and the database both have a selection, the faster measured
    one stays if the same versions made both, else the database's. Receipts under an installed template
    version become self-checks.

    Raises:
        TableError: A file is not a table, or verification would refuse one of its records or receipts.
        StoreError: The database cannot be written; it is then as it was.
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
    # Another template version's kernels do not render here, so that they cannot be matched with records.
    known = {template_hash(record.family) for record in table.records if record.config is not None}
    receipts = tuple(one for one in table.receipts if one.versions.template in known)
    return msgspec.structs.replace(table, receipts=receipts)


def _counted(records: tuple[Record, ...], phase: str, watch: Watch) -> Iterator[Record]:
    """The records one after another; `watch` is called now and then with their number so far."""
    for number, record in enumerate(records):
        if number % COUNTED == 0:
            watch(phase, number, len(records))
        yield record
    watch(phase, len(records), len(records))
