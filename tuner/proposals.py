"""What to try next: Optuna's TPE over one study whose first axis is the family, after a start in order.

The sampler learns from every trial: a failed candidate is a completed trial with a violated
constraint, since trials that are told as failures would be ignored and proposed again.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterable, Iterator

import msgspec
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning

from flashtune.config import Axis, AxisValue
from flashtune.tuner.candidates import Candidate, FamilySpace, Scope
from flashtune.tuner.neighbours import neighbours

FAMILY = "family"
CAPACITY = "capacity"
RIGHT = "right"
# What a failed trial is told as its time; constraints rank it, not this.
FAILED_MS = 1e9
STARTUP_TRIALS = 10
# Proposals in a row that are known already before the next one is taken from the ranking.
MOST_REPEATS = 40
# A family is given up once this many of its candidates ran and none came near the best of all.
FAMILY_CHANCES = 4
HOPELESS_FACTOR = 2.0
# So many of the fastest are looked around, the fastest first.
CENTRES = 3


class Answer(msgspec.Struct, frozen=True):
    """What a candidate came to, for the sampler.

    Attributes:
        ms: Its time, None where it failed.
        excess: How far it was over a capacity, as a share of it.
    """

    ms: float | None
    excess: float = 0.0


class Proposer:
    """Proposes candidates one by one, none twice, and learns from what became of them.

    A family that is far behind after a few candidates is proposed no more: on a long problem one of
    its launches can take longer than a whole trial of another's.
    """

    def __init__(
        self,
        scope: Scope,
        start: Iterable[Candidate],
        ranked: Iterable[Candidate],
        known: dict[Candidate, Answer],
        seed: int,
    ) -> None:
        self._scope = scope
        self._start = iter(start)
        self._rest = iter(ranked)
        self._spaces = {entry.family.name: entry for entry in scope.spaces}
        self._answers: dict[Candidate, Answer] = {}
        self._times: dict[str, list[float]] = {name: [] for name in self._spaces}
        self._timed: dict[Candidate, float] = {}
        self._draw = random.Random(seed)  # noqa: S311 - no secret
        self._turn = False
        self._open: dict[Candidate, list[optuna.Trial]] = {}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(sampler=_sampler(seed))
        for candidate, answer in known.items():
            self._learn(candidate, answer)
            if scope.contains(candidate):
                self._study.add_trial(self._told(candidate, answer))

    def ask(self) -> Candidate | None:
        """The next candidate to try, None when there is nothing new. It is open until it is told."""
        for candidate in self._start:
            if self._is_worth_trying(candidate):
                return self._propose(candidate)
        self._turn = not self._turn
        beside = self._beside_the_best() if self._turn else None
        if beside is not None:
            return self._propose(beside)
        for _ in range(MOST_REPEATS):
            proposed = self._sample()
            if proposed is not None:
                return proposed
        for candidate in self._rest:
            if self._is_worth_trying(candidate):
                return self._propose(candidate)
        return None

    def tell(self, candidate: Candidate, answer: Answer) -> None:
        """Learns what became of an open candidate."""
        self._learn(candidate, answer)
        trials = self._open.pop(candidate, [])
        for trial in trials:
            self._tell(trial, answer)
        if not trials and self._scope.contains(candidate):
            self._study.add_trial(self._told(candidate, answer))

    def _learn(self, candidate: Candidate, answer: Answer) -> None:
        self._answers[candidate] = answer
        if answer.ms is not None:
            self._times[candidate.family].append(answer.ms)
            self._timed[candidate] = answer.ms

    def _is_worth_trying(self, candidate: Candidate) -> bool:
        is_new = candidate not in self._answers and candidate not in self._open
        return is_new and not self._is_hopeless(candidate.family)

    def _is_hopeless(self, family: str) -> bool:
        times = self._times[family]
        fastest = min((ms for times in self._times.values() for ms in times), default=math.inf)
        return len(times) >= FAMILY_CHANCES and min(times) > HOPELESS_FACTOR * fastest

    def _beside_the_best(self) -> Candidate | None:
        """A new candidate that differs on one axis from one of the fastest, the fastest's first."""
        fastest = sorted(self._timed, key=lambda candidate: self._timed[candidate])[:CENTRES]
        for centre in fastest:
            entry = self._spaces[centre.family]
            around = [Candidate(centre.family, config) for config in neighbours(entry.space, centre.config)]
            new = [candidate for candidate in around if self._is_worth_trying(candidate)]
            if new:
                return self._draw.choice(new)
        return None

    def _propose(self, candidate: Candidate) -> Candidate:
        """Opens a candidate that the sampler did not choose; it hears of it when it is told."""
        self._open[candidate] = []
        return candidate

    def _sample(self) -> Candidate | None:
        """A new candidate of the sampler's, or None where it is known, and answered at once, or open."""
        trial = self._study.ask()
        candidate = self._suggest(trial)
        space = self._spaces[candidate.family].space
        if not space.admits(candidate.config):
            self._tell(trial, Answer(None))
        elif candidate in self._answers:
            self._tell(trial, self._answers[candidate])
        elif candidate in self._open:
            self._open[candidate].append(trial)
        elif self._is_hopeless(candidate.family):
            self._tell(trial, Answer(min(self._times[candidate.family])))
        else:
            self._open[candidate] = [trial]
            return candidate
        return None

    def _tell(self, trial: optuna.Trial, answer: Answer) -> None:
        for key, value in _constraints(answer).items():
            trial.set_constraint(key, value)
        self._study.tell(trial, FAILED_MS if answer.ms is None else answer.ms)

    def _told(self, candidate: Candidate, answer: Answer) -> optuna.trial.FrozenTrial:
        parameters = self._parameters(candidate)
        return optuna.trial.create_trial(
            params=parameters,
            distributions={name: self._distribution(name) for name in parameters},
            value=FAILED_MS if answer.ms is None else answer.ms,
            constraints=_constraints(answer),
        )

    def _suggest(self, trial: optuna.Trial) -> Candidate:
        name = next(iter(self._spaces))
        if len(self._spaces) > 1:
            name = trial.suggest_categorical(FAMILY, tuple(self._spaces))
        values: dict[str, AxisValue] = {}
        for axis in self._spaces[name].space.axes:
            position = 0
            if _is_searched(axis, values):
                position = _suggest_position(trial, f"{name}.{axis.name}", axis)
            values[axis.name] = axis.values[position]
        return Candidate(name, self._spaces[name].space.build(values))

    def _parameters(self, candidate: Candidate) -> dict[str, str | int]:
        entry = self._spaces[candidate.family]
        positions = dict(_positions(entry, candidate))
        return ({FAMILY: candidate.family} if len(self._spaces) > 1 else {}) | positions

    def _distribution(self, name: str) -> BaseDistribution:
        if name == FAMILY:
            return CategoricalDistribution(tuple(self._spaces))
        family, field = name.split(".")
        axis = next(axis for axis in self._spaces[family].space.axes if axis.name == field)
        last = len(axis.values) - 1
        return IntDistribution(0, last) if axis.ordered else CategoricalDistribution(tuple(range(last + 1)))


def _sampler(seed: int) -> optuna.samplers.TPESampler:
    with warnings.catch_warnings():
        # Grouping, which conditional axes need, is stable in practice and marked as experimental.
        warnings.simplefilter("ignore", ExperimentalWarning)
        return optuna.samplers.TPESampler(
            seed=seed, multivariate=True, group=True, constant_liar=True, n_startup_trials=STARTUP_TRIALS
        )


def _constraints(answer: Answer) -> dict[str, float]:
    """Zero where they hold: that a candidate fits, and that it then ran and was right."""
    failed = answer.ms is None and answer.excess <= 0
    return {CAPACITY: max(answer.excess, 0.0), RIGHT: 1.0 if failed else 0.0}


def _is_searched(axis: Axis, chosen: dict[str, AxisValue]) -> bool:
    return len(axis.values) > 1 and axis.is_active(chosen)


def _suggest_position(trial: optuna.Trial, name: str, axis: Axis) -> int:
    last = len(axis.values) - 1
    if axis.ordered:
        return trial.suggest_int(name, 0, last)
    return trial.suggest_categorical(name, tuple(range(last + 1)))


def _positions(entry: FamilySpace, candidate: Candidate) -> Iterator[tuple[str, int]]:
    chosen: dict[str, AxisValue] = {}
    for axis in entry.space.axes:
        value = getattr(candidate.config, axis.name)
        if _is_searched(axis, chosen):
            yield f"{entry.family.name}.{axis.name}", axis.values.index(value)
        chosen[axis.name] = value
