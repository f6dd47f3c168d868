import math
import time

import msgspec

from benchmarks.exhaustive.truth_table import TruthTable, fastest
from benchmarks.search_replay.replay import Replay, replay_space
from flashtune.core.problem import Problem
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
