import statistics
from pathlib import Path

import pytest

from benchmarks.exhaustive.fitting import NOTHING
from benchmarks.exhaustive.truth_table import TruthTable, read_tables
from benchmarks.search_replay.baselines import POLICIES
from benchmarks.search_replay.replays import experience_without, portfolio, replayed
from flashtune.db.store import open_store
from flashtune.tuner.candidates import SearchTask
from flashtune.tuner.search.optuna_study import TrialResult
from flashtune.tuner.search.policy import SearchContext

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
def test_default_strategy_is_nearer_to_the_best_than_others(empty: Path) -> None:
    medians: dict[str, list[float]] = {policy: [] for policy in ("default", "tpe", "random")}
    # Held-out optima are found for each table above.
    for table in TABLES[::2]:
        experience = experience_without(table, TABLES)
        for policy, values in medians.items():
            shares = (replayed(table, experience, policy, seed, empty) for seed in range(3))
            values.append(statistics.median(shares))
    means = {policy: statistics.mean(values) for policy, values in medians.items()}
    assert means.pop("default") > max(means.values())
