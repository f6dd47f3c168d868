"""Tests of the verification of winners with random delays."""

from pathlib import Path

import pytest

from flashtune.core.record import Outcome, Verdict
from flashtune.db.store import Store, open_store
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.execution.evaluation import Evaluation
from flashtune.tuner.search.request import Budget, Phase, Progress
from flashtune.verification.schedule_fuzzing import DELAYS
from tests.tuner.search.fakes import FakeMeasurer, by_tile, done, right
from tests.tuner.search.small_search import SIZE, search

LATE = Verdict(passed=True, worst_ratio=0.75, checks=40, failed="", device="fake", probes=("random", DELAYS))
RACY = Verdict(passed=False, worst_ratio=1e9, checks=40, failed="delayed random q=65", device="fake")
FAILURES = (
    Evaluation(Outcome.WRONG_RESULT, RACY, message=RACY.failed),
    Evaluation(Outcome.TIMEOUT, message="running did not end within its time limit"),
)
TWO_FINALISTS = Budget(100, None, None, finalists=2)


def _right_when_late(candidate: Candidate) -> Evaluation:
    return Evaluation(Outcome.OK, LATE)


@pytest.fixture
def ranked(tmp_path: Path) -> list[Candidate]:
    """The candidates of the small search, the fastest first."""
    measurer = FakeMeasurer(by_tile)
    with open_store(str(tmp_path / "ranked.sqlite")) as store:
        search(store, measurer)
    return sorted(measurer.seen, key=lambda candidate: by_tile(candidate).measurement.ms)  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.outcome.value)
def test_winner_that_fails_with_delays_is_replaced(
    store: Store, ranked: list[Candidate], failure: Evaluation
) -> None:
    first, second, *_ = ranked
    heard: list[Progress] = []

    def judged(candidate: Candidate) -> Evaluation:
        return failure if candidate == first else _right_when_late(candidate)

    measurer = FakeMeasurer(by_tile, judged)
    result = search(store, measurer, seen=heard)
    assert measurer.delayed == [first, second]
    assert result.best is not None
    assert result.best.config == second.config
    assert [entry.record for entry in store.selections()] == [result.best]
    assert result.counts.outcomes == {Outcome.OK: SIZE - 1, failure.outcome: 1}
    assert heard[-1].phase is Phase.DONE
    assert heard[-1].best is not None
    assert heard[-1].best.config != first.config
    latest = [entry.record for entry in store.records() if entry.record.config == first.config][-1]
    assert (latest.outcome, latest.measurement, latest.message) == (failure.outcome, None, failure.message)

    again = FakeMeasurer(by_tile, judged)
    repeated = search(store, again)
    assert repeated.best is not None
    assert repeated.best.config == second.config
    assert again.seen == []


def test_winner_is_verified_with_delays_once(store: Store) -> None:
    measurer = FakeMeasurer(by_tile, _right_when_late)
    result = search(store, measurer)
    assert len(measurer.delayed) == 1
    assert result.best is not None
    before = by_tile(measurer.delayed[0]).verdict
    verdict = result.best.verdict
    assert before is not None
    assert verdict is not None
    assert verdict.passed
    assert verdict.checks == before.checks + LATE.checks
    assert verdict.worst_ratio == max(before.worst_ratio, LATE.worst_ratio)
    assert verdict.probes == (*(before.probes or ()), "random", DELAYS)
    again = FakeMeasurer(by_tile, lambda candidate: pytest.fail("proven twice"))
    repeated = search(store, again)
    assert repeated.best is not None
    assert repeated.best.config == result.best.config


def test_nothing_is_selected_if_all_fail_with_delays(store: Store) -> None:
    measurer = FakeMeasurer(by_tile, lambda candidate: FAILURES[0])
    result = search(store, measurer)
    assert len(measurer.delayed) == len(set(measurer.delayed)) == SIZE
    assert result.best is None
    assert not result.is_selected
    assert store.selections() == []


def test_next_candidates_follow_if_all_finalists_fail(store: Store, ranked: list[Candidate]) -> None:
    wrong = ranked[:4]
    measurer = FakeMeasurer(
        by_tile, lambda candidate: FAILURES[0] if candidate in wrong else _right_when_late(candidate)
    )
    result = search(store, measurer, budget=TWO_FINALISTS)
    assert result.best is not None
    assert result.best.config == ranked[4].config
    assert result.best.measurement is not None
    assert result.best.measurement.samples == 21


@pytest.mark.slow
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_interrupt_during_delays_selects_among_the_finalists(
    store: Store, ranked: list[Candidate], failing: int
) -> None:
    def interrupted(candidate: Candidate) -> Evaluation:
        if candidate in ranked[:failing]:
            return FAILURES[0]
        raise KeyboardInterrupt

    measurer = FakeMeasurer(by_tile, interrupted)
    with pytest.raises(KeyboardInterrupt):
        search(store, measurer, budget=TWO_FINALISTS)
    (pinned,) = store.selections()
    assert pinned.record.config == ranked[failing].config
    assert pinned.record.measurement is not None
    assert pinned.record.measurement.samples == 21


def test_final_measurement_is_not_repeated_for_close_finalists(store: Store, ranked: list[Candidate]) -> None:
    times = {candidate: 1.0 + 0.01 * index for index, candidate in enumerate(ranked)}
    wrong = ranked[:2]
    measurer = FakeMeasurer(
        lambda candidate: right(times[candidate]),
        lambda candidate: FAILURES[0] if candidate in wrong else _right_when_late(candidate),
    )
    result = search(store, measurer)
    assert len(measurer.entrants) == 1
    assert measurer.delayed == ranked[:3]
    assert result.best is not None
    assert result.best.config == ranked[2].config


def test_winner_is_verified_with_delays_without_final_measurement(
    store: Store, ranked: list[Candidate]
) -> None:
    first, second, *_ = ranked
    measurer = FakeMeasurer(
        by_tile, lambda candidate: FAILURES[0] if candidate == first else _right_when_late(candidate)
    )
    measurer.finals = lambda *_: done(())  # type: ignore[method-assign]
    result = search(store, measurer)
    assert measurer.delayed == [first, second]
    assert result.best is not None
    assert result.best.config == second.config
    assert result.best.measurement is not None
