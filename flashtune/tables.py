"""The tuned records that dispatch reads: the user's selections, and the table that ships.

They are read once per process and GPU, so that one process never changes its mind and ranks that
read the same tables agree.
"""

from __future__ import annotations

import functools

import msgspec

from flashtune.errors import StoreError
from flashtune.notices import tell_once
from flashtune.record import Outcome, Provenance, Record


class Tables(msgspec.Struct, frozen=True):
    """What is tuned for one GPU, by problem key."""

    database: dict[str, Record]
    shipped: dict[str, Record]

    def find(self, key: str) -> tuple[str, Record] | None:
        """Where a problem's record stands, and the record; the user's own come first."""
        for source, records in (("database", self.database), ("shipped", self.shipped)):
            if key in records:
                return source, records[key]
        return None

    def effective(self) -> dict[str, Record]:
        """One record per problem: the user's own, else the shipped one."""
        return self.shipped | self.database


@functools.cache
def tuned_records(target_name: str) -> Tables:
    """The tables of a GPU. A database that cannot be read counts as empty, and a warning says so."""
    from flashtune.db.table import shipped_table

    shipped = shipped_table(target_name)
    return Tables(
        database=_by_problem(_selected(target_name)),
        shipped=_by_problem(shipped.records if shipped else ()),
    )


def table_hash(target_name: str | None = None) -> str:
    """Hash over every record that dispatch would use on a GPU, 32 hex digits.

    Ranks that must agree compare it: equal hashes mean equal choices.

    Args:
        target_name: A target's name, such as `nvidia-h200`; None for the current GPU.

    Raises:
        TargetError: No name was given and there is no GPU.
    """
    from flashtune.db import table

    if target_name is None:
        import torch

        from flashtune.target import device_target

        target_name = device_target(torch.cuda.current_device() if torch.cuda.is_available() else 0).name
    records = tuple(tuned_records(target_name).effective().values())
    return table.table_hash(table.TunedTable(target=target_name, records=records))


def _selected(target_name: str) -> tuple[Record, ...]:
    from flashtune.db.reader import open_reader

    try:
        reader = open_reader()
        return reader.selections(target_name) if reader else ()
    except StoreError as error:
        tell_once("database", f"{error} (until then dispatch uses the shipped tables alone)")
        return ()


def _by_problem(records: tuple[Record, ...]) -> dict[str, Record]:
    """The records that dispatch may use: a predicted time is not a measured one, nor is a failure."""
    return {
        record.problem.key: record
        for record in records
        if record.outcome is Outcome.OK and record.provenance is Provenance.MEASURED
    }
