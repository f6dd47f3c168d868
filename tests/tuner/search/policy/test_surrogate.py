import numpy as np
import pytest

from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.search.surrogate import CandidateGrid, Surrogate
from tests.tuner.search.fakes import FAMILY, a_config, by_tile


@pytest.fixture
def pool(scope: SearchTask) -> CandidateGrid:
    return CandidateGrid(scope, tuple(scope.candidates()))


def ms_of(candidate: Candidate) -> float:
    measurement = by_tile(candidate).measurement
    assert measurement is not None
    return measurement.ms


def test_outside_candidate_maps_to_the_nearest_free_one(pool: CandidateGrid) -> None:
    free = np.ones(len(pool.candidates), dtype=bool)
    outside = Candidate(FAMILY, a_config(block_m=128, num_stages=5))
    nearest = pool.nearest(outside, free)
    assert nearest == Candidate(FAMILY, a_config(block_m=128))
    free[pool.places[nearest]] = False
    assert pool.nearest(outside, free) not in {nearest, None}
    assert pool.nearest(outside, np.zeros_like(free)) is None


def test_measurements_override_predictions(pool: CandidateGrid) -> None:
    predicted = [ms_of(candidate) for candidate in pool.candidates]
    landscape = Surrogate(pool, predicted)
    slowest = int(np.argmax(predicted))
    expected = landscape.expected_improvements({slowest: 3 * predicted[slowest]}, ())
    assert int(expected.argmax()) == int(np.argmin(predicted))


def test_expected_improvement_is_small_near_failures_and_open_trials(pool: CandidateGrid) -> None:
    landscape = Surrogate(pool, [1.0] * len(pool.candidates))
    good, bad = 0, len(pool.candidates) - 1
    without = landscape.expected_improvements({good: 1.0}, ())
    assert landscape.expected_improvements({good: 1.0, bad: None}, ())[bad - 1] < without[bad - 1]
    trying = int(without.argmax())
    assert landscape.expected_improvements({good: 1.0}, (trying,))[trying] < 0.2 * without[trying]
