"""The tuned records that dispatch reads: the user's selections and the shipped table.

They are read once per process and GPU. Decisions therefore do not change within a process, and ranks that
read the same tables agree.
"""

import functools
from collections.abc import Callable, Iterable

import msgspec

from flashtune.core.errors import StoreError, UsageError
from flashtune.core.notices import warn_once
from flashtune.core.record import Outcome, Provenance, Record
from flashtune.db.eligibility import by_problem, serves_any_tensors
from flashtune.dispatch.versions import current_versions


class Tables(msgspec.Struct, frozen=True):
    """The tuned records of one GPU by problem key.

    A problem has one record, its selection. If the selection's family cannot address all tensors, a second
    record is the fallback.
    """

    database: dict[str, tuple[Record, ...]]
    shipped: dict[str, tuple[Record, ...]]

    def find(
        self, key: str, serves: Callable[[Record], bool] = lambda record: True
    ) -> tuple[str, Record] | None:
        """Returns the first record of a problem that serves, and its source. User records come first."""
        for source, records in (("database", self.database), ("shipped", self.shipped)):
            for record in records.get(key, ()):
                if serves(record):
                    return source, record
        return None

    def effective(self) -> tuple[Record, ...]:
        """Returns the records that may serve, by problem: the user's own, then the shipped ones if needed."""
        keys = dict.fromkeys((*self.shipped, *self.database))
        return tuple(record for key in keys for record in self._needed(key))

    def _needed(self, key: str) -> Iterable[Record]:
        """Yields a problem's records up to the first that serves any tensors."""
        for record in (*self.database.get(key, ()), *self.shipped.get(key, ())):
            yield record
            if serves_any_tensors(record):
                return


@functools.cache
def tuned_records(target_name: str) -> Tables:
    """Returns the tables of a GPU. A database that cannot be read counts as empty and causes a warning."""
    from flashtune.db.evidence import under
    from flashtune.db.table import shipped_table

    shipped = shipped_table(target_name)
    return Tables(
        database=by_problem(filter(_may_serve, _selected(target_name))),
        shipped=by_problem(filter(_may_serve, under(shipped, current_versions) if shipped else ())),
    )


def table_hash(target_name: str | None = None) -> str:
    """Returns a hash of all records that dispatch would use on a GPU, as 32 hex digits.

    Ranks can compare it: equal hashes mean equal selections.

    Args:
        target_name: Name of a target, such as `nvidia-h200`. None for the current GPU.
    """
    from flashtune.db import table

    if target_name is None:
        import torch

        from flashtune.core.target import device_target

        target_name = device_target(torch.cuda.current_device() if torch.cuda.is_available() else 0).name
    return table.table_hash(
        table.TunedTable(target=target_name, records=tuned_records(target_name).effective())
    )


def _selected(target_name: str) -> tuple[Record, ...]:
    from flashtune.db.light.reader import open_reader

    try:
        reader = open_reader()
        return (*reader.selections(target_name), *reader.fallbacks(target_name)) if reader else ()
    except (StoreError, UsageError) as error:
        warn_once("database", f"{error} (until then dispatch uses the shipped tables alone)")
        return ()


def _may_serve(record: Record) -> bool:
    """Whether dispatch may use a record: it has a measured time and is not a failure."""
    return record.outcome is Outcome.OK and record.provenance is Provenance.MEASURED
