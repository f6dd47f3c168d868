"""Tests of searches of both passes of training."""

import msgspec
import pytest

from flashtune.core.errors import ProblemError
from flashtune.core.problem import Direction, Problem
from flashtune.core.record import Outcome, Resources
from flashtune.core.target import find_target
from flashtune.db.store import Store
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.binary.resources import read_parts
from flashtune.tuner.candidates import Candidate, contiguous_specialization, open_spaces
from flashtune.tuner.execution.backend import SearchWorkers
from flashtune.tuner.execution.compile_pool import Compiled, compile_candidate
from flashtune.tuner.execution.evaluation import Evaluation
from flashtune.tuner.perf_model.prediction import scheduled_ms
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.request import Budget, SearchRequest, SearchResult
from flashtune.tuner.search.summary import summary_lines
from flashtune.tuner.workloads.models import backward_of
from tests.tuner.search.fakes import KERNEL, FakeCompiler, FakeMeasurer, a_problem, right

H200 = find_target("h200")
FORWARD = a_problem(seqlen_q=4096, seqlen_kv=4096, heads=16, kv_heads=16)
BACKWARD = backward_of(FORWARD)
LEAN = Resources(sram_bytes=65536, registers=64)


def compiled(candidate: Candidate) -> Compiled:
    return Compiled(Outcome.OK, KERNEL, LEAN)


def search(store: Store, problem: Problem, trials: int = 40, *, lse: bool = False) -> SearchResult:
    """A search in which candidates take their predicted times."""

    def timed(candidate: Candidate) -> Evaluation:
        return right(scheduled_ms(problem, find_family(candidate.family), candidate.config, LEAN, H200))

    equipment = SearchWorkers(FakeCompiler(compiled), FakeMeasurer(timed), 2)
    budget = Budget(trials, None, None)
    request = SearchRequest(problem=problem, target=H200, device=0, budget=budget, lse=lse)
    return run_search(request, store, equipment=equipment)


def test_only_families_of_the_pass_are_searched() -> None:
    backward = {entry.family.name for entry in open_spaces(BACKWARD, H200, ())}
    forward = {entry.family.name for entry in open_spaces(FORWARD, H200, ())}
    assert "backward_split" in backward
    assert all(find_family(name).direction is Direction.BACKWARD for name in backward)
    assert backward.isdisjoint(forward)
    with pytest.raises(ProblemError, match="computes the forward pass"):
        open_spaces(BACKWARD, H200, ("forward_q_outer",))
    (only,) = open_spaces(msgspec.structs.replace(BACKWARD, deterministic=True), H200, ("backward_split",))
    assert only.family.name == "backward_split"


@pytest.mark.slow
def test_both_passes_of_a_shape_are_stored_separately(store: Store) -> None:
    ahead, back = search(store, FORWARD, lse=True), search(store, BACKWARD)
    assert ahead.best is not None
    assert back.best is not None
    assert ahead.best.specialization == contiguous_specialization(FORWARD, lse=True)
    assert ahead.best.specialization.lse
    assert not back.best.specialization.lse
    assert {row.record.problem for row in store.selections()} == {FORWARD, BACKWARD}
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
