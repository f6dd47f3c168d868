"""Tests of the budgets of a search: the expected gain, staged verification, repeated searches."""

import math
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from benchmarks.exhaustive.fitting import NOTHING
from flashtune.core.record import Outcome, Verdict
from flashtune.db.store import Store
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution.backend import SearchWorkers
from flashtune.tuner.execution.compile_pool import Compiled
from flashtune.tuner.execution.evaluation import Evaluation
from flashtune.tuner.search import trial_log
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.finals import COMPILED_AHEAD
from flashtune.tuner.search.optuna_study import TrialResult
from flashtune.tuner.search.proposer import LEAST_RESULTS, DefaultStrategy
from flashtune.tuner.search.ranking import Ranked
from flashtune.tuner.search.repeat import repeat_lines, repeat_search
from flashtune.tuner.search.request import BUDGETS, NOISE, Budget, Effort, Stop, WarmStart
from flashtune.tuner.search.surrogate import CandidateGrid, Surrogate
from tests.tuner.search.fakes import PASSED, FakeCompiler, FakeMeasurer, by_tile, compiled, done, right
from tests.tuner.search.small_search import SIZE, a_request, search


def strategy_of(scope: SearchTask) -> tuple[DefaultStrategy, list[Candidate]]:
    candidates = list(scope.candidates())
    ranked = [Ranked(candidate, 1.0) for candidate in candidates]
    return DefaultStrategy(scope, (), lambda: ranked, {}, seed=0), candidates


def test_expected_gain_is_unknown_before_enough_results(scope: SearchTask) -> None:
    strategy, candidates = strategy_of(scope)
    for candidate in candidates[: LEAST_RESULTS - 1]:
        strategy.tell(candidate, TrialResult(1.0))
    assert strategy.expected_gain() == math.inf
    strategy.tell(candidates[LEAST_RESULTS], TrialResult(1.0))
    assert strategy.expected_gain() < math.inf


def test_expected_gain_is_small_among_equal_times_and_large_among_different_ones(scope: SearchTask) -> None:
    equal, candidates = strategy_of(scope)
    different, _ = strategy_of(scope)
    for number, candidate in enumerate(candidates[: LEAST_RESULTS + 2]):
        equal.tell(candidate, TrialResult(1.0 + 1e-4 * (number % 2)))
        different.tell(candidate, TrialResult(1.0 + 0.5 * (number % 3)))
    assert equal.expected_gain() < NOISE < different.expected_gain()
    for candidate in candidates:
        different.tell(candidate, TrialResult(1.0))
    assert different.expected_gain() == 0.0


def test_calibration_multiplies_uncertainty_by_the_likeliest_factor(scope: SearchTask) -> None:
    pool = CandidateGrid(scope, tuple(scope.candidates()))
    surrogate = Surrogate(pool, [1.0] * SIZE)
    times: dict[int, float | None] = {index: 1.0 + 1e-3 * (index % 2) for index in range(0, SIZE, 2)}
    plain, calibrated = (surrogate.expected_improvements(times, calibrated=flag) for flag in (False, True))
    assert calibrated.max() < plain.max() / 4


def test_search_stops_when_nothing_better_is_expected(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    measurer = FakeMeasurer(by_tile)
    monkeypatch.setattr(
        DefaultStrategy, "expected_gain", lambda self: NOISE * (1.1 if len(measurer.seen) < 9 else 0.9)
    )
    result = search(store, measurer, budget=Budget(100, None, None, gain=NOISE))
    assert result.stop is Stop.GAIN
    assert 9 <= len(measurer.seen) < SIZE
    assert result.is_selected


def test_efforts_differ_in_the_gain_that_they_accept() -> None:
    quick, default, thorough = (BUDGETS[effort] for effort in Effort)
    assert quick.gain is not None
    assert default.gain is not None
    assert quick.gain > default.gain
    assert thorough == Budget()


class OneSecondCompiler(FakeCompiler):
    """Finishes the oldest compilation whenever the search waits, one second later. It is a clock too."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.submitted: list[float] = []
        self.delayed: list[float] = []
        self._unfinished: list[tuple[Future[Compiled], Candidate]] = []

    def submit(self, scope: SearchTask, candidate: Candidate) -> Future[Compiled]:
        self.submitted.append(self.seconds)
        self._unfinished.append((Future(), candidate))
        return self._unfinished[-1][0]

    def compile_delayed(self, scope: SearchTask, candidate: Candidate) -> None:
        self.delayed.append(self.seconds)

    def now(self) -> float:
        return self.seconds

    def wait_for_any(self, pending: Collection[Future[Any]]) -> None:
        if not any(job.done() for job in pending):
            self.seconds += 1.0
            job, candidate = self._unfinished.pop(0)
            job.set_result(compiled(candidate))

    def wait_for_all(self, pending: Collection[Future[Any]]) -> None:
        while not all(job.done() for job in pending):
            self.wait_for_any(pending)


def test_compilers_prepare_the_last_verification_when_new_candidates_would_be_late(store: Store) -> None:
    compiler = OneSecondCompiler()
    limits = Budget(100, 8.5, None, within=10.0)
    result = run_search(
        a_request(budget=limits),
        store,
        lambda progress: None,
        SearchWorkers(compiler, FakeMeasurer(by_tile), compiler),
    )
    # Two compile at once, so each takes two seconds.
    assert max(compiler.submitted) == 6.0
    assert len(compiler.submitted) == 8
    assert compiler.delayed.count(7.0) == COMPILED_AHEAD
    assert result.stop is Stop.SECONDS
    assert result.counts.tried == 8


class Staged(FakeMeasurer):
    """Leaves out the full verification of candidates above the limit, as the GPU process does."""

    def evaluate(
        self, scope: SearchTask, candidate: Candidate, compiled: Compiled, drop_above_ms: float | None
    ) -> Future[Evaluation]:
        evaluation = super().evaluate(scope, candidate, compiled, drop_above_ms).result()
        assert evaluation.measurement is not None
        if drop_above_ms is not None and evaluation.measurement.ms > drop_above_ms:
            evaluation = msgspec.structs.replace(evaluation, verdict=None, message="too slow")
        return done(evaluation)


def test_finalists_are_verified_in_full_and_slower_candidates_are_never_selected(store: Store) -> None:
    measurer = Staged(by_tile)
    result = search(store, measurer)
    within = Budget().within * min(by_tile(candidate).measurement.ms for candidate in measurer.seen)  # type: ignore[union-attr]
    records = [entry.record for entry in store.records() if entry.record.outcome is Outcome.OK]
    unverified = [record for record in records if record.verdict is None]
    assert unverified
    assert all(record.ms and record.ms > within for record in unverified)
    assert result.best is not None
    assert result.best.verdict is not None


def test_skipped_candidates_are_verified_if_the_winner_fails_with_delays(store: Store) -> None:
    fast: list[Candidate] = []

    def times(candidate: Candidate) -> Evaluation:
        fast[:] = fast or [candidate]
        return right(0.5 if candidate == fast[0] else 1.0)

    failed = Verdict(passed=False, worst_ratio=9.0, checks=1, failed="delayed", device="fake")
    measurer = Staged(
        times,
        lambda candidate: (
            Evaluation(Outcome.WRONG_RESULT, failed, message="delayed") if candidate == fast[0] else None
        ),
    )
    result = search(store, measurer)
    assert measurer.limits[SIZE - 1] == pytest.approx(Budget().within * 0.5)
    assert len(measurer.seen) > SIZE
    assert result.best is not None
    assert result.best.ms == 1.0
    assert result.best.verdict == PASSED


def test_fallbacks_are_verified_although_a_family_of_aligned_tensors_is_faster(
    store: Store, scope: SearchTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates = list(scope.candidates())
    journal = trial_log.TrialLog(store, scope, FakeMeasurer(by_tile))
    compiled = FakeCompiler().submit(scope, candidates[0]).result()
    assert journal.limit_ms(candidates[1], 1.1) is None
    monkeypatch.setattr(trial_log, "serves_any_tensors", lambda record: False)
    journal.finish(candidates[0], compiled, right(1.0))
    # No record serves any tensors yet, and the candidates' family does.
    assert journal.limit_ms(candidates[1], 1.1) == pytest.approx(trial_log.DROP_FACTOR)
    monkeypatch.setattr(trial_log, "serves_any_tensors", lambda record: True)
    assert journal.limit_ms(candidates[1], 1.1) == pytest.approx(1.1)


def test_first_candidates_of_the_next_search_compile_during_the_finals(
    store: Store, scope: SearchTask
) -> None:
    compiler, warm = FakeCompiler(width=COMPILED_AHEAD + 2), tuple(scope.candidates())[:6]
    following = a_request(experience=WarmStart(warm, NOTHING))
    workers = SearchWorkers(compiler, FakeMeasurer(by_tile))
    run_search(a_request(), store, equipment=workers, following=lambda: following)
    assert len(compiler.seen) == SIZE + 2
    assert compiler.seen[SIZE:] == list(warm[:2])


def test_repeated_searches_store_nothing_and_report_the_cost_of_each_pick() -> None:
    def judge(candidate: Candidate) -> Evaluation:
        # Tiles of 128 rows are faster in the first search, and slower in the second and in the common run.
        factor = 0.9 if len(measurer.seen) <= SIZE else 1.1
        tile = getattr(candidate.config, "block_m", 0)
        return right(1.0 if tile == 64 else factor)

    measurer = FakeMeasurer(judge)
    repeats = repeat_search(a_request(), 2, lambda _: None, SearchWorkers(FakeCompiler(), measurer))
    assert repeats.differing == 1
    assert len(measurer.seen) == 2 * SIZE
    assert [pick.cost for pick in repeats.picks] == pytest.approx([0.1, 0.0])
    *_, last = repeat_lines((repeats,))
    assert last.startswith("1 of 1 repeated searches selected another config than the first")
    assert "10.00%" in last
