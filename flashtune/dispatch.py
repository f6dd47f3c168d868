"""Which record serves a problem on a GPU, and how well it is known there.

The order: the user's database, the shipped table, what is expected to be fastest of the configs that were
tuned for such shapes, a family's default.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from flashtune.compilation import interpreting
from flashtune.errors import ProblemError
from flashtune.forecast import forecast
from flashtune.kernel import Specialization
from flashtune.leaving_out import without
from flashtune.nearest import FEW_QUERIES, is_far, same_computation
from flashtune.problem import Problem
from flashtune.record import Outcome, Provenance, Record, Selection, Standing, Versions
from flashtune.standard import score_bytes
from flashtune.tables import Tables
from flashtune.target import Target
from flashtune.templates.family import Family, why_not
from flashtune.templates.registry import families, find_family
from flashtune.versions import current_versions

# Whose default config serves what nobody tuned, the first that can; other families come after them.
DEFAULT_FAMILIES = (
    "forward_hopper",
    "forward_q_outer",
    "forward_masked",
    "backward_hopper",
    "backward_split",
)
# Who comes before them where queries are so few that keys must be split among programs.
DECODING_FAMILY = "decode_split_kv"
# Who comes before both where keys are latent, and queries fill its tiles of 64 rows or these take a quarter
# of the multiprocessors: one sequence of 128 heads and 4k keys took 18 us on an NVIDIA H200, and 24 us by the
# other.
LATENT_FAMILY = "decode_latent_hopper"
LATENT_ROWS = 64

# SDPA must win by more than two runs of one measurement differ.
NOISE = 0.02
STANDARD = "standard"


def select(
    problem: Problem, target: Target, tables: Tables, specialization: Specialization, *, generated: bool
) -> Selection:
    """The selection for a problem on a GPU.

    Args:
        problem: What must be computed.
        target: The GPU.
        tables: What is tuned for it.
        specialization: What may be assumed of the tensors; a family that needs more does not serve.
        generated: Whether only generated kernels may serve, no baseline.

    Raises:
        ProblemError: No family computes it on this GPU.
    """

    def serves(record: Record) -> bool:
        if record.config is None:
            return not generated
        return why_not(find_family(record.family), problem, target, specialization) is None

    for same in same_computation(problem):
        found = tables.find(same.key, serves)
        if found is not None:
            source, record = found
            return Selection(record=record, standing=_standing(record, Standing.TIMED), source=source)
    tuned = (record for record in tables.effective() if record.config)
    expected = forecast(problem, tuned, target, serves)
    if expected is not None and not _is_new_decoding(problem, expected[1].nearest.problem):
        record, why = expected
        standing = _standing(record, Standing.VERIFIED)
        return Selection(record=record, standing=standing, source="nearest", forecast=why)
    return default_selection(problem, target, specialization)


def _is_new_decoding(problem: Problem, nearest: Problem) -> bool:
    """Whether queries are few and were many wherever they were timed: that says nothing of decoding."""
    return problem.seqlen_q <= FEW_QUERIES < nearest.seqlen_q and is_far(nearest, problem)


def of_nearest(selection: Selection) -> Selection | None:
    """The selection of the nearest tuned shape, where another one was expected to be faster than it."""
    why = selection.forecast
    if why is None or why.nearest == selection.record:
        return None
    return Selection(record=why.nearest, standing=_standing(why.nearest, Standing.VERIFIED), source="nearest")


def default_selection(problem: Problem, target: Target, specialization: Specialization) -> Selection:
    """A config that fits the GPU, for what nobody tuned.

    Raises:
        ProblemError: No family computes it on this GPU.
    """
    selection = next(default_selections(problem, target, specialization), None)
    if selection is not None:
        return selection
    asked = [family for family in families() if family.direction is problem.direction]
    reasons = [_why_not(family, problem, target, specialization) for family in asked]
    if problem.features:
        # Of families that know all features, what they say; of the others it is plain.
        able = [problem.features <= family.features for family in asked]
        told = "; ".join(reason for reason, knows in zip(reasons, able, strict=True) if reason and knows)
        advice = _advice(problem, target, specialization)
        words = ", ".join(sorted(problem.features))
        raise ProblemError(
            f"no kernel family computes {problem.key} ({words}) on {target.name}"
            f"{f' ({told})' if told else ''}: {advice}"
        )
    raise ProblemError(
        f"no kernel family computes {problem.key} on {target.name}: {'; '.join(filter(None, reasons))}"
    )


def default_selections(
    problem: Problem, target: Target, specialization: Specialization
) -> Iterator[Selection]:
    """The default configs of all families that compute a problem for such tensors, best guess first."""
    for family in sorted(families(), key=lambda family: _default_rank(family, problem, target)):
        if _why_not(family, problem, target, specialization) is None:
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
            yield Selection(record=record, standing=Standing.UNPROVEN, source="default")


def _advice(problem: Problem, target: Target, specialization: Specialization) -> str:
    """What must be left out of a problem for some family to compute the rest: as little as does."""
    asked = sorted(problem.features)
    for count in range(1, len(asked) + 1):
        for left_out in itertools.combinations(asked, count):
            rest = without(problem, left_out)
            if any(_why_not(family, rest, target, specialization) is None for family in families()):
                return f"leave out {' and '.join(left_out)}"
    return "no part of it is computed here either"


def _default_rank(family: Family, problem: Problem, target: Target) -> tuple[bool, int, str]:
    if family.name == LATENT_FAMILY:
        rows = problem.group_size * problem.seqlen_q
        tiles = problem.batch * math.ceil(rows / LATENT_ROWS)
        return False, -2 if rows >= LATENT_ROWS or 4 * tiles >= target.sm_count else 0, family.name
    if family.name == DECODING_FAMILY and problem.seqlen_q <= FEW_QUERIES:
        return False, -1, family.name
    known = family.name in DEFAULT_FAMILIES
    return not known, DEFAULT_FAMILIES.index(family.name) if known else 0, family.name


def _why_not(family: Family, problem: Problem, target: Target, specialization: Specialization) -> str | None:
    if interpreting() and not family.interpreted:
        return f"{family.name} does not run under Triton's interpreter"
    return why_not(family, problem, target, specialization)


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


def faster_peer_of_pair(
    forward: Record, backward: Record, problem: Problem, usual_sdpa: str | None
) -> str | None:
    """The baseline whose passes together were measured as faster than both records beyond noise, or None.

    It was timed beside each of them, so that each pass is compared within one run. Arguments are as those
    of `faster_peer`, of the forward problem.
    """
    ours = forward.measurement, backward.measurement
    if ours[0] is None or ours[1] is None:
        return None
    limit = min(sum(each.p20 for each in ours if each), sum(each.ms for each in ours if each) * (1 - NOISE))
    names = [usual_sdpa or ""]
    if score_bytes(problem) <= min(score_bytes(forward.problem), score_bytes(backward.problem)):
        names.append(STANDARD)
    times = [{peer.name: peer.ms for peer in each.peers} for each in ours if each]
    ms, name = min((sum(time.get(name, math.inf) for time in times), name) for name in names)
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
