"""Tests of joint searches: both passes of training, and a family that cannot address every tensor."""

from typing import Any

import msgspec
import pytest

from benchmarks.exhaustive.fitting import NOTHING
from flashtune.core.errors import ProblemError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Direction, Problem
from flashtune.core.record import Outcome, Resources
from flashtune.core.target import find_target
from flashtune.db.store import Store
from flashtune.templates.family import Family
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.binary.resources import read_parts
from flashtune.tuner.candidates import Candidate, SearchTask, contiguous_specialization, open_spaces
from flashtune.tuner.execution.backend import SearchWorkers
from flashtune.tuner.execution.compile_pool import Compiled, compile_candidate
from flashtune.tuner.execution.evaluation import Evaluation, Predictor
from flashtune.tuner.perf_model.prediction import scheduled_ms
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.ranking import initial_design, rank
from flashtune.tuner.search.request import Budget, SearchRequest, SearchResult
from flashtune.tuner.search.summary import summary_lines
from flashtune.tuner.search.warm_start import WARM_CONFIGS, known_winners, warm_configs
from flashtune.tuner.workloads.models import backward_of
from tests.tuner.search.fakes import KERNEL, FakeCompiler, FakeMeasurer, a_problem, right

H200 = find_target("h200")
PORTABLE = "forward_q_outer"
LONG = a_problem(seqlen_q=4096, seqlen_kv=4096, heads=16, kv_heads=16)


def search(
    store: Store,
    factors: dict[str, float],
    trials: int = 60,
    *,
    problem: Problem = LONG,
    measurer: Any = None,
    **changes: Any,
) -> tuple[SearchResult, FakeMeasurer]:
    """A search in which a candidate takes its predicted time, times its family's factor."""
    measurer = measurer or FakeMeasurer(
        lambda candidate: timed(problem, candidate, factors.get(candidate.family, 1.0))
    )
    budget = Budget(trials, None, None)
    request = SearchRequest(problem=problem, target=H200, device=0, budget=budget, **changes)
    equipment = SearchWorkers(FakeCompiler(compiled), measurer)
    return run_search(request, store, equipment=equipment), measurer


def compiled(candidate: Candidate) -> Compiled:
    return Compiled(Outcome.OK, KERNEL, Resources(sram_bytes=1024, registers=64))


def timed(problem: Problem, candidate: Candidate, factor: float) -> Evaluation:
    family, resources = find_family(candidate.family), Resources(sram_bytes=65536, registers=64)
    return right(factor * scheduled_ms(problem, family, candidate.config, resources, H200))


def chosen(store: Store) -> tuple[list[str], list[str]]:
    return (
        [row.record.family for row in store.selections()],
        [row.record.family for row in store.fallbacks()],
    )


def test_best_portable_kernel_is_the_fallback_of_a_native_winner(native: Family, store: Store) -> None:
    result, measurer = search(store, {native.name: 0.6, PORTABLE: 1.0, "forward_kv_outer": 5.0})
    assert chosen(store) == ([native.name], [PORTABLE])
    assert result.best is not None
    assert result.best.family == native.name
    assert result.fallback == store.fallbacks()[0].record
    # It was timed with the finalists, and with their peers.
    (entrants,) = measurer.entrants
    assert result.fallback is not None
    assert result.fallback.config is not None
    assert Candidate(PORTABLE, result.fallback.config) in entrants
    assert result.fallback.measurement is not None
    assert [peer.name for peer in result.fallback.measurement.peers] == ["sdpa-cudnn"]
    portable = [candidate for candidate in measurer.seen if candidate.family == PORTABLE]
    fastest = min(timed(LONG, candidate, 1.0).measurement.ms for candidate in portable)  # type: ignore[union-attr]
    assert result.fallback.ms == pytest.approx(fastest)
    (line,) = (line for line in summary_lines(result, "here") if line.startswith("other strides"))
    assert PORTABLE in line


def test_portable_winner_has_no_fallback(native: Family, store: Store) -> None:
    result, _ = search(store, {native.name: 1.5, PORTABLE: 0.8})
    assert result.fallback is None
    assert chosen(store) == ([PORTABLE], [])


@pytest.mark.slow
def test_search_of_the_portable_family_updates_the_fallback(native: Family, store: Store) -> None:
    search(store, {native.name: 0.5}, trials=30)
    before = store.fallbacks()[0].record
    result, _ = search(store, {native.name: 0.5, PORTABLE: 0.9}, trials=60, families=(PORTABLE,))
    assert not result.is_selected
    assert chosen(store) == ([native.name], [PORTABLE])
    assert store.fallbacks()[0].record == result.fallback
    assert result.fallback is not None
    assert (result.fallback.ms or 0) < (before.ms or 0)


@pytest.mark.slow
def test_predictions_are_fallbacks_only_of_predictions(native: Family, store: Store) -> None:
    search(store, {native.name: 0.5}, trials=30)
    measured = chosen(store), store.fallbacks()[0].record
    result, _ = search(store, {}, measurer=Predictor())
    assert not result.is_selected
    assert result.fallback is None
    assert (chosen(store), store.fallbacks()[0].record) == measured


def test_initial_design_includes_every_promising_family(native: Family) -> None:
    scope = SearchTask(LONG, H200, Specialization(), open_spaces(LONG, H200, ()))
    ranked = rank(scope, seed=0, fit=NOTHING)
    start = initial_design(ranked, 24)
    assert 20 <= len(start) == len(set(start)) <= 24
    families = [candidate.family for candidate in start]
    assert set(families[:2]) == {native.name, PORTABLE}
    assert min(families.count(native.name), families.count(PORTABLE)) >= 7
    assert "forward_kv_outer" not in families, "it is predicted to be far behind"
    assert initial_design((), 24) == ()


def test_families_that_cannot_address_the_tensors_are_not_searched(native: Family) -> None:
    def searched(problem: Problem) -> set[str]:
        return {entry.family.name for entry in open_spaces(problem, H200, ())}

    odd = a_problem(value_head_dim=36)
    assert native.supports(odd, H200) is None
    assert native.name in searched(a_problem())
    assert native.name not in searched(odd)
    with pytest.raises(ProblemError, match="cannot address tensors with such strides"):
        open_spaces(odd, H200, (native.name,))


def test_warm_start_includes_winners_of_each_family(native: Family, store: Store) -> None:
    result, _ = search(store, {native.name: 0.5}, trials=40)
    assert result.best is not None
    assert result.fallback is not None
    near = msgspec.structs.replace(LONG, seqlen_q=8192, seqlen_kv=8192)
    scope = SearchTask(near, H200, Specialization(), open_spaces(near, H200, ()))
    warm = warm_configs(known_winners(store), scope)
    assert {candidate.family for candidate in warm} == {native.name, PORTABLE}
    assert len(warm) <= 2 * WARM_CONFIGS


BACKWARD = backward_of(LONG)


def test_only_families_of_the_pass_are_searched() -> None:
    backward = {entry.family.name for entry in open_spaces(BACKWARD, H200, ())}
    forward = {entry.family.name for entry in open_spaces(LONG, H200, ())}
    assert "backward_split" in backward
    assert all(find_family(name).direction is Direction.BACKWARD for name in backward)
    assert backward.isdisjoint(forward)
    with pytest.raises(ProblemError, match="computes the forward pass"):
        open_spaces(BACKWARD, H200, ("forward_q_outer",))
    (only,) = open_spaces(msgspec.structs.replace(BACKWARD, deterministic=True), H200, ("backward_split",))
    assert only.family.name == "backward_split"


@pytest.mark.slow
def test_both_passes_of_a_shape_are_stored_separately(store: Store) -> None:
    ahead, _ = search(store, {}, 40, lse=True)
    back, _ = search(store, {}, 40, problem=BACKWARD)
    assert ahead.best is not None
    assert back.best is not None
    assert ahead.best.specialization == contiguous_specialization(LONG, lse=True)
    assert ahead.best.specialization.lse
    assert not back.best.specialization.lse
    assert {row.record.problem for row in store.selections()} == {LONG, BACKWARD}
    assert back.best.family.startswith("backward_")
    assert any(line.startswith("next") and "backward" in line for line in summary_lines(back, "here"))


@pytest.mark.slow
def test_candidate_must_fit_every_kernel_of_the_launch() -> None:
    family = find_family("backward_split")
    config = msgspec.structs.replace(
        family.default(BACKWARD, H200), block_m=32, block_n=64, num_warps=4, num_stages=1,
        dq_block_m=128, dq_block_n=128, dq_warps=8, dq_stages=3,
    )  # fmt: skip
    assumed = contiguous_specialization(BACKWARD)
    parts = read_parts(render(family, BACKWARD, config, assumed), H200)
    main, of_queries = (part.resources.sram_bytes for part in (parts[0], parts[2]))
    assert main < of_queries
    tight = msgspec.structs.replace(H200, sram_per_block=(main + of_queries) // 2)
    compilation = compile_candidate(BACKWARD, Candidate(family.name, config), assumed, tight)
    assert compilation.outcome is Outcome.INFEASIBLE
    assert compilation.resources is not None
    assert compilation.resources.sram_bytes == of_queries
