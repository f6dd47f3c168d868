"""Optuna's study of one search. Candidates are trials, and the family is the first axis.

A failed candidate is a completed trial with a violated constraint. The sampler would ignore a failed
trial and propose it again.
"""

import threading
import warnings
from collections.abc import Iterator

import msgspec

# NumPy imports this module at its first use, and that import drops a Ctrl-C that arrives meanwhile.
import numpy.random  # noqa: F401
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.trial import TrialState

from flashtune.core.config import Axis, AxisValue
from flashtune.tuner.candidates import Candidate, FamilySpace, SearchTask

FAMILY = "family"
CAPACITY = "capacity"
RIGHT = "right"
# The value of a failed trial. Its rank depends on the constraints, not on this value.
FAILED_MS = 1e9
STARTUP_TRIALS = 10
# Filters of warnings are those of the process, and several searches may change them.
_FILTERS = threading.Lock()


class TrialResult(msgspec.Struct, frozen=True):
    """The result of a candidate, for the sampler."""

    ms: float | None  # Its time; None if it failed.
    excess: float = 0.0  # Demand beyond a capacity, as a fraction of the capacity.


class Study:
    """Suggests candidates, and learns from the results of these and of other candidates."""

    def __init__(self, scope: SearchTask, sampler: optuna.samplers.BaseSampler) -> None:
        self._scope = scope
        self._spaces = {entry.family.name: entry for entry in scope.spaces}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(sampler=sampler)

    def suggest(self) -> Candidate:
        """Returns the sampler's next candidate. It may be a known one, or outside of its space."""
        trial = self._study.ask()
        candidate = self._suggest(trial)
        # The candidate that is tried, this one or another, is added with its result.
        self._study.tell(trial, state=TrialState.FAIL)
        return candidate

    def add(self, candidate: Candidate, answer: TrialResult) -> None:
        """Adds the result of a candidate. Candidates outside of all spaces are ignored."""
        if self._scope.contains(candidate):
            self._study.add_trial(self._frozen_trial(candidate, answer))

    def _frozen_trial(self, candidate: Candidate, answer: TrialResult) -> optuna.trial.FrozenTrial:
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
            is_searched = _is_searched(axis, values)
            position = _suggest_position(trial, f"{name}.{axis.name}", axis) if is_searched else 0
            values[axis.name] = axis.values[position]
        return Candidate(name, self._spaces[name].space.build(values))

    def _parameters(self, candidate: Candidate) -> dict[str, str | int]:
        entry = self._spaces[candidate.family]
        positions = dict(self._positions(entry, candidate))
        return ({FAMILY: candidate.family} if len(self._spaces) > 1 else {}) | positions

    def _positions(self, entry: FamilySpace, candidate: Candidate) -> Iterator[tuple[str, int]]:
        chosen: dict[str, AxisValue] = {}
        for axis in entry.space.axes:
            value = getattr(candidate.config, axis.name)
            if _is_searched(axis, chosen):
                yield f"{entry.family.name}.{axis.name}", axis.values.index(value)
            chosen[axis.name] = value

    def _distribution(self, name: str) -> BaseDistribution:
        if name == FAMILY:
            return CategoricalDistribution(tuple(self._spaces))
        family, field = name.split(".")
        axis = next(axis for axis in self._spaces[family].space.axes if axis.name == field)
        last = len(axis.values) - 1
        return IntDistribution(0, last) if axis.ordered else CategoricalDistribution(tuple(range(last + 1)))


def _is_searched(axis: Axis, chosen: dict[str, AxisValue]) -> bool:
    return len(axis.values) > 1 and axis.is_active(chosen)


def tpe_sampler(seed: int) -> optuna.samplers.TPESampler:
    """Returns the tree-structured Parzen estimator with the settings of searches."""
    with _FILTERS, warnings.catch_warnings():
        # Conditional axes need grouping. It is stable in practice, but marked as experimental.
        warnings.simplefilter("ignore", ExperimentalWarning)
        return optuna.samplers.TPESampler(
            seed=seed, multivariate=True, group=True, n_startup_trials=STARTUP_TRIALS
        )


def _constraints(answer: TrialResult) -> dict[str, float]:
    """Returns the constraints, 0 if satisfied: the candidate fits, and its result is correct."""
    failed = answer.ms is None and answer.excess <= 0
    return {CAPACITY: max(answer.excess, 0.0), RIGHT: 1.0 if failed else 0.0}


def _suggest_position(trial: optuna.Trial, name: str, axis: Axis) -> int:
    last = len(axis.values) - 1
    if axis.ordered:
        return trial.suggest_int(name, 0, last)
    return trial.suggest_categorical(name, tuple(range(last + 1)))
