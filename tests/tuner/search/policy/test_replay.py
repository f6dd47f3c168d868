import math
import time

import msgspec
import pytest

from benchmarks.exhaustive.truth_table import TruthTable, fastest
from benchmarks.search_replay.replay import Replay, SimulatedTrial, best_after, replay_scope, replay_space
from flashtune.core.errors import TableError
from flashtune.core.problem import Problem
from flashtune.core.record import Outcome
from flashtune.core.target import find_target
from flashtune.db.store import Store
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.request import Budget, SearchRequest, SearchResult, Stop
from flashtune.tuner.search.warm_start import OTHER_FEATURE, remoteness
from tests.benchmarks.research.truth_fakes import a_table
from tests.support.records import shipped_table_of


def replayed(table: TruthTable, store: Store, budget: Budget, seed: int = 0) -> tuple[SearchResult, Replay]:
    replay = Replay(table, jobs=8, seed=seed)
    request = SearchRequest(
        problem=table.problem,
        target=find_target(table.target),
        device=0,
        budget=budget,
        seed=seed,
        spaces=((table.family, replay_space(table)),),
    )
    return run_search(request, store, equipment=replay.equipment()), replay


def test_simulation_of_a_whole_table_finds_its_best(store: Store) -> None:
    table = a_table()
    result, replay = replayed(table, store, Budget(None, None, None))
    assert result.stop is Stop.EXHAUSTED
    assert result.best is not None
    assert result.best.ms == fastest(table)
    assert {entry.candidate for entry in replay.tried} == {table.candidate(row) for row in table.rows}
    assert sum(entry.true_ms is None for entry in replay.tried) == 10


def test_seconds_are_simulated(store: Store) -> None:
    table = a_table()
    started = time.process_time()
    result, replay = replayed(table, store, Budget(None, 9.0, None))
    assert result.stop is Stop.SECONDS
    assert 9.0 <= result.seconds < 15.0
    assert time.process_time() - started < 9.0
    # Eight compilers of 2.5 s each keep one GPU busy that needs 0.28 s.
    assert 15 < len(replay.tried) < 35
    moments = [entry.seconds for entry in replay.tried]
    assert moments == sorted(moments)


@pytest.mark.slow
def test_failures_in_a_table_are_outcomes_of_the_search(store: Store) -> None:
    table = a_table()
    result, _ = replayed(table, store, Budget(None, None, None))
    assert result.counts.outcomes == {Outcome.OK: 50, Outcome.WRONG_RESULT: 5, Outcome.COMPILE_ERROR: 5}


@pytest.mark.slow
def test_the_same_seed_replays_the_same_search(
    store: Store, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from flashtune.db.store import open_store

    table = a_table()
    _, first = replayed(table, store, Budget(20, None, None), seed=3)
    with open_store(str(tmp_path_factory.mktemp("again") / "again.sqlite")) as other:
        _, two = replayed(table, other, Budget(20, None, None), seed=3)
    assert first.tried == two.tried


def test_trials_have_noise_and_final_measurements_do_not() -> None:
    table = a_table()
    scope = replay_scope(table)
    replay = Replay(table, jobs=1, seed=0)
    candidate = table.candidate(table.rows[0])
    compiling = replay.submit(scope, candidate)
    replay.clock.wait_for_all([compiling])
    seen = set()
    for _ in range(5):
        job = replay.evaluate(scope, candidate, compiling.result(), None)
        replay.clock.wait_for_all([job])
        measurement = job.result().measurement
        assert measurement is not None
        seen.add(measurement.ms)
    assert len(seen) == 5
    true = table.times()[0]
    assert true is not None
    assert all(ms == pytest.approx(true, rel=0.02) for ms in seen)
    final = replay.finals(scope, (candidate,))
    replay.clock.wait_for_all([final])
    assert final.result()[0].ms == true


def test_configs_outside_the_current_space_are_refused() -> None:
    table = a_table(shape="heads=16,seqlen=2048,head_dim=128,tokens=16384")
    causal = a_table()
    mixed = TruthTable(
        **{name: getattr(table, name) for name in TruthTable.__struct_fields__} | {"rows": causal.rows}
    )
    with pytest.raises(TableError, match="are no points of forward_hopper's space"):
        replay_space(mixed)


def test_best_after_each_trial_uses_true_times_of_the_finalists() -> None:
    candidate = a_table().candidate(a_table().rows[0])
    times = [(None, None), (2.0, 2.5), (1.0, 1.2), (1.1, 1.0), (1.05, 1.3)]
    tried = [SimulatedTrial(candidate, 0.0, seen, true) for seen, true in times]
    assert best_after(tried, 2) == [math.inf, 2.5, 1.2, 1.0, 1.2]
    assert best_after(tried, 3) == [math.inf, 2.5, 1.2, 1.0, 1.0]


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
