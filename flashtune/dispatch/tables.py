"""The tuned records that dispatch reads: the user's selections and the shipped table.

They are read once per process and GPU. Decisions therefore do not change within a process, and ranks that
read the same tables agree.
"""

import functools
from collections.abc import Callable, Iterable

import msgspec

from flashtune.core.errors import StoreError, UsageError
from flashtune.core.notices import warn_once
from flashtune.core.problem import Causal, Problem
from flashtune.core.record import Outcome, Provenance, Record
from flashtune.db.eligibility import by_problem, serves_any_tensors


class Tables(msgspec.Struct, frozen=True):
    """The tuned records of one GPU by problem key.

    A problem has one record, its selection. If the selection's family cannot address all tensors, a second
    record is the fallback.
    """

    database: dict[str, tuple[Record, ...]]
    shipped: dict[str, tuple[Record, ...]]

    def find(
        self, problem: Problem, serves: Callable[[Record], bool] = lambda record: True
    ) -> tuple[str, Record] | None:
        """Returns the first record of the same computation that serves, and its source.

        Records of the problem itself come first, and of these the user's.
        """
        for same in same_computation(problem):
            for source, records in (("database", self.database), ("shipped", self.shipped)):
                for record in records.get(same.key, ()):
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


def same_computation(problem: Problem) -> tuple[Problem, ...]:
    """Returns a problem and the problems with another causal mask that compute the same, itself first.

    With equal lengths, both alignments are the same mask. A single query aligned bottom-right sees all keys.
    If each sequence has its own lengths, equal maximum lengths do not count.
    """
    ragged = problem.packed or problem.kv_lengths or problem.page_size
    square = problem.seqlen_q == problem.seqlen_kv and not ragged
    names = [problem.causal]
    if square and problem.causal is not Causal.NONE:
        names += [Causal.BOTTOM_RIGHT, Causal.TOP_LEFT]
    if problem.seqlen_q == 1 and (problem.causal is not Causal.TOP_LEFT or square):
        names += [Causal.NONE, Causal.BOTTOM_RIGHT]
    return tuple(msgspec.structs.replace(problem, causal=name) for name in dict.fromkeys(names))


@functools.cache
def tuned_records(target_name: str) -> Tables:
    """Returns the tables of a GPU. A database that cannot be read counts as empty and causes a warning."""
    from flashtune.db.table import shipped_table

    shipped = shipped_table(target_name)
    return Tables(
        database=by_problem(filter(_may_serve, _selected(target_name))),
        shipped=by_problem(filter(_may_serve, shipped.records if shipped else ())),
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
