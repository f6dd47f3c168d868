"""Selects the config with the lowest estimated time at an untuned shape, among the tuned configs.

The estimate is the time of the config's schedule (`Family.makespan_ms`) times a correction. The correction
is the mean ratio of measured to scheduled time over the family's tuned shapes, with larger weights for near
shapes (Nadaraya-Watson kernel regression). At a tuned shape, no other config can be faster than the winner.
If the schedule of another config is shorter there, a penalty is added to that config's estimates at near
shapes.

Problems without a tuned shape of the same head dims and type use shapes of another head dim or 16-bit type.
A head dim without tuned shapes is computed in tiles of the next wider one, and both 16-bit types are
equally fast. The ranking of configs, and their comparison with SDPA, are therefore assumed to be the same.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from flashtune.core.canonical import without
from flashtune.core.config import Config
from flashtune.core.problem import Dtype, Problem
from flashtune.core.record import Provenance, Record, TransferEstimate
from flashtune.core.target import Target
from flashtune.dispatch.nearest import (
    DECODING_FAMILY,
    FEW_QUERIES,
    PRIOR_WEIGHT,
    SPLIT_GAIN,
    distance,
    is_short_prompt,
    may_split,
    nearest_record,
    regression,
    tuned_alike,
    weight,
)
from flashtune.dispatch.sdpa_times import expected_peers, least_ms, narrowed_peers
from flashtune.templates.common.model.sram import power_of_two
from flashtune.templates.registry import find_family

# Length scale of the penalties of configs, in steps of a factor of two.
PENALTY_LENGTH_SCALE = 1.0
# Number of near shapes that determine a penalty, and the largest penalty of a shape (a logarithm).
MAX_NEIGHBOURS = 4
MAX_PENALTY = 0.3
# Required margins as fractions of the time. STEP_MARGIN is per step of a factor of two by which the shape
# where the config won is farther than the nearest winner's. PORTABLE_MARGIN is per step to the nearest winner
# of a portable family, because times of such families are less certain. UNTIMED_MARGIN is for configs that
# were never verified or timed, and NEIGHBOUR_MARGIN for those that differ from a winner on one axis only.
STEP_MARGIN = 0.005
PORTABLE_MARGIN = 0.04
UNTIMED_MARGIN = 0.05
NEIGHBOUR_MARGIN = 0.02
# A config whose verified kernel is in a bundle is preferred if its estimate is higher by up to this fraction.
BUNDLED_MARGIN = 0.05
# Number of a family's best tuned configs from which untimed configs are derived.
NUM_SEEDS = 3

SIXTEEN_BITS = (Dtype.BF16, Dtype.FP16)
# Axes that the head dims determine: whether heads are several tiles, and outputs two halves.
OF_WIDTH = ("split_head_dim", "split_epilogue")
# Shapes whose heads are wider than this multiple of the problem's tile have another bottleneck. Heads of less
# than 32 are as slow as those, because exponentials dominate.
WIDEST, NARROWEST = 2, 32


class _Candidate(NamedTuple):
    """A record with a candidate config, its estimated time in ms, and the required margin."""

    record: Record
    ms: float
    doubt: float

    @property
    def rank(self) -> float:
        return self.ms * (1 + self.doubt)


def forecast(
    problem: Problem,
    records: Iterable[Record],
    target: Target,
    serves: Callable[[Record], bool],
    is_bundled: Callable[[Record], bool] = lambda record: False,
) -> tuple[Record, TransferEstimate] | None:
    """Returns the record of the config with the lowest estimated time, or None without a tuned shape.

    The result does not depend on the order of the records. A config that was never tuned has a record without
    a verdict, like a default config. `records` are the selected records of the GPU, each with a config.
    `serves` returns whether a record's kernel can serve the call, and `is_bundled` whether a bundle has it.
    """
    alike = tuned_alike(problem, records)
    able = [record for record in alike if serves(record) and not is_short_prompt(record, problem)]
    nearest = nearest_record(problem, able)
    if nearest is None:
        return None
    names = sorted({record.family for record in able}, key=lambda name: (name != nearest.family, name))
    candidates = [
        candidate
        for name in names
        for candidate in _candidates(problem, [record for record in able if record.family == name], target)
    ]
    candidates += _of_other_families(problem, names, records, target, serves)
    best = min(candidates, key=lambda candidate: candidate.rank)
    near = [candidate for candidate in candidates if candidate.ms <= (1 + BUNDLED_MARGIN) * best.ms]
    near.sort(key=lambda candidate: candidate.rank)
    best = next((candidate for candidate in near if is_bundled(candidate.record)), best)
    if may_split(problem):
        best = _split(problem, best, target, serves) or best
    own = next(candidate for candidate in candidates if candidate.record == nearest)
    least = least_ms(problem, ((record.problem, record.ms) for record in able if record.ms))
    return best.record, TransferEstimate(
        ms=max(best.ms, least),
        nearest=nearest,
        nearest_ms=own.ms,
        peers=expected_peers(problem, alike, target),
    )


def _candidates(problem: Problem, records: Sequence[Record], target: Target) -> Iterator[_Candidate]:
    """Yields the configs of one family, each with its nearest record. Tuned configs come first."""
    anchor = nearest_record(problem, records)
    assert anchor is not None
    assert anchor.config is not None
    family = find_family(anchor.family)
    here = msgspec.structs.replace(problem, causal=anchor.problem.causal)

    def order(candidate: _Known) -> tuple[float, bool, str]:
        # Records of two masks of one shape are equally near. The one that `nearest_record` returns comes
        # first.
        return candidate.distance, candidate.record is not anchor, candidate.record.problem.key

    neighbours = sorted((_known(record, problem, target) for record in records), key=order)
    correction = _correction(neighbours)
    # Variants of several starting configs are often the same.
    span = functools.cache(lambda config: family.makespan_ms(here, config, target))

    def expected(config: Config) -> float:
        return span(config) * math.exp(correction + _penalty(config, neighbours[:MAX_NEIGHBOURS], target))

    doubt = PORTABLE_MARGIN * neighbours[0].distance if family.interpreted else 0.0
    tuned: dict[Config, _Candidate] = {}
    for neighbour in neighbours:
        config = neighbour.record.config
        assert config is not None
        if config not in tuned:
            far = doubt + STEP_MARGIN * (neighbour.distance - neighbours[0].distance)
            tuned[config] = _Candidate(neighbour.record, expected(config), far)
    yield from tuned.values()
    slight = NEIGHBOUR_MARGIN if _is_plain_prompt(problem) else UNTIMED_MARGIN
    best = sorted(tuned, key=lambda config: tuned[config].rank)[:NUM_SEEDS]
    # The default config has another tile if there are few queries.
    default = family.default(here, target)
    for start in dict.fromkeys((*best, anchor.config)):
        for config in (default, *family.schedule_variants(here, start, target)):
            more = slight if _are_neighbours(config, start) else UNTIMED_MARGIN
            # A penalty only raises the estimate, so configs with a longer schedule are skipped.
            if config not in tuned and span(config) * (1 + more) < span(start):
                record = untimed(tuned[start].record, config)
                yield _Candidate(record, expected(config), tuned[start].doubt + more)


def _of_other_families(
    problem: Problem,
    names: Sequence[str],
    records: Iterable[Record],
    target: Target,
    serves: Callable[[Record], bool],
) -> Iterator[_Candidate]:
    """Yields the default configs of families that were tuned at such shapes without features only."""
    if not problem.features:
        return
    alike = [record for record in tuned_alike(without(problem, problem.features), records) if record.config]
    alike = [record for record in alike if not is_short_prompt(record, problem)]
    for name in sorted({record.family for record in alike} - set(names)):
        plain = [record for record in alike if record.family == name]
        neighbours = sorted(
            (_known(record, problem, target) for record in plain), key=lambda neighbour: neighbour.distance
        )
        family = find_family(name)
        default = family.default(problem, target)
        record = untimed(msgspec.structs.replace(neighbours[0].record, problem=problem), default)
        if serves(record):
            ms = family.makespan_ms(problem, default, target) * math.exp(_correction(neighbours))
            yield _Candidate(record, ms, 2 * UNTIMED_MARGIN)


def _split(
    problem: Problem, best: _Candidate, target: Target, serves: Callable[[Record], bool]
) -> _Candidate | None:
    """Returns the default of the family that splits keys, if its schedule is far shorter, else None.

    It replaces configs of families without splits where such keys were never tuned.
    """
    config, family = best.record.config, find_family(DECODING_FAMILY)
    assert config is not None
    if best.record.family == family.name or family.supports(problem, target) is not None:
        return None
    default = family.default(problem, target)
    gain = family.makespan_ms(problem, default, target) / find_family(best.record.family).makespan_ms(
        problem, config, target
    )
    record = untimed(msgspec.structs.replace(best.record, family=family.name, problem=problem), default)
    if gain > SPLIT_GAIN or not serves(record):
        return None
    return _Candidate(record, gain * best.ms, best.doubt)


class _Known(NamedTuple):
    """A tuned shape: the winner's record, the distance, and the winner's schedule time there in ms."""

    record: Record
    distance: float
    won: float

    @property
    def correction(self) -> float | None:
        """The logarithm of the winner's measured over its schedule time, or None if it was not timed."""
        return math.log(self.record.ms / self.won) if self.record.ms else None


def _known(record: Record, problem: Problem, target: Target) -> _Known:
    assert record.config is not None
    won = _span(record.family, record.problem, record.config, target)
    return _Known(record, distance(record.problem, problem), won)


def _correction(neighbours: Sequence[_Known]) -> float:
    """Returns the family's correction at the shape: the logarithm of measured over schedule time."""
    timed = [
        (neighbour.correction, neighbour.distance)
        for neighbour in neighbours
        if neighbour.correction is not None
    ]
    return regression(timed) if timed else 0.0


def _penalty(config: Config, near: Sequence[_Known], target: Target) -> float:
    """Returns the penalty of a config: the logarithm of extra time that the schedule does not contain."""
    penalty = total = 0.0
    for neighbour in near:
        share = weight(neighbour.distance, PENALTY_LENGTH_SCALE)
        ahead = math.log(
            neighbour.won / _span(neighbour.record.family, neighbour.record.problem, config, target)
        )
        penalty += share * min(MAX_PENALTY, max(0.0, ahead))
        total += share
    return penalty / (total + PRIOR_WEIGHT)


@functools.lru_cache(maxsize=8192)
def _span(family: str, problem: Problem, config: Config, target: Target) -> float:
    """Returns the schedule time of a config at a tuned shape, in ms."""
    return find_family(family).makespan_ms(problem, config, target)


def _is_plain_prompt(problem: Problem) -> bool:
    """Whether the regret was measured for such problems. Decoding, masks and gradients are excluded."""
    many = problem.seqlen_q > FEW_QUERIES and not problem.dtype.is_quantized
    return many and not problem.features and not problem.is_backward


def _are_neighbours(config: Config, other: Config) -> bool:
    """Whether two configs differ on one axis only."""
    pairs = zip(config.items(), other.items(), strict=True)
    return [value == another for value, another in pairs].count(False) == 1


def untimed(record: Record, config: Config) -> Record:
    """Returns the record of a config that was not verified or timed."""
    return msgspec.structs.replace(
        record,
        config=config,
        kernel=None,
        provenance=Provenance.PREDICTED,
        resources=None,
        verdict=None,
        measurement=None,
    )


def forecast_related(
    problem: Problem,
    records: Iterable[Record],
    target: Target,
    serves: Callable[[Record], bool],
    usual: str,
    is_bundled: Callable[[Record], bool] = lambda record: False,
) -> tuple[Record, TransferEstimate] | None:
    """Returns the result of `forecast` for shapes of the other 16-bit type or of the next wider head dims.

    The record has the problem's own type and head dims, and no verdict. `usual` is the family whose default
    config is used otherwise. Types and head dims without a config of this family that serves are skipped: the
    tuned configs of slower families would replace its default config.
    """

    def own(record: Record) -> Record | None:
        config = _carried_over(record, problem, target)
        if config is None:
            return None
        shape = msgspec.structs.replace(
            record.problem,
            dtype=problem.dtype,
            head_dim=problem.head_dim,
            value_head_dim=problem.value_head_dim,
        )
        return msgspec.structs.replace(untimed(record, config), problem=shape)

    def carries_over(record: Record) -> bool:
        return serves(record) and _carried_over(record, problem, target) is not None

    def is_own_bundled(record: Record) -> bool:
        carried = own(record)
        return carried is not None and is_bundled(carried)

    all_records = tuple(records)
    for other in _related(problem, all_records):
        if not any(
            record.family == usual and carries_over(record) for record in tuned_alike(other, all_records)
        ):
            continue
        estimate = forecast(other, all_records, target, carries_over, is_own_bundled)
        assert estimate is not None
        record, why = estimate
        carried = own(record)
        if carried is not None:
            peers = narrowed_peers(why.peers, other, problem)
            return carried, msgspec.structs.replace(why, peers=peers)
    return None


def _related(problem: Problem, records: Sequence[Record]) -> Iterator[Problem]:
    """Yields the problem with the types and head dims of tuned shapes, the nearest first."""
    if problem.dtype.is_quantized:
        return
    dtypes = (problem.dtype, *(dtype for dtype in SIXTEEN_BITS if dtype is not problem.dtype))
    if problem.dtype not in SIXTEEN_BITS:
        dtypes = (problem.dtype,)
    shapes = {
        (record.problem.head_dim, record.problem.value_head_dim, record.problem.dtype)
        for record in records
        if record.problem.dtype in dtypes and _is_wider(record.problem, problem)
    }
    for head_dim, value_head_dim, dtype in sorted(
        shapes, key=lambda shape: (shape[:2], dtypes.index(shape[2]))
    ):
        other = msgspec.structs.replace(
            problem, dtype=dtype, head_dim=head_dim, value_head_dim=value_head_dim
        )
        if other != problem:
            yield other


def _is_wider(tuned: Problem, problem: Problem) -> bool:
    """Whether the heads of a tuned shape are at least as wide as the problem's, up to a limit."""
    return all(
        own <= other <= WIDEST * power_of_two(max(own, NARROWEST))
        for own, other in (
            (problem.head_dim, tuned.head_dim),
            (problem.value_head_dim, tuned.value_head_dim),
        )
    )


def _carried_over(record: Record, problem: Problem, target: Target) -> Config | None:
    """Returns a record's config for the problem's head dims, or None if it is not in their search space."""
    family = find_family(record.family)
    if record.config is None:
        return None
    defaults = dict(family.default(problem, target).items())
    of_width = {name: defaults[name] for name in OF_WIDTH if name in defaults}
    config = msgspec.structs.replace(record.config, **of_width)
    return config if family.space(problem, target).contains(config) else None
