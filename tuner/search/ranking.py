"""The initial order of a search: all candidates that fit, fastest predicted first."""

import itertools
import math
import random
from collections.abc import Iterable, Sequence

import msgspec

from flashtune.templates.registry import find_family
from flashtune.tuner.candidates import Candidate, Demand, SearchTask, demand
from flashtune.tuner.perf_model.prediction import Calibration, estimated, expected_ms

# Candidates of each family. Ranking more would delay the start of the search.
MAX_RANKED = 4096
# Predictions with a smaller relative difference count as equal.
SAME_PREDICTION = 1e-4
# Predictions of different families compare badly. A family has a share of the initial design if its best
# prediction is at most this many times the best of all.
WORTH_A_START = 2.0
# A family with a default predicted this many times slower than another's is searched only if it is named.
# One launch of such a family can take longer than all trials of the others.
HOPELESS = 3.0


class Ranked(msgspec.Struct, frozen=True):
    """A candidate that fits by the model, and its predicted time in ms."""

    candidate: Candidate
    predicted_ms: float


def rank(scope: SearchTask, seed: int, fit: Calibration) -> tuple[Ranked, ...]:
    """Returns the candidates that fit by the model, fastest predicted first; a random sample of large spaces.

    Registers are estimated, because no kernel is compiled. Equal predictions are in random order, so
    that the first trials are not near copies.
    """
    draw = random.Random(seed)  # noqa: S311 - no secret
    drawn: list[Candidate] = []
    for entry in scope.spaces:
        candidates = list(entry.candidates())
        draw.shuffle(candidates)
        drawn += candidates[:MAX_RANKED]
    demands = ((candidate, demand(scope, candidate)) for candidate in drawn)
    ranked = [
        Ranked(candidate, _predict(scope, candidate, need, fit))
        for candidate, need in demands
        if not need.excess
    ]
    return tuple(sorted(ranked, key=lambda entry: entry.predicted_ms))


def promising(scope: SearchTask, fit: Calibration) -> SearchTask:
    """Returns a scope without the families that are predicted far slower.

    Families with a default that does not fit the target stay.
    """
    predicted = {
        candidate.family: _predict(scope, candidate, need, fit)
        for candidate in scope.defaults()
        if not (need := demand(scope, candidate)).excess
    }
    limit = HOPELESS * min(predicted.values(), default=math.inf)
    spaces = tuple(entry for entry in scope.spaces if predicted.get(entry.family.name, 0.0) <= limit)
    return msgspec.structs.replace(scope, spaces=spaces)


def _predict(scope: SearchTask, candidate: Candidate, need: Demand, fit: Calibration) -> float:
    family = find_family(candidate.family)
    resources = estimated(scope.problem, candidate.config, need.sram_bytes, scope.target)
    return expected_ms(scope.problem, family, candidate.config, resources, scope.target, fit)


def initial_design(ranked: Sequence[Ranked], limit: int) -> tuple[Candidate, ...]:
    """Returns the initial design: the fastest predicted candidates of each promising family, in turn."""
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
    """Returns the fastest predicted candidates: one of each group with equal predictions, then the others."""
    first: list[Candidate] = []
    others: list[Candidate] = []
    last = -math.inf
    for entry in ranked:
        if entry.predicted_ms > last * (1 + SAME_PREDICTION) or last < 0:
            first.append(entry.candidate)
            last = entry.predicted_ms
        else:
            others.append(entry.candidate)
        if len(first) == limit:
            break
    return tuple([*first, *others][:limit])
