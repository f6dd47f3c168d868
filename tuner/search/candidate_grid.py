"""The candidates of a search as points of a grid: how far they lie apart, and who lies nearest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flashtune.core.config import Axis
from flashtune.tuner.candidates import Candidate, Scope

Floats = NDArray[np.float64]

# Where an axis is of another family, its coordinate is this, and any two differ by a whole step.
ELSEWHERE = -1.0


class Pool:
    """Candidates in a fixed order, and their coordinates.

    Attributes:
        candidates: The candidates.
        places: Where each stands among them.
        axes: Names of the axes that have more than one value, as `family.axis`.
    """

    def __init__(self, scope: Scope, candidates: Sequence[Candidate]) -> None:
        self._axes: list[tuple[str, Axis]] = [
            (entry.family.name, axis)
            for entry in scope.spaces
            for axis in entry.space.axes
            if len(axis.values) > 1
        ]
        self.candidates = tuple(candidates)
        self.places = {candidate: place for place, candidate in enumerate(self.candidates)}
        self.axes = tuple(f"{family}.{axis.name}" for family, axis in self._axes)
        self._ordered = np.array([axis.ordered for _, axis in self._axes], dtype=bool)
        self._points = np.array([self._point(candidate) for candidate in self.candidates], dtype=np.float64)
        self._points = self._points.reshape(len(self.candidates), len(self._axes))

    def steps(self, candidate: Candidate) -> Floats:
        """What separates a candidate from each of the pool, axis by axis: 0 where they agree, at most 1.

        Neighbours on an ordered axis of many values lie nearer than its ends do; values of other
        axes are all equally far apart.
        """
        apart = np.abs(self._points - self._point(candidate))
        foreign = (self._points == ELSEWHERE) != (self._point(candidate) == ELSEWHERE)
        return np.where(
            foreign | ~self._ordered, (apart > 0).astype(np.float64), np.sqrt(np.minimum(apart, 1.0))
        )

    def nearest(self, candidate: Candidate, free: NDArray[np.bool_]) -> Candidate | None:
        """The one among the free that differs least from a candidate, which need not be of the pool."""
        if not free.any():
            return None
        apart = np.where(free, self.steps(candidate).sum(axis=1), np.inf)
        return self.candidates[int(apart.argmin())]

    def _point(self, candidate: Candidate) -> Floats:
        """Positions along the axes, from 0 to 1; a value that an axis does not have counts as its first."""
        return np.array(
            [
                _position(axis, candidate) if family == candidate.family else ELSEWHERE
                for family, axis in self._axes
            ]
        )


def _position(axis: Axis, candidate: Candidate) -> float:
    value = getattr(candidate.config, axis.name)
    return axis.values.index(value) / (len(axis.values) - 1) if value in axis.values else 0.0
