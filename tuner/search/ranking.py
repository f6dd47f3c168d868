"""The order in which a search starts: all candidates that fit, fastest predicted first."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence

import msgspec

from flashtune.templates.registry import find_family
from flashtune.tuner.candidates import Candidate, Demand, Scope, demand
from flashtune.tuner.perf_model.calibration import Fit, expected_ms
from flashtune.tuner.perf_model.features import estimated

# Of each family; a model that ranks more than this would delay the start of the search.
MOST_RANKED = 4096
# Predictions closer than this, relatively, count as one.
SAME_PREDICTION = 1e-4
# Predictions of different families compare badly: one whose best is up to this many times slower than
# the best of all has its share of the start.
WORTH_A_START = 2.0
# A family whose default is predicted to take this many times as long as another's is not searched unless
# it was asked for: one of its launches can take longer than all that the others need.
HOPELESS = 3.0


class Ranked(msgspec.Struct, frozen=True):
    """A candidate that fits by the model, and the time that is predicted of it, in ms."""

    candidate: Candidate
    predicted_ms: float


def rank(scope: Scope, seed: int, fit: Fit) -> tuple[Ranked, ...]:
    """The candidates that fit by the model, fastest predicted first, a seeded draw where they are many.

    Registers are estimated here, nothing being compiled. Among equal predictions the
    order is random, so that a start from the top does not try near copies.
    """
    draw = random.Random(seed)  # noqa: S311 - no secret
    drawn: list[Candidate] = []
    for entry in scope.spaces:
        candidates = list(entry.candidates())
        draw.shuffle(candidates)
        drawn += candidates[:MOST_RANKED]
    demands = ((candidate, demand(scope, candidate)) for candidate in drawn)
    ranked = [
        Ranked(candidate, _predict(scope, candidate, need, fit))
        for candidate, need in demands
        if not need.excess
    ]
    return tuple(sorted(ranked, key=lambda entry: entry.predicted_ms))


def promising(scope: Scope, fit: Fit) -> Scope:
    """A scope without the families that the prediction gives no chance.

    The prediction of what does not fit counts for nothing, so that such families stay.
    """
    predicted = {
        candidate.family: _predict(scope, candidate, need, fit)
        for candidate in scope.defaults()
        if not (need := demand(scope, candidate)).excess
    }
    limit = HOPELESS * min(predicted.values(), default=math.inf)
    spaces = tuple(entry for entry in scope.spaces if predicted.get(entry.family.name, 0.0) <= limit)
    return msgspec.structs.replace(scope, spaces=spaces)


def _predict(scope: Scope, candidate: Candidate, need: Demand, fit: Fit) -> float:
    family = find_family(candidate.family)
    resources = estimated(scope.problem, candidate.config, need.sram_bytes, scope.target)
    return expected_ms(scope.problem, family, candidate.config, resources, scope.target, fit)


def opening(ranked: Sequence[Ranked], limit: int) -> tuple[Candidate, ...]:
    """What to try first, by prediction: of each family that may win, by turns."""
    if not ranked:
        return ()
    slowest = WORTH_A_START * ranked[0].predicted_ms
    hopeful = dict.fromkeys(entry.candidate.family for entry in ranked if entry.predicted_ms <= slowest)
    shares = (
        varied((entry for entry in ranked if entry.candidate.family == family), limit) for family in hopeful
    )
    turns = itertools.chain.from_iterable(itertools.zip_longest(*shares))
    return tuple(itertools.islice((candidate for candidate in turns if candidate), limit))


def varied(ranked: Iterable[Ranked], limit: int) -> tuple[Candidate, ...]:
    """The fastest predicted candidates, one of each prediction: others differ in what the model ignores."""
    chosen: list[Candidate] = []
    last = -math.inf
    for entry in ranked:
        if entry.predicted_ms > last * (1 + SAME_PREDICTION) or last < 0:
            chosen.append(entry.candidate)
            last = entry.predicted_ms
        if len(chosen) == limit:
            break
    return tuple(chosen)
