import importlib.util
import statistics
from pathlib import Path

import pytest

from benchmarks.exhaustive.fitting import NOTHING
from benchmarks.exhaustive.truth_table import TruthTable, read_tables
from benchmarks.search_replay.baselines import POLICIES
from benchmarks.search_replay.replays import (
    JUDGED_SHARE,
    Run,
    experience_without,
    portfolio,
    replayed,
    summarize,
)
from flashtune.db.store import open_store
from flashtune.tuner.candidates import SearchTask
from flashtune.tuner.search.optuna_study import TrialResult
from flashtune.tuner.search.policy import SearchContext
from tests.benchmarks.research.truth_fakes import a_table

TABLES = read_tables(Path(__file__).parents[3] / "data" / "truth")
NEEDS = {"gp": "scipy"}


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replays") / "empty.sqlite"
    open_store(str(path)).close()
    return path


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_strategy_proposes_each_candidate_once(name: str, scope: SearchTask) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{name} needs {NEEDS[name]}")
    proposer = POLICIES[name](SearchContext(scope, (), {}, 20, 0, NOTHING))
    proposed = []
    while (candidate := proposer.ask()) is not None:
        proposed.append(candidate)
        failed = len(proposed) % 5 == 0
        proposer.tell(candidate, TrialResult(None if failed else float(len(proposed))))
    assert len(proposed) == len(set(proposed))
    assert set(proposed) == set(scope.candidates())


def test_random_orders_depend_on_seed_and_exhaustive_ones_on_the_start(scope: SearchTask) -> None:
    def order(name: str, seed: int) -> list[object]:
        proposer = POLICIES[name](SearchContext(scope, (), {}, None, seed, NOTHING))
        return [proposer.ask() for _ in range(10)]

    assert order("random", 1) == order("random", 1) != order("random", 2)
    walk = list(scope.candidates())
    first, second = order("exhaustive", 1)[:2]
    assert (walk.index(first) + 1) % len(walk) == walk.index(second)  # type: ignore[arg-type]


def test_samplers_without_conditions_search_conditional_axes(scope: SearchTask) -> None:
    import optuna

    from flashtune.tuner.search.optuna_study import Study

    study = Study(scope, optuna.samplers.RandomSampler(seed=0), flat=True)
    for candidate in scope.candidates():
        study.add(candidate, TrialResult(1.0))
    suggested = [study.suggest() for _ in range(30)]
    assert all(scope.contains(candidate) for candidate in suggested)
    assert {len(trial.params) for trial in study._study.trials} == {5}


def test_experience_excludes_the_evaluated_problem() -> None:
    judged = TABLES[0]
    experience = experience_without(judged, TABLES)
    assert judged.problem.key not in experience.fit.problems
    assert len(experience.fit.problems) == len({table.problem for table in TABLES}) - 1
    candidates = {judged.candidate(row) for row in judged.rows}
    warm = portfolio(judged)
    assert 0 < len(warm) == len(set(warm))
    assert set(warm) <= candidates


def test_summary_has_results_of_each_seed() -> None:
    table = a_table(configs=20)
    runs = [
        Run("some", 0, (0.5, 0.97, 0.99, 1.0), (1.0, 2.5, 2.6, 4.0)),
        Run("some", 1, (0.9, 0.9, 0.9, 0.9), (1.0, 2.0, 3.0, 4.0)),
    ]
    summary = summarize(table, runs)
    assert summary.median == pytest.approx((0.7, 0.935, 0.945, 0.95))
    assert summary.worst == (0.5, 0.9, 0.9, 0.9)
    assert summary.by_second == pytest.approx((0.7, 0.7, 0.945, 0.95))
    assert summary.worst_by_second == (0.5, 0.5, 0.9, 0.9)
    assert summary.trials == (3, None)
    assert JUDGED_SHARE * 20 == 3
    assert summary.judged == (0.99, 0.9)


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.family}-{table.problem.key}")
def test_default_strategy_finds_held_out_optima(table: TruthTable, empty: Path) -> None:
    experience = experience_without(table, TABLES)
    (judged,) = summarize(table, [replayed(table, experience, "default", 0, empty, JUDGED_SHARE)]).judged
    assert judged >= 0.97


@pytest.mark.slow
def test_default_strategy_is_nearer_to_the_best_than_others(empty: Path) -> None:
    medians: dict[str, list[float]] = {policy: [] for policy in ("default", "tpe", "random", "exhaustive")}
    # Held-out optima are found for each table above.
    for table in TABLES[::2]:
        experience = experience_without(table, TABLES)
        for policy, values in medians.items():
            runs = [replayed(table, experience, policy, seed, empty, JUDGED_SHARE) for seed in range(3)]
            values.append(statistics.median(summarize(table, runs).judged))
    means = {policy: statistics.mean(values) for policy, values in medians.items()}
    assert means.pop("default") > max(means.values())
