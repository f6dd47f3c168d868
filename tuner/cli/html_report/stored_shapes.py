"""The records of a report by shape: of a database, a table file or the shipped tables."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from flashtune.core.config import Config
from flashtune.core.errors import UsageError
from flashtune.core.problem import Problem
from flashtune.core.record import Provenance, Record, Versions
from flashtune.core.target import Target
from flashtune.db.table import load_table
from flashtune.tuner.tables.admission import facts_of
from flashtune.tuner.tables.lookup import (
    Found,
    database_selections,
    existing_store,
    narrowed,
    place,
    shipped_tables,
)


class Shape(NamedTuple):
    """The records of one problem on one GPU."""

    target: Target
    problem: Problem
    kernels: tuple[Record, ...]  # The selection, then its fallback; empty if nothing is selected.
    candidates: tuple[Found, ...]  # Every stored record, oldest first; empty for a table.

    @property
    def name(self) -> str:
        """Returns the GPU and the key of the problem, which name the shape in links."""
        return f"{self.target.name}/{self.problem.key}"

    def tried(self) -> tuple[Found, ...]:
        """Returns the latest record of each config, in the order in which the configs were tried first.

        Predicted times are left out if others are measured. Baselines have no config and are left out.
        """
        timed = {row.record.provenance for row in self.candidates if row.record.ms is not None}
        other = Provenance.PREDICTED if Provenance.MEASURED in timed else None
        latest: dict[tuple[str, Config], Found] = {}
        for row in self.candidates:
            record = row.record
            if record.config is not None and (record.ms is None or record.provenance is not other):
                latest[record.family, record.config] = row
        return tuple(latest.values())


class Source(NamedTuple):
    """The records of a report."""

    place: str  # The database or the tables, for people.
    shapes: tuple[Shape, ...]  # By GPU and problem. Those of unknown GPUs are left out.
    receipts: Mapping[str, tuple[Versions, ...]]  # Versions of further passes, by the kernel's digest.


def read_source(
    db: str | None, table: Path | None, shipped: bool, target: str | None, problems: tuple[Problem, ...]
) -> Source:
    """Returns the records of the shipped tables, of a table file, or else of a database.

    `target` is a GPU as a user writes it, None for all. Empty `problems` mean all.
    """
    if table is not None and shipped:
        raise UsageError("--table and --shipped exclude each other: use one of them")
    tables = shipped_tables() if shipped else () if table is None else (load_table(table),)
    if tables:
        selections = tuple(Found(record, "table") for entry in tables for record in entry.records)
        candidates: tuple[Found, ...] = ()
    else:
        selections = database_selections(db)
        with existing_store(db) as store:
            stored = store.records() if store else []
        candidates = tuple(Found(row.record, "database", row.id, row.created_at) for row in stored)
        candidates = narrowed(candidates, target, problems)
    receipts: dict[str, tuple[Versions, ...]] = {}
    for check in (check for entry in tables for check in entry.receipts):
        receipts[check.digest] = (*receipts.get(check.digest, ()), check.versions)
    shapes = _grouped(narrowed(selections, target, problems), candidates)
    return Source(str(table or place(db, shipped)), shapes, receipts)


def _grouped(selections: Iterable[Found], candidates: Iterable[Found]) -> tuple[Shape, ...]:
    groups: dict[tuple[str, Problem], tuple[list[Record], list[Found]]] = {}
    for entry in selections:
        groups.setdefault((entry.record.target, entry.record.problem), ([], []))[0].append(entry.record)
    for entry in candidates:
        groups.setdefault((entry.record.target, entry.record.problem), ([], []))[1].append(entry)
    shapes = (
        Shape(target, problem, tuple(kernels), tuple(rows))
        for (_, problem), (kernels, rows) in groups.items()
        if (target := facts_of(kernels[0] if kernels else rows[0].record)) is not None
    )
    return tuple(sorted(shapes, key=lambda shape: shape.name))
