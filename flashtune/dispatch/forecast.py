"""Which of the tuned configs serves a shape that nobody tuned: the one that is expected to be fastest there.

What a config takes is what its schedule takes (`Family.span`), times what the tuned shapes of its family
took over what their schedules do: all of them on average, the near ones most (Nadaraya and Watson's kernel
regression). Where a winner was measured no other config can have been faster: where the schedule alone would
have it so, something else holds that config up, and it is taken to do so near there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from flashtune.core.config import Config
from flashtune.core.problem import Problem
from flashtune.core.record import Forecast, Provenance, Record
from flashtune.core.target import Target
from flashtune.dispatch.nearest import (
    FEW_QUERIES,
    PRIOR,
    distance,
    nearest_record,
    regression,
    tuned_alike,
    weight,
)
from flashtune.dispatch.peer_forecast import expected_peers
from flashtune.templates.registry import find_family

# How many steps of a factor of two away what was measured still says what holds configs up that did not win.
HELD_REACH = 1.0
# So many near shapes are asked what holds a config up, and none answers more than this (a logarithm).
ASKED = 4
MOST_HELD = 0.3
# What is expected of a config must be better by so much for it to be chosen, relatively: for each step of a
# factor of two that it won farther away than the nearest winner, for each that its family's nearest winner is
# away, where the family's programs come and go, whose times are known less well, and where nobody proved or
# timed it anywhere: less where it differs in a single choice from a config that won.
STEP_DOUBT = 0.005
PORTABLE_DOUBT = 0.04
UNTIMED_DOUBT = 0.05
BESIDE_DOUBT = 0.02
# Configs of a family that won elsewhere from which such others are looked for: the best here.
STARTS = 3


class _Candidate(NamedTuple):
    """A record whose config may serve, what its config is expected to take, and how that is doubted."""

    record: Record
    ms: float
    doubt: float

    @property
    def rank(self) -> float:
        return self.ms * (1 + self.doubt)


def forecast(
    problem: Problem, records: Iterable[Record], target: Target, serves: Callable[[Record], bool]
) -> tuple[Record, Forecast] | None:
    """The record whose config is expected to be fastest, and why; None where nothing alike is tuned.

    The same records give the same answer in whatever order they come. A config that was tuned nowhere has a
    record without a verdict, as a default has.

    Args:
        problem: A shape that is not tuned.
        records: Selected records of the GPU, each with a config.
        target: The GPU.
        serves: Whether a record's kernel can serve the call.
    """
    alike = tuned_alike(problem, records)
    able = [record for record in alike if serves(record)]
    nearest = nearest_record(problem, able)
    if nearest is None:
        return None
    names = sorted({record.family for record in able}, key=lambda name: (name != nearest.family, name))
    candidates = [
        candidate
        for name in names
        for candidate in _candidates(problem, [record for record in able if record.family == name], target)
    ]
    best = min(candidates, key=lambda candidate: candidate.rank)
    usual = next(one for one in candidates if one.record == nearest)
    peers = expected_peers(problem, alike, target)
    return best.record, Forecast(ms=best.ms, nearest=nearest, nearest_ms=usual.ms, peers=peers)


def _candidates(problem: Problem, records: Sequence[Record], target: Target) -> Iterator[_Candidate]:
    """The configs of one family, each with its nearest record, the nearest first."""
    anchor = nearest_record(problem, records)
    assert anchor is not None
    assert anchor.config is not None
    family = find_family(anchor.family)
    here = msgspec.structs.replace(problem, causal=anchor.problem.causal)

    def order(known: _Known) -> tuple[float, bool, str]:
        # Two masks of one shape are equally near: the nearest winner is the one that stands for its config.
        return known.distance, known.record is not anchor, known.record.problem.key

    known = sorted((_known(record, problem, target) for record in records), key=order)
    longer = _longer(known)
    # Several starts have the same configs beside them.
    span = functools.cache(lambda config: family.span(here, config, target))

    def expected(config: Config) -> float:
        return span(config) * math.exp(longer + _held_up(config, known[:ASKED], target))

    doubt = PORTABLE_DOUBT * known[0].distance if family.interpreted else 0.0
    tuned: dict[Config, _Candidate] = {}
    for one in known:
        config = one.record.config
        assert config is not None
        if config not in tuned:
            far = doubt + STEP_DOUBT * (one.distance - known[0].distance)
            tuned[config] = _Candidate(one.record, expected(config), far)
    yield from tuned.values()
    slight = BESIDE_DOUBT if _is_plain_prompt(problem) else UNTIMED_DOUBT
    best = sorted(tuned, key=lambda config: tuned[config].rank)[:STARTS]
    # It has another tile where queries are few.
    default = family.default(here, target)
    for start in dict.fromkeys((*best, anchor.config)):
        for config in (default, *family.spread_otherwise(here, start, target)):
            more = slight if _is_beside(config, start) else UNTIMED_DOUBT
            # Its span at the tuned shapes could only speak against it.
            if config not in tuned and span(config) * (1 + more) < span(start):
                record = untimed(tuned[start].record, config)
                yield _Candidate(record, expected(config), tuned[start].doubt + more)


class _Known(NamedTuple):
    """A tuned shape: its winner, how far away it is, and what the winner's schedule takes there, in ms."""

    record: Record
    distance: float
    won: float

    @property
    def longer(self) -> float | None:
        """What the winner took over its schedule, a logarithm; None where nobody timed it."""
        return math.log(self.record.ms / self.won) if self.record.ms else None


def _known(record: Record, problem: Problem, target: Target) -> _Known:
    assert record.config is not None
    won = _span(record.family, record.problem, record.config, target)
    return _Known(record, distance(record.problem, problem), won)


def _longer(known: Sequence[_Known]) -> float:
    """How much longer a family's launches take than their schedules: a logarithm."""
    timed = [(one.longer, one.distance) for one in known if one.longer is not None]
    return regression(timed) if timed else 0.0


def _held_up(config: Config, near: Sequence[_Known], target: Target) -> float:
    """How much longer a config takes than others by what its schedule does not know: a logarithm."""
    held = total = 0.0
    for one in near:
        share = weight(one.distance, HELD_REACH)
        ahead = math.log(one.won / _span(one.record.family, one.record.problem, config, target))
        held += share * min(MOST_HELD, max(0.0, ahead))
        total += share
    return held / (total + PRIOR)


@functools.lru_cache(maxsize=8192)
def _span(family: str, problem: Problem, config: Config, target: Target) -> float:
    """What a config's schedule takes at a tuned shape, in ms."""
    return find_family(family).span(problem, config, target)


def _is_plain_prompt(problem: Problem) -> bool:
    """Whether a problem is of the kind whose regret was measured: decoding, masks and gradients are not."""
    many = problem.seqlen_q > FEW_QUERIES and not problem.dtype.is_quantized
    return many and not problem.features and not problem.is_backward


def _is_beside(config: Config, other: Config) -> bool:
    """Whether two configs differ in one choice alone."""
    pairs = zip(config.items(), other.items(), strict=True)
    return [one == another for one, another in pairs].count(False) == 1


def untimed(record: Record, config: Config) -> Record:
    """The record of a config that nobody verified or timed."""
    return msgspec.structs.replace(
        record,
        config=config,
        kernel=None,
        provenance=Provenance.PREDICTED,
        resources=None,
        verdict=None,
        measurement=None,
    )
