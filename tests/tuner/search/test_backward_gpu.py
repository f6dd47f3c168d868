"""Tests of gradients on a GPU: search, timing of baselines, and bench."""

import msgspec
import pytest
import torch

from flashtune.core.problem import Causal, Dtype
from flashtune.core.record import Provenance
from flashtune.core.target import device_target
from flashtune.db.store import Store
from flashtune.templates.registry import find_family
from flashtune.tuner.bench.bench import run_bench
from flashtune.tuner.bench.peer_runs import FLEX, UNFUSED
from flashtune.tuner.bench.results import OURS
from flashtune.tuner.candidates import Candidate, contiguous_specialization
from flashtune.tuner.execution.inputs import make_tensors
from flashtune.tuner.execution.timed_runs import kernel_run, peer_runs
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.request import Budget, SearchRequest
from flashtune.tuner.workloads.models import backward_of, forward_of
from tests.tuner.search.fakes import a_problem

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def test_search_selects_verified_gradients_and_times_baselines(store: Store) -> None:
    problem = backward_of(
        a_problem(
            dtype=Dtype.BF16, heads=16, kv_heads=8, seqlen_q=1024, seqlen_kv=1024, causal=Causal.TOP_LEFT
        )
    )
    budget = Budget(12, None, None)
    request = SearchRequest(problem=problem, target=device_target(0), device=0, budget=budget)
    result = run_search(request, store)
    assert result.provenance is Provenance.MEASURED
    assert result.best is not None, result.reasons
    assert result.best.verdict is not None
    assert result.best.verdict.passed
    assert result.best.measurement is not None
    assert {"sdpa-flash", "unfused"} <= {peer.name for peer in result.best.measurement.peers}
    assert result.is_selected


def test_forward_pass_with_lse_can_be_searched(store: Store) -> None:
    problem = a_problem(dtype=Dtype.BF16, heads=16, kv_heads=16, seqlen_q=1024, seqlen_kv=1024)
    request = SearchRequest(
        problem=problem, target=device_target(0), device=0, budget=Budget(6, None, None), lse=True
    )
    result = run_search(request, store)
    assert result.best is not None, result.reasons
    assert result.best.specialization.lse


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize(
    ("causal", "lengths"),
    [(Causal.NONE, (256, 256)), (Causal.BOTTOM_RIGHT, (256, 256)), (Causal.BOTTOM_RIGHT, (128, 384))],
)
def test_kernels_and_baselines_compute_equal_gradients(
    causal: Causal, lengths: tuple[int, int], kv_heads: int
) -> None:
    shape = {"kv_heads": kv_heads, "seqlen_q": lengths[0], "seqlen_kv": lengths[1]}
    problem = backward_of(a_problem(dtype=Dtype.BF16, heads=4, causal=causal, **shape))
    target = device_target(0)
    tensors = make_tensors(problem, DEVICE)
    assert tensors.backward is not None
    family = find_family("backward_split")
    candidate = Candidate(family.name, family.default(problem, target))
    assumed = contiguous_specialization(problem)
    kernel_run(problem, candidate, assumed, target, tensors)()
    ours = (tensors.backward.dq, tensors.backward.dk, tensors.backward.dv)
    runs = dict(peer_runs(problem, tensors))
    # Of SDPA's backends this one knows no shared KV heads.
    assert {"unfused"} < runs.keys()
    assert ("sdpa-efficient" in runs) == (kv_heads == 4)
    for name, run in runs.items():
        computed = run()
        assert isinstance(computed, tuple)
        for gradient, other in zip(ours, computed, strict=True):
            torch.testing.assert_close(gradient, other, rtol=5e-2, atol=5e-2, msg=name)


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.BOTTOM_RIGHT])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_all_implementations_are_timed_interleaved(causal: Causal, deterministic: bool) -> None:
    problem = backward_of(a_problem(dtype=Dtype.BF16, seqlen_q=512, seqlen_kv=512, causal=causal))
    problem = msgspec.structs.replace(problem, deterministic=deterministic)
    bench = run_bench(problem, 0)
    names = [row.name for row in bench.rows]
    assert names[0] == OURS, bench.left_out
    assert {"sdpa-flash", FLEX, UNFUSED} <= set(names), bench.left_out
    for row in bench.rows:
        assert 0 < row.p20 <= row.ms <= row.p80
        assert row.error <= 1
        assert row.tflops == pytest.approx(problem.nominal_flops() / row.ms / 1e9)
    assert forward_of(problem).nominal_flops() * 5 == problem.nominal_flops() * 2
