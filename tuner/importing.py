"""Tables from elsewhere into a database: all of what was asked, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashtune.db.table import load_table

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from flashtune.db.store import MergeCounts


def import_tables(paths: Iterable[Path], db: str | None) -> MergeCounts:
    """Brings the records and selections of table files into a database.

    All files are read and checked before the database is opened, and their content then enters it
    in one transaction. Where a table and the database both have a selection, the faster measured
    one stays if the same versions made both, else the database's.

    Raises:
        TableError: A file is no table, or holds what may not serve.
        StoreError: The database cannot be written; it is then as it was.
    """
    from flashtune.db.store import open_store

    tables = [load_table(path) for path in paths]
    with open_store(db) as store:
        return store.merge_tables(*tables)
