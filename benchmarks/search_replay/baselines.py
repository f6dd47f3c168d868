"""Baseline strategies: any order, and one of Optuna's samplers alone."""

import math
import random
from collections.abc import Iterable

import numpy as np

from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.search.optuna_study import Study, TrialResult, tpe_sampler
from flashtune.tuner.search.policy import Policy, SearchContext, Strategy, default_policy
from flashtune.tuner.search.surrogate import CandidateGrid


class InOrder:
    """Proposes candidates in an order that was settled before."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        self._candidates = iter(candidates)

    def ask(self) -> Candidate | None:
        """The next one."""
        return next(self._candidates, None)

    def tell(self, candidate: Candidate, answer: TrialResult) -> None:
        """Learns nothing."""

    def expected_gain(self) -> float:
        """Nothing is known."""
        return math.inf


class Sampled:
    """Proposes the suggestion of an Optuna sampler, or the nearest new candidate."""

    def __init__(self, scope: SearchTask, study: Study) -> None:
        self._study = study
        self._pool = CandidateGrid(scope, tuple(scope.candidates()))
        self._free = np.ones(len(self._pool.candidates), dtype=bool)

    def ask(self) -> Candidate | None:
        """The nearest candidate to a suggestion."""
        candidate = self._pool.nearest(self._study.suggest(), self._free) if self._free.any() else None
        if candidate is not None:
            self._free[self._pool.places[candidate]] = False
        return candidate

    def tell(self, candidate: Candidate, answer: TrialResult) -> None:
        """Tells the sampler."""
        self._study.add(candidate, answer)

    def expected_gain(self) -> float:
        """Nothing is known."""
        return math.inf


def at_random(context: SearchContext) -> Strategy:
    """Any order at all."""
    candidates = list(context.scope.candidates())
    random.Random(context.seed).shuffle(candidates)  # noqa: S311 - no secret
    return InOrder(candidates)


def by_tpe(context: SearchContext) -> Strategy:
    """Optuna's tree-structured Parzen estimator."""
    return Sampled(context.scope, Study(context.scope, tpe_sampler(context.seed)))


POLICIES: dict[str, Policy] = {"random": at_random, "tpe": by_tpe, "default": default_policy}
