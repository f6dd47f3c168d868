"""The surrogate: a Gaussian process that estimates the times of all candidates from the tried ones.

Candidates that differ on few axes have similar times, and times follow the predictions. The covariance
of the logarithms of times has a term for each. The candidate grid has the distances of candidates.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flashtune.core.config import Axis
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.search.request import NOISE

Floats = NDArray[np.float64]

# The hyperparameters: standard deviations of the natural logarithms of times, unless noted.
SHARED = 0.3  # of the offset that all candidates share
TRUST = 0.5  # of the slope of times over predictions
GRID = 0.15  # of the part that depends on the position on the grid
FADING = 0.35  # decay rate of the covariance with the distance on the grid
FAILED = 0.4  # added to the median logarithm for candidates that failed
# The coordinate on axes of other families. It differs by a whole step from every other coordinate.
ELSEWHERE = -1.0

_ERF = np.vectorize(math.erf, otypes=[np.float64])


class CandidateGrid:
    """Candidates in a fixed order, and their coordinates.

    Attributes:
        places: The index of each candidate.
    """

    def __init__(self, scope: SearchTask, candidates: Sequence[Candidate]) -> None:
        self._axes: list[tuple[str, Axis]] = [
            (entry.family.name, axis)
            for entry in scope.spaces
            for axis in entry.space.axes
            if len(axis.values) > 1
        ]
        self.candidates = tuple(candidates)
        self.places = {candidate: index for index, candidate in enumerate(self.candidates)}
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


class Surrogate:
    """The Gaussian process over the candidates of a pool."""

    def __init__(self, pool: CandidateGrid, predicted_ms: Sequence[float]) -> None:
        """Takes the predicted times of the pool's candidates, in ms and in order."""
        self._pool = pool
        self._prior = np.log(np.asarray(predicted_ms))
        self._centred = self._prior - (self._prior.mean() if len(predicted_ms) else 0.0)
        self._rows: dict[int, Floats] = {}

    def expected_improvements(
        self, measured: Mapping[int, float | None], trying: Sequence[int] = (), *, calibrated: bool = False
    ) -> Floats:
        """Returns the expected improvement of each candidate over the best, in logarithms of time.

        `measured` are times in ms by index in the pool; None if the candidate failed. At least one has a
        time. `trying` are indices of unfinished candidates, each of which counts with its expected time.

        The hyperparameters suit all problems, so the process is too uncertain about most of them. With
        `calibrated`, its standard deviations are multiplied by the factor that makes the measured times most
        likely: the root mean square of their whitened differences from the prior.
        """
        logs = {index: math.log(ms) for index, ms in measured.items() if ms is not None}
        slow = float(np.median(list(logs.values()))) + FAILED
        values = {index: logs.get(index, slow) for index in measured}
        if trying:
            mean, _, _, _ = self._mean(values)
            values = {**{index: float(mean[index]) for index in trying}, **values}
        mean, lower, across, whitened = self._mean(values)
        deviation = self._deviation(lower, across)
        if calibrated:
            deviation = np.maximum(deviation * math.sqrt(float((whitened**2).mean())), NOISE)
        gain = min(logs.values()) - mean
        score = gain / deviation
        share = 0.5 * (1 + _ERF(score / math.sqrt(2)))
        improvement: Floats = gain * share + deviation * np.exp(-0.5 * score**2) / math.sqrt(2 * math.pi)
        return improvement

    def _mean(self, values: Mapping[int, float]) -> tuple[Floats, Floats, Floats, Floats]:
        """Computes the posterior mean of every candidate's logarithm, given those of some candidates.

        Returns:
            The means; the Cholesky factor of the given candidates' covariances; their covariances with all;
            the whitened differences of the given logarithms from the prior.
        """
        places = np.array(list(values))
        across = np.stack([self._covariances(index) for index in values])
        noise = NOISE**2 * np.eye(len(places))
        lower = np.linalg.cholesky(across[:, places] + noise).astype(np.float64)
        surprise = np.array(list(values.values())) - self._prior[places]
        level = float(np.median(surprise))
        whitened = np.linalg.solve(lower, surprise - level)
        weights = np.linalg.solve(lower.T, whitened)
        mean: Floats = self._prior + level + weights @ across
        return mean, lower, across, whitened

    def _deviation(self, lower: Floats, across: Floats) -> Floats:
        """Returns the posterior standard deviation of every candidate's logarithm."""
        spread = np.linalg.solve(lower, across)
        own = SHARED**2 + GRID**2 + (TRUST * self._centred) ** 2
        variance = np.maximum(own - (spread**2).sum(axis=0), NOISE**2)
        deviation: Floats = np.sqrt(variance)
        return deviation

    def _covariances(self, index: int) -> Floats:
        """Returns the prior covariances of one candidate with all. They are constant, so they are cached."""
        row = self._rows.get(index)
        if row is None:
            apart = self._pool.steps(self._pool.candidates[index]).sum(axis=1)
            row = (
                SHARED**2
                + TRUST**2 * self._centred[index] * self._centred
                + GRID**2 * np.exp(-FADING * apart)
            )
            self._rows[index] = row
        return row
