"""Which of the tuned configs serves a shape that nobody tuned: the one that is expected to be fastest there.

What a config takes at a shape is scaled from the nearest tuned shape, by what its schedule takes
here and there (`Family.span`). There the winner was measured, and no other config can have
been faster: where the schedule alone would have it so, something else holds that config up, and it is taken
to do so here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from flashtune.config import Config
from flashtune.nearest import FEW_QUERIES, distance, nearest_record, tuned_alike
from flashtune.problem import Problem
from flashtune.record import Forecast, Provenance, Record
from flashtune.target import Target
from flashtune.templates.registry import find_family

# What is expected of a config must be better by so much for it to be chosen, relatively: for each step of a
# factor of two that it won farther away than the nearest winner, where its family is another one than the
# nearest winner's, and where nobody proved or timed it anywhere: less where it differs in a single choice
# from a config that won.
STEP_DOUBT = 0.005
FAMILY_DOUBT = 0.03
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
        problem: A shape that nobody tuned.
        records: Selected records of the GPU, each with a config.
        target: The GPU.
        serves: Whether a record's kernel can serve the call.
    """
    able = [record for record in tuned_alike(problem, records) if serves(record)]
    nearest = nearest_record(problem, able)
    if nearest is None:
        return None
    names = sorted({record.family for record in able}, key=lambda name: (name != nearest.family, name))
    candidates = [
        candidate
        for name in names
        for candidate in _candidates(
            problem, [record for record in able if record.family == name], nearest, target
        )
    ]
    best = min(candidates, key=lambda candidate: candidate.rank)
    usual = next(one for one in candidates if one.record == nearest)
    return best.record, Forecast(ms=best.ms, nearest=nearest, nearest_ms=usual.ms)


def _candidates(
    problem: Problem, records: Sequence[Record], nearest: Record, target: Target
) -> Iterator[_Candidate]:
    """The configs of one family, each with its nearest record, the nearest first."""
    anchor = nearest_record(problem, records)
    assert anchor is not None
    assert anchor.config is not None
    family = find_family(anchor.family)
    here = msgspec.structs.replace(problem, causal=anchor.problem.causal)
    won = family.span(anchor.problem, anchor.config, target)

    def expected(config: Config) -> float:
        there = min(won, family.span(anchor.problem, config, target))
        return (anchor.ms or won) * family.span(here, config, target) / there

    def order(record: Record) -> tuple[float, bool, str]:
        # Two masks of one shape are equally near: the nearest winner is the one that stands for its config.
        return distance(record.problem, problem), record is not anchor, record.problem.key

    doubt = 0.0 if anchor.family == nearest.family else FAMILY_DOUBT
    first = distance(anchor.problem, problem)
    tuned: dict[Config, _Candidate] = {}
    for record in sorted(records, key=order):
        assert record.config is not None
        if record.config not in tuned:
            far = doubt + STEP_DOUBT * (distance(record.problem, problem) - first)
            tuned[record.config] = _Candidate(record, expected(record.config), far)
    yield from tuned.values()
    slight = BESIDE_DOUBT if _is_plain_prompt(problem) else UNTIMED_DOUBT
    best = sorted(tuned, key=lambda config: tuned[config].rank)[:STARTS]
    # It has another tile where queries are few.
    default = family.default(here, target)
    for start in dict.fromkeys((*best, anchor.config)):
        usual = family.span(here, start, target)
        for config in (default, *family.spread_otherwise(here, start, target)):
            more = slight if _is_beside(config, start) else UNTIMED_DOUBT
            # Its span at the tuned shape could only speak against it.
            if config not in tuned and family.span(here, config, target) * (1 + more) < usual:
                record = _untimed(tuned[start].record, config)
                yield _Candidate(record, expected(config), tuned[start].doubt + more)


def _is_plain_prompt(problem: Problem) -> bool:
    """Whether a problem is of the kind whose regret was measured: decoding, masks and gradients are not."""
    many = problem.seqlen_q > FEW_QUERIES and not problem.dtype.is_quantized
    return many and not problem.features and not problem.is_backward


def _is_beside(config: Config, other: Config) -> bool:
    """Whether two configs differ in one choice alone."""
    pairs = zip(config.items(), other.items(), strict=True)
    return [one == another for one, another in pairs].count(False) == 1


def _untimed(record: Record, config: Config) -> Record:
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
