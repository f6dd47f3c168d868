import msgspec
import numpy as np
import pytest

from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.search.surrogate import CandidateGrid, Surrogate
from tests.tuner.search.fakes import FAMILY, a_config, a_space, by_tile


@pytest.fixture
def pool(scope: SearchTask) -> CandidateGrid:
    return CandidateGrid(scope, tuple(scope.candidates()))


def ms_of(candidate: Candidate) -> float:
    measurement = by_tile(candidate).measurement
    assert measurement is not None
    return measurement.ms


def test_steps_count_the_axes_that_differ(pool: CandidateGrid) -> None:
    candidate = Candidate(FAMILY, a_config())
    apart = pool.steps(candidate).sum(axis=1)
    assert apart[pool.places[candidate]] == 0
    assert apart[pool.places[Candidate(FAMILY, a_config(block_m=128))]] == 1
    assert apart[pool.places[Candidate(FAMILY, a_config(block_m=128, num_warps=8))]] == 2


def test_neighbours_on_a_long_axis_are_nearer_than_its_ends(scope: SearchTask) -> None:
    space = msgspec.structs.replace(scope.spaces[0], space=a_space(block_ms=(16, 32, 64, 128, 256)))
    wide = msgspec.structs.replace(scope, spaces=(space,))
    pool = CandidateGrid(wide, tuple(wide.candidates()))
    apart = pool.steps(Candidate(FAMILY, a_config(block_m=16))).sum(axis=1)
    steps = [apart[pool.places[Candidate(FAMILY, a_config(block_m=rows))]] for rows in (16, 32, 64, 128, 256)]
    assert steps == sorted(steps)
    assert steps[0] == 0
    assert steps[-1] == 1


def test_outside_candidate_maps_to_the_nearest_free_one(pool: CandidateGrid) -> None:
    free = np.ones(len(pool.candidates), dtype=bool)
    outside = Candidate(FAMILY, a_config(block_m=128, num_stages=5))
    nearest = pool.nearest(outside, free)
    assert nearest == Candidate(FAMILY, a_config(block_m=128))
    free[pool.places[nearest]] = False
    assert pool.nearest(outside, free) not in {nearest, None}
    assert pool.nearest(outside, np.zeros_like(free)) is None


def test_expected_improvement_is_largest_near_fast_candidates(pool: CandidateGrid) -> None:
    landscape = Surrogate(pool, [1.0] * len(pool.candidates))
    measured: dict[int, float | None] = {
        index: ms_of(candidate) for index, candidate in enumerate(pool.candidates) if index % 3 == 0
    }
    expected = landscape.expected_improvements(measured, ())
    unknown = [index for index in range(len(pool.candidates)) if index not in measured]
    order = sorted(unknown, key=lambda index: -expected[index])
    ranks = [sorted(unknown, key=lambda other: ms_of(pool.candidates[other])).index(index) for index in order]
    assert np.mean(ranks[:4]) < np.mean(ranks[-4:])
    assert ranks[0] < 4


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
