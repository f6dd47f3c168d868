"""Read-only access to the user's database and the shipped tables."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from flashtune.core.errors import TargetError
from flashtune.core.record import Outcome, Record
from flashtune.core.target import TARGETS, find_target
from flashtune.db.eligibility import by_problem
from flashtune.db.light.reader import open_reader
from flashtune.db.location import database_url, describe, sqlite_path
from flashtune.db.table import TunedTable, shipped_table
from flashtune.dispatch.tables import Tables

if TYPE_CHECKING:
    from flashtune.core.problem import Problem
    from flashtune.db.store import Store


class Found(msgspec.Struct, frozen=True):
    """A record and its source."""

    record: Record
    source: str  # `database` or `shipped`.
    id: int = 0  # Its row in the database; 0 in a table.
    created_at: str = ""  # Time of storage, ISO 8601; empty in a table.


@contextmanager
def existing_store(db: str | None) -> Iterator[Store | None]:
    """Opens a database for reading; None if it does not exist (yet). It is not created."""
    from flashtune.db.creation import source_engine
    from flashtune.db.store import Store

    address = database_url(db)
    engine = source_engine(address)
    if engine is None:
        yield None
        return
    with Store(engine, address) as store:
        yield store


def tables_of(target: str, db: str | None) -> Tables:
    """Returns a target's selections as in dispatch, and in addition the predicted ones."""
    reader = open_reader(db)
    return Tables(
        database=by_problem((*reader.selections(target), *reader.fallbacks(target)) if reader else ()),
        shipped=shipped_by_problem(target),
    )


@functools.cache
def shipped_by_problem(target: str) -> dict[str, tuple[Record, ...]]:
    """Returns the shipped records of a target. Cached, because a report chooses hundreds of kernels."""
    shipped = shipped_table(target)
    return by_problem(shipped.records if shipped else ())


def records_of(problem: Problem, target: str | None, db: str | None) -> tuple[Found, ...]:
    """Returns every stored record of a problem, on one target or all, oldest first."""
    with existing_store(db) as store:
        stored = store.records(problem=problem, target=target) if store else []
    return tuple(Found(row.record, "database", row.id, row.created_at) for row in stored)


def database_selections(db: str | None) -> tuple[Found, ...]:
    """Returns every selection of a database by target and problem. A fallback follows its selection."""
    if sqlite_path(database_url(db)) is None:
        # A reader waits for a second only.
        with existing_store(db) as store:
            stored = (*store.selections(), *store.fallbacks()) if store else ()
    else:
        # Importing SQLAlchemy would take most of the time of a short command.
        reader = open_reader(db)
        stored = reader.stored() if reader else ()
    # The sort is stable, so that a fallback stays after its selection.
    ordered = sorted(stored, key=lambda row: (row.record.target, row.record.problem.key))
    return tuple(Found(row.record, "database", row.id, row.created_at) for row in ordered)


def shipped_selections() -> tuple[Found, ...]:
    """Returns the records of the shipped tables."""
    return tuple(Found(record, "shipped") for table in shipped_tables() for record in table.records)


def shipped_tables() -> tuple[TunedTable, ...]:
    """Returns the tables that ship with flashtune."""
    return tuple(filter(None, (shipped_table(target.name) for target in TARGETS)))


def narrowed(
    entries: tuple[Found, ...], target: str | None, problems: tuple[Problem, ...]
) -> tuple[Found, ...]:
    """Returns the records of a target (as a user writes it) and of some problems; empty means all."""
    name = resolved_target(target, {entry.record.target for entry in entries})
    wanted = set(problems)
    return tuple(
        entry
        for entry in entries
        if name in (None, entry.record.target) and (not wanted or entry.record.problem in wanted)
    )


def resolved_target(text: str | None, targets: set[str]) -> str | None:
    """Returns a target's full name, from the table of GPUs or from `targets`."""
    if text is None or text in targets:
        return text
    try:
        return find_target(text).name
    except TargetError as error:
        raise TargetError(
            f"{error}" + (f", or of the stored {', '.join(sorted(targets))}" if targets else "")
        ) from None


def place(db: str | None, shipped: bool) -> str:
    """Returns the name of the source of records, for messages."""
    return "the tables that ship" if shipped else describe(database_url(db))


def best_generated(records: Iterable[Record]) -> Record | None:
    """Returns the fastest successful record of a kernel family, None if there is none."""
    timed = (record for record in records if record.outcome is Outcome.OK and record.config and record.ms)
    return min(timed, key=lambda record: record.ms or 0.0, default=None)
