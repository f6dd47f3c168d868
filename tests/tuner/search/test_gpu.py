"""Tests of the search and of bench on a GPU: verified winners, broken contexts, and gradients."""

import functools
import math
import time

import msgspec
import pytest
import torch

from flashtune.core.config import Axis, Space
from flashtune.core.kernel import Specialization
from flashtune.core.mask_sharing import MaskSharing
from flashtune.core.problem import Bias, Causal, Dtype
from flashtune.core.record import Outcome, Provenance
from flashtune.core.target import device_target
from flashtune.db.location import bundle_file
from flashtune.db.store import Store
from flashtune.launch.bundles import Bundles, bundled_kernel
from flashtune.templates.forward_q_outer.space import Loads, QOuterConfig
from flashtune.templates.registry import find_family
from flashtune.tuner.bench.bench import run_bench
from flashtune.tuner.bench.peer_runs import FLEX, UNFUSED
from flashtune.tuner.bench.results import OURS
from flashtune.tuner.candidates import Candidate, SearchTask, contiguous_specialization
from flashtune.tuner.execution import gpu_worker
from flashtune.tuner.execution.gpu_worker import GpuWorker
from flashtune.tuner.execution.inputs import make_tensors
from flashtune.tuner.execution.timed_runs import MORE_ROUNDS, kernel_run, peer_runs, run_finals
from flashtune.tuner.execution.timing import measure, measure_interleaved
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.executors.local import open_local
from flashtune.tuner.search.request import Budget, SearchRequest
from flashtune.tuner.workloads.models import backward_of, forward_of
from flashtune.verification.cases import Level
from flashtune.verification.check import check_kernel, check_rendered
from tests.tuner.search import fakes
from tests.tuner.search.fakes import FAMILY, a_config, a_problem

pytestmark = pytest.mark.gpu
WAIT = 600.0


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


def test_search_selects_a_verified_kernel_and_times_baselines(store: Store) -> None:
    problem = a_problem(
        dtype=Dtype.BF16, heads=16, kv_heads=8, seqlen_q=1024, seqlen_kv=1024, causal=Causal.TOP_LEFT
    )
    request = SearchRequest(problem=problem, target=device_target(0), device=0, budget=Budget(16, None, None))
    result = run_search(request, store)
    assert result.provenance is Provenance.MEASURED
    assert result.best is not None
    assert result.best.verdict is not None
    assert result.best.verdict.passed
    assert result.best.measurement is not None
    assert result.best.measurement.samples >= 20
    assert "sdpa-flash" in {peer.name for peer in result.best.measurement.peers}
    assert result.is_selected


def test_next_process_loads_the_machine_code_of_a_search(store: Store, device: torch.device) -> None:
    problem, target = a_problem(dtype=Dtype.BF16, seqlen_q=1024, seqlen_kv=1024), device_target(0)
    record = run_search(
        SearchRequest(problem=problem, target=target, device=0, budget=Budget(6, None, None)), store
    ).best
    assert record is not None
    assert record.config is not None
    bundles = Bundles(of_database=lambda arch: bundle_file(store.url, arch))
    located = bundles.find(record, record.specialization, target)
    assert located is not None
    binary = bundles.load(located, target, device)
    assert binary is not None
    kernel = bundled_kernel(located.entry, record, record.specialization)
    assert (kernel.source, kernel.digest) == ("", record.kernel)
    assert check_rendered(kernel, problem, record.config, target, device, compiled=binary).passed


def test_searches_on_all_gpus_have_times_of_one_gpu_each(store: Store) -> None:
    gpus = range(torch.cuda.device_count())
    uuids = {str(torch.cuda.get_device_properties(gpu).uuid) for gpu in gpus}
    requests = [
        SearchRequest(
            problem=a_problem(dtype=Dtype.BF16, seqlen_q=length, seqlen_kv=length),
            target=device_target(0),
            budget=Budget(6, None, None),
        )
        for length in range(512, 512 * (2 + len(gpus)), 512)
    ]
    with open_local(store, gpus) as executor:
        results = list(executor.run(requests, lambda progress: None))
    assert all(result.is_selected for result in results)
    used = set[str]()
    for request in requests:
        timed = [row.record.measurement for row in store.records(request.problem) if row.record.measurement]
        assert len({measurement.gpu_uuid for measurement in timed}) == 1
        assert all(300 < (measurement.clock_mhz or 0) < 4000 for measurement in timed)
        used |= {str(measurement.gpu_uuid) for measurement in timed}
    assert used == uuids


@pytest.mark.slow
@pytest.mark.alone
def test_search_of_one_shape_takes_less_than_a_minute(store: Store) -> None:
    problem = a_problem(
        dtype=Dtype.BF16,
        head_dim=128,
        value_head_dim=128,
        heads=16,
        kv_heads=16,
        batch=2,
        seqlen_q=8192,
        seqlen_kv=8192,
    )
    start = time.monotonic()
    result = run_search(SearchRequest(problem=problem, target=device_target(0), device=0), store)
    assert result.best is not None
    assert time.monotonic() - start < 60.0


@pytest.mark.slow
def test_space_of_known_bad_configs_selects_no_wrong_kernel(store: Store, device: torch.device) -> None:
    # Scores summed over chunks and carried by the loop are miscompiled by some Tritons.
    axes = (
        Axis("block_m", (64, 128)),
        Axis("block_n", (64, 128)),
        Axis("num_warps", (4, 8)),
        Axis("num_stages", (2, 3, 4)),
        Axis("loads", (Loads.DESCRIPTOR,), ordered=False),
        Axis("split_head_dim", (True,)),
        Axis("overlap_qk", (True,)),
    )
    problem = a_problem(dtype=Dtype.BF16, head_dim=96, value_head_dim=96, seqlen_q=1024, seqlen_kv=1024)
    target = device_target(0)
    request = SearchRequest(
        problem=problem,
        target=target,
        device=0,
        budget=Budget(100, None, None),
        spaces=((FAMILY, Space(QOuterConfig, axes)),),
    )
    result = run_search(request, store)
    assert result.counts.tried > 0
    accepted = [entry.record for entry in store.records() if entry.record.outcome is Outcome.OK]
    for record in accepted:
        assert record.config is not None
        family = find_family(record.family)
        verdict = check_kernel(
            family, problem, record.config, record.specialization, target, device, Level.STRICT
        )
        assert verdict.passed, record.config.label()


def a_scope() -> SearchTask:
    return SearchTask(a_problem(), device_target(0), Specialization(), ())


def test_broken_cuda_context_affects_one_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = Candidate(FAMILY, a_config())
    compiled = fakes.compiled(candidate)
    with GpuWorker(0, seconds=60.0) as gpu:
        with monkeypatch.context() as patch:
            patch.setattr(gpu_worker, "evaluate_candidate", fakes.break_context)
            broken = gpu.evaluate(a_scope(), candidate, compiled, None)
        after = gpu.evaluate(a_scope(), candidate, compiled, None)
        assert broken.result(WAIT).outcome is Outcome.LAUNCH_ERROR
        assert after.result(WAIT).outcome is Outcome.OK


def test_hanging_launch_is_timed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = Candidate(FAMILY, a_config())
    compiled = fakes.compiled(candidate)
    with GpuWorker(0, seconds=20.0) as gpu:
        with monkeypatch.context() as patch:
            patch.setattr(gpu_worker, "evaluate_candidate", fakes.hang_on_gpu)
            hung = gpu.evaluate(a_scope(), candidate, compiled, None)
        after = gpu.evaluate(a_scope(), candidate, compiled, None)
        assert hung.result(WAIT).outcome is Outcome.TIMEOUT
        assert after.result(WAIT).outcome is Outcome.OK


@pytest.mark.alone
def test_times_exclude_host_time(device: torch.device) -> None:
    x = torch.empty(64 * 2**20, dtype=torch.int8, device=device)
    measurement = measure(x.zero_, device)
    two = measure(lambda: (x.zero_(), x.zero_()), device)
    assert two.ms == pytest.approx(2 * measurement.ms, rel=0.5)
    assert measurement.p20 <= measurement.ms <= measurement.p80


def test_a_slow_launch_is_dropped_after_a_few_samples(device: torch.device) -> None:
    x = torch.empty(256 * 2**20, dtype=torch.int8, device=device)
    assert measure(x.zero_, device, drop_above_ms=1e-6).samples == 3
    assert measure(x.zero_, device, drop_above_ms=math.inf).samples > 3


@pytest.mark.alone
def test_interleaved_runs_have_separate_times(device: torch.device) -> None:
    small, large = (torch.empty(size * 2**20, dtype=torch.int8, device=device) for size in (64, 512))
    first, second = measure_interleaved([small.zero_, large.zero_], device, rounds=9)
    assert first.samples == second.samples == 9
    assert first.ms < second.ms


@pytest.mark.parametrize(
    ("causal", "lengths"),
    [(Causal.NONE, (256, 256)), (Causal.BOTTOM_RIGHT, (256, 256)), (Causal.BOTTOM_RIGHT, (128, 384))],
)
def test_baselines_compute_the_same_problem(
    device: torch.device, causal: Causal, lengths: tuple[int, int]
) -> None:
    problem = a_problem(causal=causal, seqlen_q=lengths[0], seqlen_kv=lengths[1])
    tensors = make_tensors(problem, device)
    outputs = {}
    for name, run in peer_runs(problem, tensors):
        output = run()
        first = output[0] if isinstance(output, tuple) else output
        assert isinstance(first, torch.Tensor)
        outputs[name] = first.float()
    assert "unfused" in outputs
    assert len(outputs) >= 2
    for name, output in outputs.items():
        assert torch.allclose(output, outputs["unfused"], atol=2e-2), name


def test_final_measurement_times_candidates_and_baselines(device: torch.device) -> None:
    problem = a_problem(seqlen_q=1024, seqlen_kv=1024)
    candidates = (Candidate(FAMILY, a_config()), Candidate(FAMILY, a_config(block_m=128)))
    run = functools.partial(run_finals, problem, candidates, Specialization(), device_target(0), device)
    measured = run(rounds=5)
    # They run on where they are close.
    assert [measurement.samples for measurement in measured] in ([5, 5], [5 * MORE_ROUNDS] * 2)
    assert measured[0].peers == measured[1].peers
    assert {"unfused", "sdpa-flash"} <= {peer.name for peer in measured[0].peers}


def test_final_measurement_times_shared_masks_and_sdpa(device: torch.device) -> None:
    problem = a_problem(batch=2, bias=Bias.BOOLEAN)
    family, target = find_family("forward_masked"), device_target(0)
    candidate = Candidate(family.name, family.default(problem, target))
    (measured,) = run_finals(problem, (candidate,), Specialization(), target, device, rounds=5)
    assert measured.shared
    assert [shared_time.sharing for shared_time in measured.shared] == list(MaskSharing)
    assert all(shared_time.ms > 0 and shared_time.peers for shared_time in measured.shared)


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
