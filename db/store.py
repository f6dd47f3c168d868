"""The store: every record, the selections and the self-checks, in SQLite or PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from flashtune.core.errors import StoreError
from flashtune.db.eligibility import why_not_selectable
from flashtune.db.engine import reading, writing
from flashtune.db.forgetting import Choose, Forgettable, Group, TakenBack, affected, forget, groups
from flashtune.db.location import database_url, describe
from flashtune.db.merge import MergeCounts, WhyRefused, merge, merge_tables
from flashtune.db.migrate import ready_engine, source_engine
from flashtune.db.queries import (
    fetched,
    insert_record,
    now,
    select_chosen,
    select_records,
    take_selection,
    take_stand_in,
    write_check,
)
from flashtune.db.replacing import replace_record
from flashtune.db.schema import RECORDS, SELECTIONS, STAND_INS
from flashtune.db.stored_rows import StoredRecord, readable
from flashtune.db.table import TunedTable, check_table

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, Table

    from flashtune.core.problem import Problem
    from flashtune.core.record import Record
    from flashtune.db.codec import Check

__all__ = ["MergeCounts", "Store", "StoredRecord", "open_store"]


def open_store(url: str | None = None) -> Store:
    """Opens a database for writing; creates it, or brings it to the present schema, where needed.

    Args:
        url: A path or an SQLAlchemy URL; None for `FLASHTUNE_DB` or the user's cache folder.

    Raises:
        StoreError: It is damaged, newer than this flashtune, not flashtune's, or unwritable; it
            is left as it was.
    """
    address = database_url(url)
    return Store(ready_engine(address), address)


class Store:
    """An open database. Safe under threads; several processes may each have their own.

    Attributes:
        url: The database's URL, as `open_store` takes it.
    """

    def __init__(self, engine: Engine, url: str) -> None:
        self._engine = engine
        self.url = url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections."""
        self._engine.dispose()

    def add(self, record: Record) -> int:
        """Stores a record for good and returns its id; the same record has one id, however often it comes.

        Raises:
            TableError: A field is outside its bounds, so that it could not be read again.
            StoreError: The database cannot be written.
        """
        with writing(self._engine, self.url) as connection:
            record_id, _ = insert_record(connection, record, now())
        return record_id

    def records(
        self, problem: Problem | None = None, target: str | None = None, family: str | None = None
    ) -> list[StoredRecord]:
        """All records, or those of a problem, a target, a family; oldest first.

        Rows that this flashtune cannot read are left out, and one `UnreadableRecord` warning says so.
        """
        query = select_records()
        if problem is not None:
            query = query.where(RECORDS.c.problem_key == problem.key)
        if target is not None:
            query = query.where(RECORDS.c.target == target)
        if family is not None:
            query = query.where(RECORDS.c.family == family)
        with reading(self._engine, self.url) as connection:
            return list(readable(fetched(connection, query), describe(self.url)))

    def pin(self, record_id: int) -> None:
        """Makes a record the selection of its (problem, target), in place of an earlier one.

        An earlier one stands in for it where the new one's family cannot address every tensor.

        Raises:
            StoreError: There is no such record, or it may not serve: it failed, or was measured and
                never verified.
        """
        with writing(self._engine, self.url) as connection:
            take_selection(connection, self._selectable(connection, record_id), record_id, now())

    def stand_in(self, record_id: int) -> bool:
        """Lets a record serve the tensors that the selection of its (problem, target) cannot address.

        Returns:
            False where there is no such selection, or this record cannot address them either.

        Raises:
            StoreError: As `pin`.
        """
        with writing(self._engine, self.url) as connection:
            return take_stand_in(connection, self._selectable(connection, record_id), record_id, now())

    def _selectable(self, connection: Connection, record_id: int) -> Record:
        query = select_records().where(RECORDS.c.id == record_id)
        found = list(readable(fetched(connection, query), describe(self.url)))
        if not found:
            raise StoreError(f"{describe(self.url)} has no record {record_id}: `flashtune show` lists them")
        reason = why_not_selectable(found[0].record)
        if reason:
            raise StoreError(f"record {record_id} of {describe(self.url)} cannot be selected: {reason}")
        return found[0].record

    def selections(self, target: str | None = None) -> list[StoredRecord]:
        """The selected records, of one target or all, ordered by target and problem."""
        return self._chosen(SELECTIONS, target)

    def stand_ins(self, target: str | None = None) -> list[StoredRecord]:
        """What stands in for selections whose family cannot address every tensor, ordered alike."""
        return self._chosen(STAND_INS, target)

    def _chosen(self, table: Table, target: str | None) -> list[StoredRecord]:
        with reading(self._engine, self.url) as connection:
            return list(
                readable(fetched(connection, select_chosen(table, target), table), describe(self.url))
            )

    def remember_check(self, check: Check) -> None:
        """Stores a self-check's verdict, in place of an earlier one of the same kernel, GPU and versions."""
        with writing(self._engine, self.url) as connection:
            write_check(connection, check, now(), replace=True)

    def preview(self, meant: Forgettable) -> tuple[list[Group], list[TakenBack]]:
        """What `forget` would delete: records in groups, and the problems whose selection is among them."""
        with reading(self._engine, self.url) as connection:
            lost = [TakenBack(*key) for key in affected(connection, meant)]
            return groups(connection, meant), lost

    def forget(self, meant: Forgettable, choose: Choose) -> list[TakenBack]:
        """Deletes records, and takes back selections that name them: all of it, or nothing on an error.

        Args:
            meant: Which records.
            choose: Picks the record to select of a problem that lost its selection, among what is left.

        Returns:
            What was taken back, and what is selected in its place.

        Raises:
            StoreError: The database cannot be written.
        """
        with writing(self._engine, self.url) as connection:
            return forget(connection, meant, choose, now())

    def replace_records(self, changes: Mapping[int, Record]) -> None:
        """Replaces records by their ids, all of them or none; selections then name the new ones.

        Self-checks of a replaced record's kernel are kept under the new kernel's digest too.

        Raises:
            TableError: A field is outside its bounds.
            StoreError: The database cannot be written.
        """
        with writing(self._engine, self.url) as connection:
            for record_id, record in changes.items():
                replace_record(connection, record_id, record)

    def merge_tables(
        self, *tables: TunedTable, progress: Callable[[int], None] = lambda records: None
    ) -> MergeCounts:
        """Brings the records and selections of tuned tables into the database, all of them or none.

        Selections that both have are settled as by `merge_from`. `progress` is called with the
        number of further records taken.

        Raises:
            TableError: A table holds what may not serve.
            StoreError: The database cannot be written.
        """
        for table in tables:
            check_table(table, f"the table of {table.target}")
        with writing(self._engine, self.url) as connection:
            return merge_tables(tables, connection, progress)

    def merge_from(self, url: str, why_refused: WhyRefused = lambda record: "") -> MergeCounts:
        """Brings everything of another database into this one: all of it, or nothing on an error.

        The same record is kept once. Where both have a selection for a (problem, target), the
        faster measured one stays if the same versions made both, else this database's.

        Args:
            url: The other database.
            why_refused: Says why a selection of the other database may not become one here, empty if it
                may. One warning counts those that may not.

        Raises:
            StoreError: The other database is missing, damaged, or of another schema.
        """
        address = database_url(url)
        source = source_engine(address)
        try:
            with reading(source, address) as theirs, writing(self._engine, self.url) as ours:
                return merge(theirs, ours, address, why_refused)
        finally:
            source.dispose()
