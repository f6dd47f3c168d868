"""Tests of repeated searches: reused records and the remaining selection."""

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashtune.core.record import Outcome, Resources
from flashtune.db.store import Store, open_store
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution.compile_pool import Compiled
from flashtune.tuner.execution.evaluation import DeviceLostError, Evaluation, Predictor
from flashtune.tuner.search.request import Budget, Stop
from tests.tuner.search.fakes import (
    KERNEL,
    FakeCompiler,
    FakeMeasurer,
    a_measurement,
    a_problem,
    by_tile,
    on_gpu,
    right,
)
from tests.tuner.search.small_search import SIZE, search


def test_repeated_search_resumes(store: Store) -> None:
    first = FakeMeasurer(by_tile)
    result = search(store, first, budget=Budget(10, None, None))
    assert result.stop is Stop.TRIALS
    assert len(first.seen) == 10
    second = FakeMeasurer(by_tile)
    two = search(store, second)
    assert two.counts.reused == 10
    assert not set(first.seen) & set(second.seen)
    assert len(first.seen) + len(second.seen) == SIZE
    third = FakeMeasurer(by_tile)
    assert search(store, third).counts.reused == SIZE
    assert third.seen == []


def test_times_are_reused_on_their_gpu_alone(store: Store, scope: SearchTask) -> None:
    wrong = next(iter(scope.candidates()))
    for gpu_uuid, slowness, reused in (("a", 1.0, 0), ("b", 1.01, 1), ("a", 1.0, SIZE), ("b", 1.01, SIZE)):

        def judge(candidate: Candidate, slowness: float = slowness) -> Evaluation:
            if candidate == wrong:
                return Evaluation(Outcome.WRONG_RESULT, message="probe 7")
            return right(slowness * (by_tile(candidate).measurement or a_measurement(1.0)).ms)

        measurer = FakeMeasurer(judge, gpu_uuid=gpu_uuid)
        result = search(store, measurer)
        assert result.counts.reused == reused
        assert len(measurer.seen) == SIZE - reused
        assert result.best is not None
        assert result.best.measurement is not None
        assert result.best.measurement.gpu_uuid == gpu_uuid


def test_search_whose_gpu_is_replaced_ends(store: Store) -> None:
    measurer = FakeMeasurer(by_tile)

    def replaced(candidate: Candidate) -> Evaluation:
        return on_gpu(by_tile(candidate), "other") if len(measurer.seen) > 3 else by_tile(candidate)

    measurer.judge = replaced
    with pytest.raises(DeviceLostError, match="was replaced by another one: what was finished is stored"):
        search(store, measurer)
    assert len(store.records()) == 3
    assert len(store.selections()) == 1


def test_search_without_trials_times_known_records_again(store: Store) -> None:
    result = search(store, FakeMeasurer(by_tile))
    assert result.best is not None
    slower = (result.best.ms or 0.0) * 2

    def in_twice_the_time(candidate: Candidate) -> Evaluation:
        return right(2 * (by_tile(candidate).measurement or a_measurement(1.0)).ms)

    measurer = FakeMeasurer(in_twice_the_time)
    two = search(store, measurer, budget=Budget(None, 0.0, None))
    assert two.stop is Stop.SECONDS
    assert measurer.seen == []
    (selected,) = store.selections()
    assert selected.record.config == result.best.config
    assert selected.record.ms == slower


@pytest.mark.slow
def test_records_of_other_compiler_versions_are_measured_again(store: Store, tmp_path: Path) -> None:
    search(store, FakeMeasurer(by_tile))
    with open_store(str(tmp_path / "other.sqlite")) as other:
        changed = itertools.cycle(("triton", "template", "ptxas", "driver"))
        for entry in store.records():
            versions = msgspec.structs.replace(entry.record.versions, **{next(changed): "9.9.9"})
            other.add(msgspec.structs.replace(entry.record, versions=versions))
        again = FakeMeasurer(by_tile)
        assert search(other, again).counts.reused == 0
    assert len(again.seen) == SIZE


def test_unverified_slow_candidate_is_not_selected(store: Store) -> None:
    def slow_is_unproven(candidate: Candidate) -> Evaluation:
        timed = by_tile(candidate)
        hopeless = getattr(candidate.config, "block_m", 0) == 64
        return msgspec.structs.replace(timed, verdict=None) if hopeless else timed

    measurer = FakeMeasurer(slow_is_unproven)
    search(store, measurer)
    assert all(getattr(candidate.config, "block_m", 0) == 128 for candidate in measurer.entrants[0])
    # Slow candidates are tried again only in a search without faster ones.
    again = FakeMeasurer(slow_is_unproven)
    search(store, again)
    assert again.seen == []


def test_unverified_slow_candidate_is_retried_without_faster_ones(store: Store) -> None:
    unproven = FakeMeasurer(lambda candidate: msgspec.structs.replace(by_tile(candidate), verdict=None))
    assert search(store, unproven).best is None
    assert store.selections() == []
    again = FakeMeasurer(by_tile)
    assert search(store, again).best is not None
    assert len(again.seen) == SIZE


def test_near_shape_provides_configs_but_no_times(store: Store) -> None:
    search(store, FakeMeasurer(by_tile))
    (winner,) = store.selections()
    compiler = FakeCompiler()
    search(store, FakeMeasurer(by_tile), compiler, problem=a_problem(seqlen_q=512, seqlen_kv=512))
    # Before it comes nothing but the family's default, where the space holds it.
    assert winner.record.config in [candidate.config for candidate in compiler.seen[:2]]
    mine = [entry for entry in store.records() if entry.record.problem.seqlen_q == 512]
    assert len(mine) >= SIZE


def test_prediction_does_not_replace_a_measurement(store: Store, scope: Any) -> None:
    search(store, FakeMeasurer(by_tile))
    (measured,) = store.selections()
    result = search(store, Predictor(), device=None)
    assert not result.is_selected
    assert store.selections() == [measured]
    # Nor the other way round: predicted candidates do not count as done.
    assert result.counts.reused == 0


def test_slower_family_searched_alone_does_not_replace_a_faster_one(store: Store) -> None:
    search(store, FakeMeasurer(by_tile))
    (fastest,) = store.selections()
    other: dict[str, Any] = {"families": ("forward_kv_outer",), "spaces": (), "budget": Budget(3, None, None)}
    slower = search(store, FakeMeasurer(lambda candidate: right(50.0)), FakeCompiler(fits), **other)
    assert slower.best is not None
    assert not slower.is_selected
    assert store.selections() == [fastest]
    faster = search(
        store, FakeMeasurer(lambda candidate: right(0.1)), FakeCompiler(fits), **other | {"budget": Budget(6)}
    )
    assert faster.is_selected


def fits(candidate: Candidate) -> Compiled:
    return Compiled(Outcome.OK, KERNEL, Resources(1000, registers=100))


def test_failed_candidates_are_retried_on_request(store: Store) -> None:
    def compile_some(candidate: Candidate) -> Compiled:
        big = getattr(candidate.config, "num_warps", 0) == 8
        outcome = Outcome.INFEASIBLE if big else Outcome.COMPILE_ERROR
        return Compiled(outcome, KERNEL, Resources(300_000) if big else None, "as it happens")

    search(store, FakeMeasurer(by_tile), FakeCompiler(compile_some))
    same = FakeCompiler()
    assert search(store, FakeMeasurer(by_tile), same).best is None
    assert same.seen == []
    again = FakeCompiler()
    result = search(store, FakeMeasurer(by_tile), again, retry_failed=True)
    # Candidates that do not fit the GPU are not tried again.
    assert len(again.seen) == SIZE // 2
    assert result.counts.reused == SIZE // 2
    assert result.counts.outcomes == {Outcome.OK: SIZE // 2, Outcome.INFEASIBLE: SIZE // 2}
    assert result.is_selected
    once_more = FakeCompiler()
    search(store, FakeMeasurer(by_tile), once_more, retry_failed=True)
    assert once_more.seen == []
