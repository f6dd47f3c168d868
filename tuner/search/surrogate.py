"""A guess at the times of all candidates from those that were tried: a Gaussian process on their grid.

Candidates that differ on few axes take about as long, and what is predicted to take longer does, as
a rule: both are one covariance, of logarithms of times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from flashtune.tuner.search.candidate_grid import Floats, Pool

_ERF = np.vectorize(math.erf, otypes=[np.float64])


class Beliefs(msgspec.Struct, frozen=True):
    """How times are believed to vary, in natural logarithms, as standard deviations.

    Attributes:
        shared: Of what all candidates have in common, beside their predictions.
        trust: Of the factor by which predictions exaggerate or understate.
        grid: Of what a candidate's place on the grid decides.
        fading: How fast likeness fades with each axis that differs.
        noise: Of a measured time.
        failed: By how much a candidate that failed counts as slower than the median.
    """

    shared: float = 0.3
    trust: float = 0.5
    grid: float = 0.15
    fading: float = 0.35
    noise: float = 0.005
    failed: float = 0.4


class Landscape:
    """What the tried candidates of a pool say of all."""

    def __init__(self, pool: Pool, predicted_ms: Sequence[float], beliefs: Beliefs) -> None:
        """Predicted times, in ms, are those of the pool's candidates in order."""
        self._pool = pool
        self._beliefs = beliefs
        self._prior = np.log(np.asarray(predicted_ms))
        self._centred = self._prior - (self._prior.mean() if len(predicted_ms) else 0.0)
        self._rows: dict[int, Floats] = {}

    def expected_improvements(self, known: Mapping[int, float | None], trying: Sequence[int]) -> Floats:
        """By how much each candidate is expected to beat the best, as a logarithm of time.

        Args:
            known: Times, in ms, of the candidates at some places of the pool; None where one failed. At
                least one must have a time.
            trying: Places of candidates that are being tried: they count as if they came out as expected.
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
        """The expected logarithm of every candidate, given those of some; and what it was worked out from.

        Returns:
            The means; the Cholesky factor of the covariances among the given; theirs with all others.
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
        """The standard deviation of every candidate's logarithm."""
        spread = np.linalg.solve(lower, across)
        own = self._beliefs.shared**2 + self._beliefs.grid**2 + (self._beliefs.trust * self._centred) ** 2
        variance = np.maximum(own - (spread**2).sum(axis=0), self._beliefs.noise**2)
        deviation: Floats = np.sqrt(variance)
        return deviation

    def _covariances(self, place: int) -> Floats:
        """How one candidate's logarithm varies with every other's; kept, since it is not learned."""
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
