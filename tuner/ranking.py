"""The order in which a search starts: all candidates that fit, fastest predicted first."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import msgspec

from flashtune.record import Resources
from flashtune.templates.registry import find_family
from flashtune.tuner.candidates import Candidate, Demand, Scope, demand
from flashtune.tuner.predict import predict_ms

# A model that ranks more than this would delay the start of the search.
MOST_RANKED = 4096
# Predictions closer than this, relatively, count as one.
SAME_PREDICTION = 1e-4


class Ranked(msgspec.Struct, frozen=True):
    """A candidate that fits by the model, and the time that is predicted of it, in ms."""

    candidate: Candidate
    predicted_ms: float


def rank(scope: Scope, seed: int) -> tuple[Ranked, ...]:
    """The candidates that fit by the model, fastest predicted first, a seeded draw where they are many.

    The prediction knows no registers here, nothing being compiled. Among equal predictions the
    order is random, so that a start from the top does not try near copies.
    """
    draw = random.Random(seed)  # noqa: S311 - no secret
    candidates = list(scope.candidates())
    draw.shuffle(candidates)
    demands = ((candidate, demand(scope, candidate)) for candidate in candidates[:MOST_RANKED])
    ranked = [
        Ranked(candidate, _predict(scope, candidate, need)) for candidate, need in demands if not need.excess
    ]
    return tuple(sorted(ranked, key=lambda entry: entry.predicted_ms))


def _predict(scope: Scope, candidate: Candidate, need: Demand) -> float:
    family = find_family(candidate.family)
    return predict_ms(
        scope.problem, family, candidate.config, Resources(sram_bytes=need.sram_bytes), scope.target
    )


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
