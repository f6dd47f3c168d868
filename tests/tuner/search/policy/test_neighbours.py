"""Tests of the neighbours of a config and of their proposal."""

from typing import Any

from flashtune.core.config import Space
from flashtune.templates.forward_q_outer.space import Loads
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.search.optuna_study import TrialResult
from flashtune.tuner.search.proposer import DefaultStrategy, neighbours
from tests.tuner.search.fakes import FAMILY, a_config, a_space, alike


def changed(space: Space, **fields: Any) -> set[tuple[tuple[str, Any], ...]]:
    """The changed fields of each neighbour of a config."""
    config = a_config(**fields)
    assert space.contains(config)
    return {
        tuple((name, value) for name, value in near.items() if value != getattr(config, name))
        for near in neighbours(space, config)
    }


def test_neighbours_differ_on_one_axis_by_a_step() -> None:
    space = a_space(block_ms=(16, 32, 64, 128, 256), warps=(1, 2, 4, 8))
    assert changed(space, block_m=64, num_warps=1) == {
        (("block_m", 32),),
        (("block_m", 128),),
        (("block_n", 32),),
        (("num_warps", 2),),
        (("loads", Loads.DESCRIPTOR),),
    }


def test_inactive_axes_take_their_first_value() -> None:
    configs = changed(a_space(), loads=Loads.DESCRIPTOR, overlap_qk=True)
    assert (("overlap_qk", False),) in configs
    assert (("loads", Loads.POINTER), ("overlap_qk", False)) in configs


def test_config_outside_the_space_has_neighbours_inside() -> None:
    outside = a_config(block_m=512)
    inside = list(neighbours(a_space(), outside))
    assert {near.block_m for near in inside} == {64, 128}  # type: ignore[attr-defined]


def test_neighbours_of_the_fastest_are_proposed_soon(scope: SearchTask) -> None:
    best = Candidate(FAMILY, a_config(block_m=128, num_warps=4))
    proposer = DefaultStrategy(scope, (best,), alike(scope), {}, seed=0)
    assert proposer.ask() == best
    proposer.tell(best, TrialResult(0.5))
    beside = {Candidate(FAMILY, near) for near in neighbours(scope.spaces[0].space, best.config)}
    proposed = [proposer.ask() for _ in range(4 * len(beside))]
    assert beside <= set(proposed)
    assert len(set(proposed)) == len(proposed)


def test_failed_candidates_have_no_proposed_neighbours(scope: SearchTask) -> None:
    failed = Candidate(FAMILY, a_config())
    proposer = DefaultStrategy(scope, (failed,), alike(scope), {}, seed=0)
    assert proposer.ask() == failed
    proposer.tell(failed, TrialResult(None))
    assert proposer._neighbour_of_best() is None
