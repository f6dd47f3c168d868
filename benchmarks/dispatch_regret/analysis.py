"""Regret of dispatch at untuned shapes: shapes, tables and figures.

`timing` measures. This module needs no GPU, so the same measurements can judge other selection rules.
"""

import functools
import hashlib
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator

import msgspec

from flashtune.core.config import Config, Space
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.core.record import Record, ShortText, Versions
from flashtune.core.target import Target
from flashtune.db.eligibility import by_problem
from flashtune.dispatch.lookup import select
from flashtune.dispatch.tables import Tables
from flashtune.templates.family import unsupported_reason
from flashtune.templates.registry import families, find_family
from flashtune.tuner.candidates import Candidate

HEAD_DIMS = (64, 128, 256)
KV_HEADS = (1, 2, 4, 8, 12, 16, 24, 32)
GROUPS = (1, 1, 1, 2, 4, 5, 8)
MAX_HEADS = 128
SHORTEST, LONGEST = 64, 32768
LARGEST_BATCH = 128
# Shorter ones are of a launch's own size, longer ones cost more of the GPU's time than they tell.
MIN_FLOPS, MAX_FLOPS = 3e9, 1.5e12
MAX_BYTES = 2**31
# Shares of the table's anchors that dispatch is given.
SHARES = (1.0, 0.5, 0.25)
# Additional configs of portable families.
PORTABLE = 4


class Timed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One config at one shape: the median and the 20th and 80th percentiles, in ms."""

    family: ShortText
    config: ShortText
    ms: float
    p20: float
    p80: float
    samples: int


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A held-out shape and everything that was timed there in one run."""

    problem: Problem
    timed: tuple[Timed, ...]

    @property
    def best(self) -> Timed:
        """The fastest."""
        return min(self.timed, key=lambda timed: timed.ms)


class RegretReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured points, their GPU and versions."""

    target: ShortText
    seed: int
    versions: Versions
    points: tuple[Point, ...]


class Figures(msgspec.Struct, frozen=True):
    """Regrets over many points: how much longer dispatch's choice takes than the best, as a share."""

    share: float  # Of the table's anchors that dispatch was given.
    anchors: int  # How many those are.
    points: int  # How many shapes.
    # median, p95, worst: Of the regrets.
    median: float
    p95: float
    worst: float
    unknown: int  # Shapes at which dispatch's choice was not timed; they count nowhere else.


def draw_problems(count: int, seed: int, anchors: Iterable[Problem]) -> tuple[Problem, ...]:
    """Random shapes in bf16, none of them an anchor and none twice; the same seed gives the same."""
    chance = random.Random(seed)  # noqa: S311 - shapes, no secrets
    taken = {problem.key for problem in anchors}
    drawn: dict[str, Problem] = {}
    while len(drawn) < count:
        problem = _draw(chance)
        fits = MIN_FLOPS <= problem.nominal_flops() <= MAX_FLOPS and problem.minimal_bytes() <= MAX_BYTES
        if fits and problem.key not in taken:
            drawn[problem.key] = problem
    return tuple(drawn.values())


def _draw(chance: random.Random) -> Problem:
    kv_heads = chance.choice(KV_HEADS)
    heads = min(kv_heads * chance.choice(GROUPS), MAX_HEADS // kv_heads * kv_heads)
    seqlen_q = _extent(chance, SHORTEST, LONGEST)
    # Most calls attend from a sequence to itself, some to more keys than queries.
    seqlen_kv = seqlen_q if chance.random() < 0.75 else _extent(chance, seqlen_q, 2 * LONGEST)
    head_dim = chance.choice(HEAD_DIMS)
    return Problem(
        dtype=Dtype.BF16,
        head_dim=head_dim,
        value_head_dim=head_dim,
        heads=heads,
        kv_heads=kv_heads,
        batch=round(2 ** chance.uniform(0, math.log2(LARGEST_BATCH))),
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        causal=chance.choice((Causal.NONE, Causal.BOTTOM_RIGHT)),
    )


def _extent(chance: random.Random, least: int, most: int) -> int:
    """A length, evenly in its logarithm; half of them are multiples of 64."""
    length = round(2 ** chance.uniform(math.log2(least), math.log2(most)))
    return max(least, length // 64 * 64) if chance.random() < 0.5 else length


def thinned(records: Iterable[Record], share: float) -> tuple[Record, ...]:
    """The records of a share of the anchors of each type, head dim and mask; shares are nested."""
    groups: dict[Problem, dict[str, list[Record]]] = {}
    for record in records:
        problem = record.problem
        groups.setdefault(problem.computation, {}).setdefault(problem.key, []).append(record)
    kept: list[Record] = []
    for anchors in groups.values():
        order = sorted(anchors, key=lambda key: hashlib.sha256(key.encode()).digest())
        for key in order[: max(1, math.ceil(share * len(order)))]:
            kept += anchors[key]
    return tuple(kept)


def finalists(problem: Problem, target: Target, records: Iterable[Record]) -> tuple[Candidate, ...]:
    """The candidates that are timed at a shape.

    These are the valid winners of all anchors of the same type and head dims, the families' defaults, and the
    neighbours of both. Portable families have only the winners of the nearest anchors with the same mask.
    """
    candidates: dict[Candidate, None] = {}
    portable: dict[Candidate, None] = {}
    able = {
        family.name: family
        for family in families()
        if not unsupported_reason(family, problem, target, Specialization())
    }
    spaces = {name: family.space(problem, target) for name, family in able.items()}
    for record in sorted(records, key=lambda record: _unlike(record.problem, problem)):
        if record.config is None or record.family not in able or not _alike(record.problem, problem):
            continue
        if _is_portable(record.family):
            if record.problem.causal is problem.causal and len(portable) < PORTABLE:
                portable[Candidate(record.family, record.config)] = None
        elif spaces[record.family].contains(record.config):
            candidates[Candidate(record.family, record.config)] = None
    for name, family in able.items():
        default = Candidate(name, family.default(problem, target))
        if _is_portable(name):
            portable[default] = None
        else:
            candidates[default] = None
            candidates |= dict.fromkeys(
                Candidate(name, config) for config in _beside(default.config, spaces[name])
            )
    return (*candidates, *portable)


def _alike(problem: Problem, other: Problem) -> bool:
    masks = {"causal": Causal.NONE}
    return msgspec.structs.replace(problem.computation, **masks) == msgspec.structs.replace(
        other.computation, **masks
    )


def _unlike(problem: Problem, other: Problem) -> tuple[bool, float, str]:
    apart = abs(math.log2(problem.flops() / max(1, other.flops())))
    return problem.causal is not other.causal, apart, problem.key


def _is_portable(name: str) -> bool:
    return find_family(name).interpreted


def _beside(config: Config, space: Space) -> Iterator[Config]:
    """The configs of a space that differ from one on one axis."""
    for axis in space.axes:
        for value in axis.values:
            other = msgspec.structs.replace(config, **{axis.name: value})
            if other != config and space.contains(other):
                yield other


Choose = Callable[[Problem, tuple[Record, ...]], Candidate]


# Reports ask for the same shapes and records several times.
@functools.cache
def dispatched(target: Target, problem: Problem, records: tuple[Record, ...]) -> Candidate:
    """The candidate that dispatch would launch on contiguous tensors with a table of these records."""
    selection = select(problem, target, _tables(records), Specialization(), generated=True)
    assert selection.record.config is not None
    return Candidate(selection.record.family, selection.record.config)


@functools.lru_cache(maxsize=len(SHARES))
def _tables(records: tuple[Record, ...]) -> Tables:
    return Tables({}, by_problem(records))


def names(label: str, config: Config) -> bool:
    """Returns whether a saved label names a config. Axes that the label lacks have their defaults."""
    named = dict(word.split("=") for word in label.split())
    if not named.keys() <= set(config.__struct_fields__):
        return False
    try:
        return msgspec.convert(named, type(config), strict=False) == config
    except msgspec.ValidationError:
        # Values that the family has no longer.
        return False


def regret(point: Point, candidate: Candidate) -> float | None:
    """How much longer a candidate takes than the best, as a share; None where it was not timed."""
    for timed in point.timed:
        if timed.family == candidate.family and names(timed.config, candidate.config):
            return timed.ms / point.best.ms - 1
    return None


def figures(points: Iterable[Point], records: tuple[Record, ...], share: float, choose: Choose) -> Figures:
    """The regrets of a rule of choosing with a share of a table's anchors."""
    kept = thinned(records, share)
    regrets = [regret(point, choose(point.problem, kept)) for point in points]
    values = sorted(value for value in regrets if value is not None)
    return Figures(
        share=share,
        anchors=len({record.problem.key for record in kept}),
        points=len(values),
        median=statistics.median(values) if values else math.nan,
        p95=values[math.ceil(0.95 * len(values)) - 1] if values else math.nan,
        worst=values[-1] if values else math.nan,
        unknown=len(regrets) - len(values),
    )
