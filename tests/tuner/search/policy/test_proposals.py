"""Tests of the proposals of configs: their model, their baselines and recorded searches."""

import math
import statistics
from pathlib import Path
from typing import Any

import msgspec
import pytest
from optuna.trial import FrozenTrial, TrialState

from benchmarks.exhaustive.fitting import NOTHING
from benchmarks.exhaustive.truth_table import TruthTable, read_tables
from benchmarks.search_replay.baselines import POLICIES
from benchmarks.search_replay.efforts import answered
from benchmarks.search_replay.replays import experience_without, portfolio, replayed
from flashtune.core.config import Space
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.target import find_target
from flashtune.db.store import open_store
from flashtune.templates.forward_q_outer.space import Loads
from flashtune.templates.registry import find_family
from flashtune.tuner.candidates import Candidate, SearchTask, open_spaces
from flashtune.tuner.search.optuna_study import TrialResult
from flashtune.tuner.search.policy import SearchContext
from flashtune.tuner.search.proposer import FAMILY_CHANCES, DefaultStrategy, neighbours
from flashtune.tuner.search.ranking import rank, varied
from flashtune.tuner.search.request import BUDGETS, Effort
from flashtune.tuner.search.surrogate import CandidateGrid, Surrogate
from flashtune.tuner.search.warm_start import OTHER_FEATURE, remoteness
from tests.support.records import shipped_table_of
from tests.tuner.search.fakes import FAMILY, a_config, a_problem, a_space, alike, by_tile

PORTABLE = ("forward_kv_outer", "forward_q_outer")


def proposer_of(scope: SearchTask, start: tuple[Candidate, ...] = ()) -> DefaultStrategy:
    return DefaultStrategy(scope, start, lambda: alike(scope), {}, seed=0)


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
    proposer = DefaultStrategy(scope, (), lambda: alike(scope), results, seed=0)
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


def test_neighbours_of_the_fastest_are_proposed_soon(scope: SearchTask) -> None:
    best = Candidate(FAMILY, a_config(block_m=128, num_warps=4))
    proposer = DefaultStrategy(scope, (best,), lambda: alike(scope), {}, seed=0)
    assert proposer.ask() == best
    proposer.tell(best, TrialResult(0.5))
    beside = {Candidate(FAMILY, near) for near in neighbours(scope.spaces[0].space, best.config)}
    proposed = [proposer.ask() for _ in range(4 * len(beside))]
    assert beside <= set(proposed)
    assert len(set(proposed)) == len(proposed)


def test_failed_candidates_have_no_proposed_neighbours(scope: SearchTask) -> None:
    failed = Candidate(FAMILY, a_config())
    proposer = proposer_of(scope, (failed,))
    assert proposer.ask() == failed
    proposer.tell(failed, TrialResult(None))
    assert proposer._neighbour_of_best() is None


def test_expected_improvement_is_small_near_failures_and_open_trials(scope: SearchTask) -> None:
    pool = CandidateGrid(scope, tuple(scope.candidates()))
    landscape = Surrogate(pool, [1.0] * len(pool.candidates))
    bad = len(pool.candidates) - 1
    without = landscape.expected_improvements({0: 1.0}, ())
    assert landscape.expected_improvements({0: 1.0, bad: None}, ())[bad - 1] < without[bad - 1]
    trying = int(without.argmax())
    assert landscape.expected_improvements({0: 1.0}, (trying,))[trying] < 0.2 * without[trying]


def test_winners_of_the_same_features_are_nearer() -> None:
    table = shipped_table_of("nvidia-h200")
    plain = next(record for record in table.records if record.config)

    def remote(**changes: object) -> float:
        of: Problem = msgspec.structs.replace(plain.problem, **changes)
        return remoteness(msgspec.structs.replace(plain, problem=of), asked, plain.target)

    asked = msgspec.structs.replace(plain.problem, window_left=1023, sinks=True)
    assert remote(window_left=1023, sinks=True) == 0
    # How wide the window is decides the kernel, and little of which config is best.
    assert remote(window_left=127, sinks=True) == 0
    assert remote(window_left=1023) == OTHER_FEATURE
    assert remote() == 2 * OTHER_FEATURE
    assert remote(head_dim=plain.problem.head_dim * 2) == math.inf


TABLES = read_tables(Path(__file__).parents[3] / "data" / "truth")


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replays") / "empty.sqlite"
    open_store(str(path)).close()
    return path


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_strategy_proposes_each_candidate_once(name: str, scope: SearchTask) -> None:
    proposer = POLICIES[name](SearchContext(scope, (), {}, 20, 0, NOTHING))
    proposed = []
    while (candidate := proposer.ask()) is not None:
        proposed.append(candidate)
        failed = len(proposed) % 5 == 0
        proposer.tell(candidate, TrialResult(None if failed else float(len(proposed))))
    assert len(proposed) == len(set(proposed))
    assert set(proposed) == set(scope.candidates())


def test_experience_excludes_the_evaluated_problem() -> None:
    judged = TABLES[0]
    experience = experience_without(judged, TABLES)
    assert judged.problem.key not in experience.fit.problems
    assert len(experience.fit.problems) == len({table.problem for table in TABLES}) - 1
    candidates = {judged.candidate(row) for row in judged.rows}
    warm = portfolio(judged)
    assert 0 < len(warm) == len(set(warm))
    assert set(warm) <= candidates


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.family}-{table.problem.key}")
def test_default_strategy_finds_held_out_optima(table: TruthTable, empty: Path) -> None:
    experience = experience_without(table, TABLES)
    assert replayed(table, experience, "default", 0, empty) >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize(("effort", "least", "most"), [(Effort.QUICK, 0.93, 40), (Effort.DEFAULT, 0.96, 100)])
def test_efforts_stop_early_near_the_best(effort: Effort, least: float, most: int, empty: Path) -> None:
    for table in TABLES[::3]:
        experience = experience_without(table, TABLES)
        for start in (experience, msgspec.structs.replace(experience, warm=())):
            answer = answered(table, start, BUDGETS[effort], 0, empty, 3.0)
            assert answer.share >= least
            assert answer.tried < most


@pytest.mark.slow
def test_default_strategy_is_nearer_to_the_best_than_others(empty: Path) -> None:
    medians: dict[str, list[float]] = {policy: [] for policy in ("default", "tpe", "random")}
    # Held-out optima are found for each table above.
    for table in TABLES[::3]:
        experience = experience_without(table, TABLES)
        for policy, values in medians.items():
            shares = (replayed(table, experience, policy, seed, empty) for seed in range(3))
            values.append(statistics.median(shares))
    means = {policy: statistics.mean(values) for policy, values in medians.items()}
    assert means.pop("default") > max(means.values())
