"""Which record serves a problem on a GPU, and how well it is known there.

The order: the user's database, the shipped table, the nearest tuned shape, a family's default.
"""

from __future__ import annotations

import math

from flashtune.errors import ProblemError
from flashtune.kernel import Specialization
from flashtune.nearest import nearest_record, same_computation
from flashtune.problem import Problem
from flashtune.record import Outcome, Provenance, Record, Selection, Standing, Versions
from flashtune.standard import score_bytes
from flashtune.tables import Tables
from flashtune.target import Target
from flashtune.templates.registry import families
from flashtune.versions import current_versions

# The family whose default config serves what nobody tuned; another one where it does not support it.
DEFAULT_FAMILY = "forward_q_outer"

# SDPA must win by more than two runs of one measurement differ.
NOISE = 0.02
STANDARD = "standard"


def select(problem: Problem, target: Target, tables: Tables, *, generated: bool) -> Selection:
    """The selection for a problem on a GPU.

    Args:
        problem: What must be computed.
        target: The GPU.
        tables: What is tuned for it.
        generated: Whether only generated kernels may serve, no baseline.

    Raises:
        ProblemError: No family computes it on this GPU.
    """
    for same in same_computation(problem):
        found = tables.find(same.key)
        if found is not None and not (generated and found[1].config is None):
            source, record = found
            return Selection(record=record, standing=_standing(record, Standing.TIMED), source=source)
    near = nearest_record(problem, (record for record in tables.effective().values() if record.config))
    if near is not None:
        return Selection(record=near, standing=_standing(near, Standing.VERIFIED), source="nearest")
    return default_selection(problem, target)


def default_selection(problem: Problem, target: Target) -> Selection:
    """A config that fits the GPU, for what nobody tuned.

    Raises:
        ProblemError: No family computes it on this GPU.
    """
    reasons: list[str] = []
    for family in sorted(families(), key=lambda family: family.name != DEFAULT_FAMILY):
        reason = family.supports(problem, target)
        if reason is None:
            record = Record(
                problem=problem,
                target=target.name,
                family=family.name,
                config=family.default(problem, target),
                specialization=Specialization(),
                kernel=None,
                outcome=Outcome.OK,
                provenance=Provenance.PREDICTED,
                versions=current_versions(family.name),
            )
            return Selection(record=record, standing=Standing.UNPROVEN, source="default")
        reasons.append(reason)
    raise ProblemError(f"no kernel family computes {problem.key} on {target.name}: {'; '.join(reasons)}")


def faster_peer(record: Record, problem: Problem, usual_sdpa: str | None) -> str | None:
    """The baseline that was measured as faster than the record beyond noise, or None.

    The standard computation counts only where the problem has no more scores than the record's:
    they are held in memory, and what was cheap on a short neighbour may not fit here.

    Args:
        record: A tuned record with its peers' times.
        problem: What it is to serve.
        usual_sdpa: The peer that torch's SDPA picks by itself for the problem, such as
            `sdpa-cudnn`; None where SDPA could serve only by another way than was measured.
    """
    if record.config is None:
        return record.family
    if record.measurement is None:
        return None
    limit = min(record.measurement.p20, record.measurement.ms * (1 - NOISE))
    times = {peer.name: peer.ms for peer in record.measurement.peers}
    names = [usual_sdpa or ""]
    if score_bytes(problem) <= score_bytes(record.problem):
        names.append(STANDARD)
    ms, name = min((times.get(name, math.inf), name) for name in names)
    return name if ms < limit else None


def proven_by(selection: Selection, digest: str) -> bool:
    """Whether a selection's receipt covers this very kernel under the versions installed here."""
    return selection.standing is not Standing.UNPROVEN and selection.record.kernel == digest


def _standing(record: Record, best: Standing) -> Standing:
    if record.config is None:
        return best
    passed = record.verdict is not None and record.verdict.passed
    if passed and same_makers(record.versions, current_versions(record.family)):
        return best
    return Standing.UNPROVEN


def same_makers(one: Versions, other: Versions) -> bool:
    """Whether two sets of versions make the same binaries: template, Triton, its ptxas, the driver."""
    return (one.template, one.triton, one.ptxas, one.driver) == (
        other.template,
        other.triton,
        other.ptxas,
        other.driver,
    )
