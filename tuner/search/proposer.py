"""Proposes the next candidates: first the initial design, then several sources in turn.

The sources are the surrogate's expected improvement, neighbours of the fastest candidates, and Optuna's
sampler. Neighbours differ from a config on one axis.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from flashtune.core.config import Axis, AxisValue, Config, Space
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.search.optuna_study import Study, TrialResult, tpe_sampler
from flashtune.tuner.search.ranking import Ranked
from flashtune.tuner.search.surrogate import CandidateGrid, Surrogate

# A family is pruned if this many of its candidates ran and all took more than HOPELESS_FACTOR times the best.
FAMILY_CHANCES = 4
HOPELESS_FACTOR = 2.0
# Number of the fastest candidates with neighbours to try, the fastest first.
CENTRES = 3
# The expected gain is unknown with fewer results.
LEAST_RESULTS = 12


class DefaultStrategy:
    """Proposes candidates one by one, none twice, and learns from their results.

    A family that is far slower after a few candidates is pruned. On a long problem one launch of a slow
    family can take longer than a whole trial of another family.
    """

    def __init__(
        self,
        scope: SearchTask,
        start: Iterable[Candidate],
        ranked: Callable[[], Sequence[Ranked]],
        results: dict[Candidate, TrialResult],
        seed: int,
    ) -> None:
        self._scope = scope
        self._start = iter(start)
        self._scored = functools.cache(lambda: _scored(scope, ranked()))
        self._study = Study(scope, tpe_sampler(seed))
        self._spaces = {entry.family.name: entry for entry in scope.spaces}
        self._answers: dict[Candidate, TrialResult] = {}
        self._times: dict[str, list[float]] = {name: [] for name in self._spaces}
        self._draw = random.Random(seed)  # noqa: S311 - no secret
        self._open: set[Candidate] = set()
        self._turns = itertools.cycle(self._sources())
        for candidate, answer in results.items():
            self.tell(candidate, answer)

    def _sources(self) -> tuple[Callable[[], Candidate | None], ...]:
        return self._most_expected, self._neighbour_of_best, self._most_expected, self._suggested

    def ask(self) -> Candidate | None:
        """Returns the next candidate, None if no new one is left. It is open until `tell` is called."""
        for candidate in self._start:
            if self._is_worth_trying(candidate):
                return self._opened(candidate)
        for _ in range(len(self._sources())):
            proposed = next(self._turns)()
            if proposed is not None:
                return self._opened(proposed)
        return None

    def tell(self, candidate: Candidate, answer: TrialResult) -> None:
        """Receives the result of a candidate."""
        self._open.discard(candidate)
        self._answers[candidate] = answer
        if answer.ms is not None:
            self._times[candidate.family].append(answer.ms)
        self._study.add(candidate, answer)

    def expected_gain(self) -> float:
        """Returns the largest calibrated expected improvement of the candidates without a result.

        It is infinite with few results. Enqueued candidates outside the pool are not counted.
        """
        times = self._known()
        if len(times) < LEAST_RESULTS or all(ms is None for ms in times.values()):
            return math.inf
        expected = self._landscape.expected_improvements(times, calibrated=True)
        left = [place for place in range(len(expected)) if place not in times]
        left = [place for place in left if not self._is_pruned(self._pool.candidates[place].family)]
        return max(expected[left], default=0.0)

    @property
    def _pool(self) -> CandidateGrid:
        return self._scored()[0]

    @property
    def _landscape(self) -> Surrogate:
        return self._scored()[1]

    def _known(self) -> dict[int, float | None]:
        """Returns the times of the finished candidates of the pool by their index, None for failed ones."""
        places = self._pool.places
        return {
            places[candidate]: answer.ms for candidate, answer in self._answers.items() if candidate in places
        }

    def _opened(self, candidate: Candidate) -> Candidate:
        self._open.add(candidate)
        return candidate

    def _is_new(self, candidate: Candidate) -> bool:
        return candidate not in self._answers and candidate not in self._open

    def _is_worth_trying(self, candidate: Candidate) -> bool:
        return self._is_new(candidate) and not self._is_pruned(candidate.family)

    def _is_pruned(self, family: str) -> bool:
        times = self._times[family]
        fastest = min((ms for times in self._times.values() for ms in times), default=math.inf)
        return len(times) >= FAMILY_CHANCES and min(times) > HOPELESS_FACTOR * fastest

    def _free(self) -> NDArray[np.bool_]:
        """Returns, for each candidate of the pool, whether it can be proposed."""
        pruned = {family for family in self._spaces if self._is_pruned(family)}
        return np.array(
            [
                self._is_new(candidate) and candidate.family not in pruned
                for candidate in self._pool.candidates
            ],
            dtype=bool,
        )

    def _neighbour_of_best(self) -> Candidate | None:
        """Returns a new neighbour of one of the fastest candidates, the fastest first."""
        timed = {candidate: answer.ms for candidate, answer in self._answers.items() if answer.ms is not None}
        for centre in sorted(timed, key=timed.__getitem__)[:CENTRES]:
            entry = self._spaces[centre.family]
            around = [Candidate(centre.family, config) for config in neighbours(entry.space, centre.config)]
            new = [candidate for candidate in around if self._is_worth_trying(candidate)]
            if new:
                return self._draw.choice(new)
        return None

    def _most_expected(self) -> Candidate | None:
        """Returns the candidate with the largest expected improvement; first the fastest predicted one."""
        free, places = self._free(), self._pool.places
        if not free.any():
            return None
        times = self._known()
        if all(ms is None for ms in times.values()):
            return self._pool.candidates[int(free.argmax())]
        trying = [places[candidate] for candidate in self._open if candidate in places]
        expected = self._landscape.expected_improvements(times, trying)
        return self._pool.candidates[int(np.where(free, expected, -np.inf).argmax())]

    def _suggested(self) -> Candidate | None:
        """Returns the suggestion of Optuna's sampler, or the new candidate nearest to it."""
        free = self._free()
        return self._pool.nearest(self._study.suggest(), free) if free.any() else None


def _scored(scope: SearchTask, ranked: Sequence[Ranked]) -> tuple[CandidateGrid, Surrogate]:
    """Returns the candidates and their surrogate."""
    pool = CandidateGrid(scope, [entry.candidate for entry in ranked])
    return pool, Surrogate(pool, [entry.predicted_ms for entry in ranked])


def neighbours(space: Space, config: Config) -> Iterator[Config]:
    """Yields the points of a space that differ from a config on one axis, in the order of the axes.

    An ordered axis changes by one step, other axes change to any value. An axis that becomes inactive
    gets its first value. An axis that becomes active keeps its value.
    """
    for axis in space.axes:
        for value in _neighbour_values(axis, getattr(config, axis.name)):
            moved = _moved(space, config, axis, value)
            if moved != config and space.contains(moved):
                yield moved


def _neighbour_values(axis: Axis, value: AxisValue) -> tuple[AxisValue, ...]:
    if value not in axis.values or not axis.ordered:
        return axis.values
    position = axis.values.index(value)
    return axis.values[max(0, position - 1) : position + 2]


def _moved(space: Space, config: Config, along: Axis, value: AxisValue) -> Config:
    return space.choose(lambda axis: value if axis is along else getattr(config, axis.name))
