"""The warm start: results of earlier searches of the same problem, and configs of near problems."""

import math
from collections import Counter
from collections.abc import Iterable

import msgspec

from flashtune.core.problem import Problem
from flashtune.core.record import Measurement, Outcome, Provenance, Record
from flashtune.core.target import TARGETS
from flashtune.db.store import Store, StoredRecord
from flashtune.db.table import shipped_table
from flashtune.dispatch.nearest import distance
from flashtune.dispatch.versions import current_versions
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.search.selection import candidate_of, may_be_selected

# These outcomes do not depend on whether the machine has a GPU.
COMPILED_WITHOUT_GPU = (Outcome.INFEASIBLE, Outcome.COMPILE_ERROR)
# Number of configs of each family.
WARM_CONFIGS = 6
# Distance added for another GPU, another mask, or each feature that only one problem has.
OTHER_TARGET = 3.0
OTHER_MASK = 1.0
OTHER_FEATURE = 1.0


def finished(
    store: Store,
    scope: SearchTask,
    provenance: Provenance,
    gpu_uuid: str | msgspec.UnsetType | None = msgspec.UNSET,
    *,
    retry_failed: bool = False,
) -> dict[Candidate, StoredRecord]:
    """Returns the stored records that this search reuses, the latest of each candidate.

    Times are reused only on the physical GPU that they are of, if it is given. A candidate that was too slow
    for a full verification is reused only if a faster one is eligible.
    With `retry_failed`, failed candidates are left out, except those that do not fit the GPU.
    """
    stored = store.records(scope.problem, scope.target.name)
    latest = {
        candidate_of(entry.record): entry
        for entry in stored
        if _answers(entry.record, scope, provenance)
        and (gpu_uuid is msgspec.UNSET or is_of_gpu(entry.record.measurement, gpu_uuid))
    }
    selectable = (entry.record for entry in latest.values() if may_be_selected(entry.record))
    fastest = min((record.ms for record in selectable if record.ms), default=math.inf)
    return {
        candidate: entry
        for candidate, entry in latest.items()
        if entry.record.outcome is Outcome.INFEASIBLE
        or (entry.record.outcome is not Outcome.OK and not retry_failed)
        or may_be_selected(entry.record)
        or (entry.record.outcome is Outcome.OK and fastest < (entry.record.ms or math.inf))
    }


def is_of_gpu(measurement: Measurement | None, gpu_uuid: str | None) -> bool:
    """Returns whether a time is of a physical GPU, or there is no time."""
    return measurement is None or (measurement.gpu_uuid or None) == gpu_uuid


def _answers(record: Record, scope: SearchTask, provenance: Provenance) -> bool:
    if record.config is None or record.specialization != scope.specialization:
        return False
    if record.family not in {entry.family.name for entry in scope.spaces}:
        return False
    if record.provenance is not provenance and record.outcome not in COMPILED_WITHOUT_GPU:
        return False
    now = current_versions(record.family, scope.driver)
    if record.provenance is Provenance.PREDICTED or record.outcome in COMPILED_WITHOUT_GPU:
        # These results do not depend on the driver.
        now = msgspec.structs.replace(now, driver=record.versions.driver)
    return record.versions.makers == now.makers


def known_winners(store: Store) -> list[Record]:
    """Returns the selections and fallbacks of the database and of the shipped tables."""
    shipped = filter(None, (shipped_table(target.name) for target in TARGETS))
    stored = [entry.record for entry in (*store.selections(), *store.fallbacks())]
    return stored + [record for table in shipped for record in table.records]


def warm_configs(winners: Iterable[Record], scope: SearchTask) -> tuple[Candidate, ...]:
    """Returns configs in this search's spaces that won on near shapes or on other GPUs, nearest first."""
    nearest = sorted(winners, key=lambda record: remoteness(record, scope.problem, scope.target.name))
    near = (record for record in nearest if remoteness(record, scope.problem, scope.target.name) < math.inf)
    return _first(filter(scope.contains, map(candidate_of, near)), WARM_CONFIGS)


def remoteness(record: Record, problem: Problem, target_name: str) -> float:
    """Returns the distance between a record and a problem; infinite if the config is of no use."""
    other = record.problem
    if record.config is None or record.outcome is not Outcome.OK:
        return math.inf
    if (other.direction, other.head_dim, other.value_head_dim, other.dtype.itemsize) != (
        problem.direction,
        problem.head_dim,
        problem.value_head_dim,
        problem.dtype.itemsize,
    ):
        return math.inf
    apart = distance(other, problem)
    apart += OTHER_TARGET if record.target != target_name else 0.0
    apart += OTHER_FEATURE * len(other.features ^ problem.features)
    return apart + (OTHER_MASK if other.causal is not problem.causal else 0.0)


def _first(candidates: Iterable[Candidate], limit: int) -> tuple[Candidate, ...]:
    """Returns the first `limit` distinct candidates of each family, in order."""
    taken: Counter[str] = Counter()
    first = []
    for candidate in dict.fromkeys(candidates):
        taken[candidate.family] += 1
        if taken[candidate.family] <= limit:
            first.append(candidate)
    return tuple(first)
