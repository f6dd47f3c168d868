"""The candidate grid: candidates as points, their distances and nearest neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flashtune.core.config import Axis
from flashtune.tuner.candidates import Candidate, SearchTask

Floats = NDArray[np.float64]

# The coordinate on axes of other families. It differs by a whole step from every other coordinate.
ELSEWHERE = -1.0


class CandidateGrid:
    """Candidates in a fixed order, and their coordinates.

    Attributes:
        candidates: The candidates.
        places: The index of each candidate.
        axes: Names of the axes that have more than one value, as `family.axis`.
    """

    def __init__(self, scope: SearchTask, candidates: Sequence[Candidate]) -> None:
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
        """Returns the distance of a candidate to each of the pool on each axis, from 0 (equal) to 1.

        On an ordered axis the distance grows with the difference in position. On other axes all
        different values have distance 1.
        """
        apart = np.abs(self._points - self._point(candidate))
        foreign = (self._points == ELSEWHERE) != (self._point(candidate) == ELSEWHERE)
        return np.where(
            foreign | ~self._ordered, (apart > 0).astype(np.float64), np.sqrt(np.minimum(apart, 1.0))
        )

    def nearest(self, candidate: Candidate, free: NDArray[np.bool_]) -> Candidate | None:
        """Returns the free candidate nearest to a candidate, which need not be in the pool."""
        if not free.any():
            return None
        apart = np.where(free, self.steps(candidate).sum(axis=1), np.inf)
        return self.candidates[int(apart.argmin())]

    def _point(self, candidate: Candidate) -> Floats:
        """Returns the positions along the axes, from 0 to 1; an unknown value counts as the first."""
        return np.array(
            [
                _position(axis, candidate) if family == candidate.family else ELSEWHERE
                for family, axis in self._axes
            ]
        )


def _position(axis: Axis, candidate: Candidate) -> float:
    value = getattr(candidate.config, axis.name)
    return axis.values.index(value) / (len(axis.values) - 1) if value in axis.values else 0.0
