from typing import Any

from optuna.trial import FrozenTrial, TrialState

from benchmarks.exhaustive.fitting import NOTHING
from flashtune.core.config import Space
from flashtune.core.kernel import Specialization
from flashtune.core.target import find_target
from flashtune.templates.forward_q_outer.space import Loads
from flashtune.templates.registry import find_family
from flashtune.tuner.candidates import Candidate, SearchTask, open_spaces
from flashtune.tuner.search.optuna_study import TrialResult
from flashtune.tuner.search.proposer import FAMILY_CHANCES, DefaultStrategy, neighbours
from flashtune.tuner.search.ranking import rank, varied
from tests.tuner.search.fakes import FAMILY, a_config, a_problem, a_space, alike, by_tile

PORTABLE = ("forward_kv_outer", "forward_q_outer")


def proposer_of(scope: SearchTask, start: tuple[Candidate, ...] = ()) -> DefaultStrategy:
    return DefaultStrategy(scope, start, alike(scope), {}, seed=0)


def trials_of(proposer: DefaultStrategy) -> list[FrozenTrial]:
    """The trials of the sampler without its open suggestions."""
    return [trial for trial in proposer._study._study.trials if trial.state is not TrialState.FAIL]


def ms_of(candidate: Candidate) -> float:
    measurement = by_tile(candidate).measurement
    assert measurement is not None
    return measurement.ms


def test_enqueued_trials_come_first_in_order(scope: SearchTask) -> None:
    outside = Candidate(FAMILY, a_config(block_m=256, num_warps=16))
    inside = Candidate(FAMILY, a_config(block_m=128))
    assert not scope.contains(outside)
    proposer = proposer_of(scope, (outside, inside, inside))
    assert [proposer.ask(), proposer.ask()] == [outside, inside]
    proposer.tell(outside, TrialResult(1.0))
    proposer.tell(inside, TrialResult(2.0))
    assert [trial.value for trial in trials_of(proposer)] == [2.0]


def test_known_results_are_told_to_the_sampler_and_not_proposed(scope: SearchTask) -> None:
    results = {candidate: TrialResult(ms_of(candidate)) for candidate in list(scope.candidates())[:-1]}
    proposer = DefaultStrategy(scope, (), alike(scope), results, seed=0)
    assert len(trials_of(proposer)) == len(results)
    assert proposer.ask() == list(scope.candidates())[-1]
    assert proposer.ask() is None


def test_failures_are_completed_trials_with_a_violated_constraint(scope: SearchTask) -> None:
    proposer = proposer_of(scope, tuple(scope.candidates())[:3])
    answers = (TrialResult(None, excess=0.25), TrialResult(None), TrialResult(1.5))
    for answer in answers:
        candidate = proposer.ask()
        assert candidate is not None
        proposer.tell(candidate, answer)
    over, wrong, fine = trials_of(proposer)
    assert {trial.state for trial in (over, wrong, fine)} == {TrialState.COMPLETE}
    assert over.constraints == {"capacity": 0.25, "right": 0.0}
    assert wrong.constraints == {"capacity": 0.0, "right": 1.0}
    assert fine.constraints == {"capacity": 0.0, "right": 0.0}


def test_one_study_covers_all_families() -> None:
    problem, target = a_problem(), find_target("h100")
    scope = SearchTask(problem, target, Specialization(), open_spaces(problem, target, PORTABLE))
    proposer = proposer_of(scope)
    proposed = [candidate for candidate in (proposer.ask() for _ in range(12)) if candidate]
    assert {candidate.family for candidate in proposed} == {"forward_kv_outer", "forward_q_outer"}
    for candidate in proposed:
        assert type(candidate.config) is find_family(candidate.family).config_type


def test_ranking_contains_fitting_candidates_and_initial_design_varies() -> None:
    problem, target = a_problem(seqlen_q=4096, seqlen_kv=4096), find_target("h100")
    scope = SearchTask(problem, target, Specialization(), open_spaces(problem, target, (FAMILY,)))
    ranked = rank(scope, seed=0, fit=NOTHING)
    times = [entry.predicted_ms for entry in ranked]
    assert times == sorted(times)
    start = varied(ranked, 10)
    assert len(start) == len(set(start)) == 10
    predicted = {entry.candidate: entry.predicted_ms for entry in ranked}
    distinct = len({round(ms, 9) for ms in predicted.values()})
    assert len({round(predicted[candidate], 9) for candidate in start[:distinct]}) == min(distinct, 10) > 5


def test_slow_family_is_pruned() -> None:
    problem, target = a_problem(), find_target("h200")
    scope = SearchTask(problem, target, Specialization(), open_spaces(problem, target, PORTABLE))
    slow, fast = "forward_kv_outer", "forward_q_outer"
    proposer = proposer_of(scope)
    proposed = []
    for _ in range(60):
        candidate = proposer.ask()
        assert candidate is not None
        proposed.append(candidate.family)
        proposer.tell(candidate, TrialResult(30.0 if candidate.family == slow else 1.0))
    assert proposed.count(slow) == FAMILY_CHANCES
    assert proposed.count(fast) == 60 - FAMILY_CHANCES


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
