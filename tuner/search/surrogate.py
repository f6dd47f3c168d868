"""The surrogate: a Gaussian process that estimates the times of all candidates from the tried ones.

Candidates that differ on few axes have similar times, and times follow the predictions. The covariance
of the logarithms of times has a term for each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from flashtune.tuner.search.candidate_grid import CandidateGrid, Floats

_ERF = np.vectorize(math.erf, otypes=[np.float64])


class GpParams(msgspec.Struct, frozen=True):
    """The hyperparameters: standard deviations of the natural logarithms of times, unless noted.

    Attributes:
        shared: Of the offset that all candidates share.
        trust: Of the slope of times over predictions.
        grid: Of the part that depends on the position on the grid.
        fading: Decay rate of the covariance with the distance on the grid.
        noise: Of a measured time.
        failed: Added to the median logarithm for candidates that failed.
    """

    shared: float = 0.3
    trust: float = 0.5
    grid: float = 0.15
    fading: float = 0.35
    noise: float = 0.005
    failed: float = 0.4


class Surrogate:
    """The Gaussian process over the candidates of a pool."""

    def __init__(self, pool: CandidateGrid, predicted_ms: Sequence[float], beliefs: GpParams) -> None:
        """Takes the predicted times of the pool's candidates, in ms and in order."""
        self._pool = pool
        self._beliefs = beliefs
        self._prior = np.log(np.asarray(predicted_ms))
        self._centred = self._prior - (self._prior.mean() if len(predicted_ms) else 0.0)
        self._rows: dict[int, Floats] = {}

    def expected_improvements(self, known: Mapping[int, float | None], trying: Sequence[int]) -> Floats:
        """Returns the expected improvement of each candidate over the best, in logarithms of time.

        Args:
            known: Times in ms by index in the pool; None if the candidate failed. At least one must
                have a time.
            trying: Indices of unfinished candidates. Each counts with its expected time.
        """
        logs = {place: math.log(ms) for place, ms in known.items() if ms is not None}
        slow = float(np.median(list(logs.values()))) + self._beliefs.failed
        values = {place: logs.get(place, slow) for place in known}
        if trying:
            mean, _, _ = self._mean(values)
            values = {**{place: float(mean[place]) for place in trying}, **values}
        mean, lower, across = self._mean(values)
        deviation = self._deviation(lower, across)
        gain = min(logs.values()) - mean
        score = gain / deviation
        share = 0.5 * (1 + _ERF(score / math.sqrt(2)))
        improvement: Floats = gain * share + deviation * np.exp(-0.5 * score**2) / math.sqrt(2 * math.pi)
        return improvement

    def _mean(self, values: Mapping[int, float]) -> tuple[Floats, Floats, Floats]:
        """Computes the posterior mean of every candidate's logarithm, given those of some candidates.

        Returns:
            The means; the Cholesky factor of the given candidates' covariances; their covariances with all.
        """
        places = np.array(list(values))
        across = np.stack([self._covariances(place) for place in values])
        noise = self._beliefs.noise**2 * np.eye(len(places))
        lower = np.linalg.cholesky(across[:, places] + noise).astype(np.float64)
        surprise = np.array(list(values.values())) - self._prior[places]
        level = float(np.median(surprise))
        weights = np.linalg.solve(lower.T, np.linalg.solve(lower, surprise - level))
        mean: Floats = self._prior + level + weights @ across
        return mean, lower, across

    def _deviation(self, lower: Floats, across: Floats) -> Floats:
        """Returns the posterior standard deviation of every candidate's logarithm."""
        spread = np.linalg.solve(lower, across)
        own = self._beliefs.shared**2 + self._beliefs.grid**2 + (self._beliefs.trust * self._centred) ** 2
        variance = np.maximum(own - (spread**2).sum(axis=0), self._beliefs.noise**2)
        deviation: Floats = np.sqrt(variance)
        return deviation

    def _covariances(self, place: int) -> Floats:
        """Returns the prior covariances of one candidate with all. They are constant, so they are cached."""
        row = self._rows.get(place)
        if row is None:
            believed = self._beliefs
            apart = self._pool.steps(self._pool.candidates[place]).sum(axis=1)
            row = (
                believed.shared**2
                + believed.trust**2 * self._centred[place] * self._centred
                + believed.grid**2 * np.exp(-believed.fading * apart)
            )
            self._rows[place] = row
        return row
