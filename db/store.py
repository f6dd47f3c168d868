"""The store: every record, the selections and the self-checks, in SQLite or PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self, TypeVar

from sqlalchemy import Connection, Engine, Table

from flashtune.core.errors import StoreError
from flashtune.core.problem import Problem
from flashtune.core.record import Record
from flashtune.db.codec import Check
from flashtune.db.creation import ready_engine, source_engine
from flashtune.db.eligibility import why_not_selectable
from flashtune.db.engine import reading, writing
from flashtune.db.errors import RowError
from flashtune.db.forgetting import Choose, Forgettable, Group, TakenBack, affected, forget, groups
from flashtune.db.location import database_url, describe
from flashtune.db.merge import MergeCounts, WhyRefused, merge, merge_tables
from flashtune.db.queries import (
    fetched,
    insert_record,
    insert_records,
    now,
    select_chosen,
    select_records,
    take_fallback,
    take_selection,
    write_check,
)
from flashtune.db.retries import Retries
from flashtune.db.schema import FALLBACKS, RECORDS, SELECTIONS
from flashtune.db.stored_rows import StoredRecord, readable
from flashtune.db.table import TunedTable, check_table

__all__ = ["MergeCounts", "Store", "StoredRecord", "open_store"]

Result = TypeVar("Result")
Transaction = Callable[[Engine, str], AbstractContextManager[Connection]]


def open_store(url: str | None = None) -> Store:
    """Opens a database for writing. Creates it if needed.

    Args:
        url: A path or an SQLAlchemy URL; None for `FLASHTUNE_DB` or the user's cache folder.

    Raises:
        StoreError: The database is damaged, of another schema, not flashtune's, or unwritable. It is left
            unchanged.
    """
    address = database_url(url)
    return Store(ready_engine(address), address)


class Store:
    """An open database. Safe under threads. Several processes may each open one.

    Transactions of a search are repeated while a server is unavailable, for a minute at most.

    Attributes:
        url: The database's URL, as `open_store` takes it.
        retries: Repeats transactions. Its `stop` ends the waits of all threads.
    """

    def __init__(self, engine: Engine, url: str) -> None:
        self._engine = engine
        self.retries = Retries(url)
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
        """Stores a record permanently and returns its id. Equal records have one id.

        Raises:
            TableError: A field is outside its bounds, so the record could not be read again.
            StoreError: The database cannot be written.
        """
        return self._write(lambda connection: insert_record(connection, record, now())[0])

    def add_all(self, records: list[Record]) -> list[int]:
        """Stores some hundred records, all or none, as `add` does. Returns their ids."""
        return self._write(lambda connection: [row for row, _ in insert_records(connection, records, now())])

    def records(
        self, problem: Problem | None = None, target: str | None = None, family: str | None = None
    ) -> list[StoredRecord]:
        """Returns all records, or those of a problem, a target and a family, oldest first.

        Rows that this flashtune cannot read are left out, with one `UnreadableRecord` warning.
        """
        query = select_records()
        if problem is not None:
            query = query.where(RECORDS.c.problem_key == problem.key)
        if target is not None:
            query = query.where(RECORDS.c.target == target)
        if family is not None:
            query = query.where(RECORDS.c.family == family)
        return self._read(lambda connection: list(readable(fetched(connection, query), describe(self.url))))

    def pin(self, record_id: int, stays: Callable[[Record], bool] = lambda present: False) -> bool:
        """Selects a record for its (problem, target), in place of an earlier selection.

        The earlier selection becomes the fallback if the new one's family cannot address every tensor and the
        earlier one can.

        Args:
            record_id: The record's row.
            stays: Returns whether the present selection stays. It is called again if another process selects
                a record at the same time.

        Returns:
            Whether the record was selected.

        Raises:
            StoreError: There is no such record, or it may not be selected: it failed, or was measured and
                never verified.
        """

        def other_stays(present: StoredRecord) -> bool:
            # A repeated transaction finds its own selection.
            return present.id != record_id and stays(present.record)

        def pin(connection: Connection) -> bool:
            record = self._selectable(connection, record_id)
            return take_selection(connection, record, record_id, now(), other_stays)[0]

        return self._write(pin)

    def fallback(self, record_id: int) -> bool:
        """Makes a record the fallback for tensors that the selection of its (problem, target) cannot address.

        Returns:
            False where there is no such selection, or this record cannot address them either.

        Raises:
            StoreError: As `pin`.
        """
        return self._write(
            lambda connection: take_fallback(
                connection, self._selectable(connection, record_id), record_id, now()
            )
        )

    def _selectable(self, connection: Connection, record_id: int) -> Record:
        query = select_records().where(RECORDS.c.id == record_id)
        candidates = list(readable(connection.execute(query), describe(self.url)))
        if not candidates:
            raise RowError(f"{describe(self.url)} has no record {record_id}: `flashtune show` lists them")
        reason = why_not_selectable(candidates[0].record)
        if reason:
            raise RowError(f"record {record_id} of {describe(self.url)} cannot be selected: {reason}")
        return candidates[0].record

    def selections(self, target: str | None = None) -> list[StoredRecord]:
        """Returns the selected records, of one target or all, ordered by target and problem."""
        return self._chosen(SELECTIONS, target)

    def fallbacks(self, target: str | None = None) -> list[StoredRecord]:
        """Returns the fallbacks of selections that cannot address every tensor, in the same order."""
        return self._chosen(FALLBACKS, target)

    def _chosen(self, table: Table, target: str | None) -> list[StoredRecord]:
        query = select_chosen(table, target)
        return self._read(
            lambda connection: list(readable(fetched(connection, query, table), describe(self.url)))
        )

    def remember_check(self, check: Check) -> None:
        """Stores a self-check's verdict, and replaces an earlier one of the same kernel, GPU and versions."""
        self._write(lambda connection: write_check(connection, check, now(), replace=True))

    def _read(self, transaction: Callable[[Connection], Result]) -> Result:
        return self.retries.run(lambda: self._in(reading, transaction))

    def _write(self, transaction: Callable[[Connection], Result]) -> Result:
        return self.retries.run(lambda: self._in(writing, transaction))

    def _in(self, opened: Transaction, run: Callable[[Connection], Result]) -> Result:
        with opened(self._engine, self.url) as connection:
            return run(connection)

    def preview(self, meant: Forgettable) -> tuple[list[Group], list[TakenBack]]:
        """Returns what `forget` would delete: groups of records, and problems that lose their selection."""
        with reading(self._engine, self.url) as connection:
            lost = [TakenBack(*key) for key in affected(connection, meant)]
            return groups(connection, meant), lost

    def forget(self, meant: Forgettable, choose: Choose) -> list[TakenBack]:
        """Deletes records and selections that name them: all or, on an error, nothing.

        Args:
            meant: Filter of the records.
            choose: Returns the record to select for a problem that lost its selection, among the remaining
                ones.

        Returns:
            The problems that lost their selection, and the new selection.

        Raises:
            StoreError: The database cannot be written.
        """
        with writing(self._engine, self.url) as connection:
            return forget(connection, meant, choose, now())

    def merge_tables(
        self, *tables: TunedTable, progress: Callable[[int], None] = lambda records: None
    ) -> MergeCounts:
        """Merges the records and selections of tuned tables into the database, all or none.

        Conflicting selections are resolved as by `merge_from`. `progress` is called with the number of
        further records merged.

        Raises:
            TableError: A table holds a record that may not be selected.
            StoreError: The database cannot be written.
        """
        for table in tables:
            check_table(table, f"the table of {table.target}")
        with writing(self._engine, self.url) as connection:
            return merge_tables(tables, connection, progress)

    def merge_from(self, url: str, why_refused: WhyRefused = lambda record: "") -> MergeCounts:
        """Merges another database into this one: everything or, on an error, nothing.

        An equal record is stored once. If both have a selection for a (problem, target), this database's
        stays. Exception: the same versions made both, and the other was measured to be faster.

        Args:
            url: The other database.
            why_refused: Returns why a selection of the other database may not become one here, empty if it
                may. One warning counts those that may not.

        Raises:
            StoreError: The other database is missing, damaged, or of another schema.
        """
        address = database_url(url)
        source = source_engine(address)
        if source is None:
            raise StoreError(f"there is no database {describe(address)}: check its name")
        try:
            with reading(source, address) as theirs, writing(self._engine, self.url) as ours:
                return merge(theirs, ours, address, why_refused)
        finally:
            source.dispose()
