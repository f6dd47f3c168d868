"""Tests of one search: trials, stored records, selection, stopping, and progress events."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashtune.core.errors import MachineError, ProblemError
from flashtune.core.problem import Direction
from flashtune.core.record import Outcome, Provenance, Resources, Verdict
from flashtune.db.store import Store, open_store
from flashtune.templates.registry import find_family
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.execution.compile_pool import Compiled
from flashtune.tuner.execution.evaluation import Evaluation, Predictor, lost_device
from flashtune.tuner.search.request import Budget, Phase, Progress, Stop
from flashtune.tuner.workloads.models import backward_of
from tests.tuner.search.fakes import (
    KERNEL,
    FakeCompiler,
    FakeMeasurer,
    a_config,
    a_problem,
    by_tile,
    compiled,
    right,
)
from tests.tuner.search.small_search import H100, SIZE, search

WRONG = Verdict(passed=False, worst_ratio=1e9, checks=4, failed="needle q=65 kv=320", device="fake")


def test_small_space_is_searched_completely(store: Store) -> None:
    measurer = FakeMeasurer(by_tile)
    result = search(store, measurer)
    assert result.stop is Stop.EXHAUSTED
    assert result.counts.outcomes == {Outcome.OK: SIZE}
    assert result.candidates == SIZE
    assert len(measurer.seen) == len(set(measurer.seen)) == SIZE
    assert result.best is not None
    fastest = min(measurer.seen, key=lambda candidate: by_tile(candidate).measurement.ms)  # type: ignore[union-attr]
    assert result.best.config == fastest.config
    (pinned,) = store.selections()
    assert pinned.record == result.best
    assert pinned.id == result.best_id


def test_only_records_of_an_unlisted_gpu_contain_its_properties(store: Store, tmp_path: Path) -> None:
    gpu = msgspec.structs.replace(H100, name="nvidia-x9000", sm_count=99)
    search(store, FakeMeasurer(by_tile), target=gpu)
    assert {entry.record.gpu for entry in store.records()} == {gpu}
    with open_store(str(tmp_path / "listed.sqlite")) as other:
        search(other, FakeMeasurer(by_tile), target=msgspec.structs.replace(H100, l2_bytes=1))
        assert {entry.record.gpu for entry in other.records()} == {msgspec.UNSET}


def test_final_measurement_times_the_best_and_baselines_in_one_run(store: Store) -> None:
    measurer = FakeMeasurer(by_tile)
    result = search(store, measurer)
    (entrants,) = measurer.entrants
    assert 1 < len(entrants) <= Budget().finalists
    assert result.best is not None
    assert result.best.measurement is not None
    assert result.best.measurement.samples == 21
    assert [peer.name for peer in result.best.measurement.peers] == ["sdpa-cudnn"]
    # Both timings of a finalist are kept.
    assert len(store.records()) == SIZE + len(entrants)


def test_candidates_that_cannot_be_finalists_are_verified_and_timed_less(store: Store) -> None:
    measurer = FakeMeasurer(by_tile)
    search(store, measurer)
    assert measurer.limits[0] is None
    best = min(by_tile(candidate).measurement.ms for candidate in measurer.seen)  # type: ignore[union-attr]
    assert measurer.limits[-1] == pytest.approx(Budget().within * best)


def test_failures_are_recorded_and_the_search_continues(store: Store) -> None:
    def compile_some(candidate: Candidate) -> Compiled:
        config = candidate.config
        assert hasattr(config, "block_n")
        if config.num_warps == 8 and config.block_n == 64:
            return Compiled(Outcome.INFEASIBLE, KERNEL, Resources(300_000), "asks for 300000 B of SRAM")
        if config.num_warps == 8:
            return Compiled(Outcome.COMPILE_ERROR, KERNEL, message="PassManager::run failed")
        return compiled(candidate)

    def run_some(candidate: Candidate) -> Evaluation:
        config: Any = candidate.config
        if config.block_m == 64 and config.block_n == 32:
            return Evaluation(Outcome.WRONG_RESULT, WRONG, message=WRONG.failed)
        if config.block_m == 64:
            return Evaluation(Outcome.LAUNCH_ERROR, message="illegal memory access")
        return by_tile(candidate)

    result = search(store, FakeMeasurer(run_some), FakeCompiler(compile_some))
    assert result.counts.outcomes == {
        Outcome.INFEASIBLE: 6,
        Outcome.COMPILE_ERROR: 6,
        Outcome.WRONG_RESULT: 3,
        Outcome.LAUNCH_ERROR: 3,
        Outcome.OK: 6,
    }
    assert ("infeasible: asks for # B of SRAM", 6) in result.reasons
    stored = store.records()
    wrong = [entry.record for entry in stored if entry.record.outcome is Outcome.WRONG_RESULT]
    assert {record.verdict for record in wrong} == {WRONG}
    assert result.best is not None
    assert result.best.config is not None
    assert result.best.config.num_warps == 4


def test_fast_wrong_kernel_is_not_selected(store: Store) -> None:
    def only_one_is_right(candidate: Candidate) -> Evaluation:
        if candidate.config == a_config():
            return right(50.0)
        return Evaluation(Outcome.WRONG_RESULT, WRONG, message="NaN")

    result = search(store, FakeMeasurer(only_one_is_right))
    assert result.best is not None
    assert result.best.config == a_config()


def test_config_that_exceeds_the_sram_model_is_not_compiled(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashtune.templates.family import BytesItem
    from flashtune.templates.forward_q_outer.family import ForwardQOuter

    def items(_: object, problem: object, config: Any, *rest: object) -> tuple[BytesItem, ...]:
        return (BytesItem("tiles", 400_000 if config.block_n == 64 else 1000),)

    monkeypatch.setattr(ForwardQOuter, "sram_items", items)
    compiler = FakeCompiler()
    # A budget smaller than the space, so that the sampler proposes what the ranking left out.
    result = search(store, FakeMeasurer(by_tile), compiler, budget=Budget(11, None, None))
    assert all(getattr(candidate.config, "block_n", 0) == 32 for candidate in compiler.seen)
    assert result.counts.tried == 11
    pruned = [entry.record for entry in store.records() if entry.record.kernel is None]
    assert len(pruned) == result.counts.pruned
    assert all(record.outcome is Outcome.INFEASIBLE for record in pruned)
    assert all("needs at least 400000 B of SRAM" in record.message for record in pruned)


def test_patience_ends_a_search_that_no_longer_improves(store: Store) -> None:
    measurer = FakeMeasurer(lambda candidate: right(1.0))
    result = search(store, measurer, budget=Budget(100, None, 5))
    assert result.stop is Stop.PATIENCE
    assert len(measurer.seen) < SIZE


def test_time_budget_ends_a_search(store: Store) -> None:
    result = search(store, FakeMeasurer(by_tile), budget=Budget(None, 1e-9, None))
    assert result.stop is Stop.SECONDS
    assert result.best is None


@pytest.mark.parametrize(
    "error", [MachineError("the disk is full"), lost_device(0, "no device is detected"), KeyboardInterrupt()]
)
def test_stopped_search_selects_among_finished_results_and_resumes(
    store: Store, error: BaseException
) -> None:
    measurer = FakeMeasurer(by_tile)

    def judge(candidate: Candidate) -> Evaluation:
        if len(measurer.seen) > 7:
            raise error
        return by_tile(candidate)

    measurer.judge = judge
    with pytest.raises(type(error)):
        search(store, measurer)
    kept = [entry.record for entry in store.records()]
    assert {record.outcome for record in kept} == {Outcome.OK}
    assert len(kept) == 7
    (selected,) = store.selections()
    assert selected.record.ms == min(record.ms or 0.0 for record in kept)
    result = search(store, FakeMeasurer(by_tile))
    assert result.counts.reused == 7
    assert result.counts.outcomes == {Outcome.OK: SIZE}


def test_search_without_gpu_predicts_times(store: Store, scope: Any) -> None:
    result = search(store, Predictor(), device=None)
    assert result.provenance is Provenance.PREDICTED
    assert result.best is not None
    assert result.best.provenance is Provenance.PREDICTED
    assert result.best.verdict is None
    assert result.best.measurement is not None
    assert result.best.measurement.samples == 0
    assert result.is_selected


def test_observer_receives_every_phase(store: Store) -> None:
    seen: list[Progress] = []
    search(store, FakeMeasurer(by_tile), seen=seen)
    phases = list(dict.fromkeys(progress.phase for progress in seen))
    assert phases == [Phase.STARTING, Phase.SEARCHING, Phase.FINALS, Phase.DONE]
    tried = [progress.counts.tried for progress in seen]
    assert tried == sorted(tried)
    assert seen[-1].best is not None


def test_an_empty_problem_is_refused(store: Store) -> None:
    with pytest.raises(ProblemError, match="nothing can be searched"):
        search(store, FakeMeasurer(by_tile), problem=a_problem(seqlen_kv=0))
    assert store.records() == []


def test_forward_pass_of_a_gradient_compiles_before_the_candidates(store: Store) -> None:
    compiler = FakeCompiler(lambda candidate: Compiled(Outcome.OK, KERNEL, Resources(1000, registers=64)))
    gradient = backward_of(a_problem())
    search(
        store,
        FakeMeasurer(lambda candidate: right(1.0)),
        compiler,
        problem=gradient,
        spaces=(),
        families=("backward_split",),
        budget=Budget(2, None),
    )
    first, *others = [find_family(candidate.family).direction for candidate in compiler.seen]
    assert first is Direction.FORWARD
    assert {*others} == {Direction.BACKWARD}
