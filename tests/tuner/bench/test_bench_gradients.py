"""Tests of gradients in `flashtune bench`: only correct ones are timed."""

import math
import sys

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import flashtune
from flashtune import testing
from flashtune.core.errors import UsageError
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.tuner.bench import flex, peer_runs
from flashtune.tuner.bench.admission import Admitted, admit
from flashtune.tuner.bench.backward import gradient_binders, gradient_judge
from flashtune.tuner.bench.bench import require_work
from flashtune.tuner.bench.driver import report_of
from flashtune.tuner.bench.flash_attn_4 import FLASH_ATTN_4
from flashtune.tuner.bench.grids import case_of, grid_problems
from flashtune.tuner.bench.peer_runs import FLEX, UNFUSED
from flashtune.tuner.bench.results import OURS, LeftOut
from flashtune.tuner.cli.commands.bench import GRIDS
from flashtune.tuner.cli.report.bench_markdown import markdown
from flashtune.tuner.cli.report.bench_terminal import title_of
from flashtune.tuner.execution.inputs import Tensors, make_tensors
from flashtune.tuner.workloads.work import Unit, unit_of
from tests.support.unfused import unfused
from tests.tuner.bench.bench_fakes import a_bench, a_run
from tests.tuner.bench.bench_problems import FakeFlashAttention4
from tests.tuner.conftest import GpuMemory

CPU = torch.device("cpu")
PROBLEM = testing.problem(
    "heads=4,kv_heads=2,seqlen_q=70,seqlen_kv=90,head_dim=16,dtype=fp32,causal,batch=2,backward"
)
MATH = "sdpa-math"


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The further options of each call of flashtune, which a fake computes."""
    noted: list[dict[str, object]] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: str, prefer: str, **options: object) -> Tensor:
        assert prefer == "generated"
        noted.append(options)
        return unfused(q, k, v, scale=q.shape[-1] ** -0.5, causal=Causal(causal))[0]

    monkeypatch.setattr(flashtune, "attention", attention)
    return noted


@pytest.fixture
def peers(
    monkeypatch: pytest.MonkeyPatch,
    gpu_memory: GpuMemory,
    backends: dict[str, SDPBackend],
    options: list[dict[str, object]],
) -> tuple[str, ...]:
    """Baselines that compute on the CPU, and a fake of flashtune's kernels."""
    monkeypatch.setitem(peer_runs.PEER_DTYPES, MATH, (Dtype.FP32,))
    monkeypatch.setitem(peer_runs.PEER_FEATURES, MATH, frozenset())
    return MATH, UNFUSED


def entries(problem: Problem, tensors: Tensors, peers: tuple[str, ...]) -> list[Admitted | LeftOut]:
    binders = gradient_binders(problem, tensors, "a kernel", peers)
    return admit(binders, gradient_judge(problem, tensors), lambda run: run)


def test_correct_gradients_are_accepted(peers: tuple[str, ...], options: list[dict[str, object]]) -> None:
    results = entries(PROBLEM, make_tensors(PROBLEM, CPU), peers)
    assert options == [{}]
    admitted = [entry for entry in results if isinstance(entry, Admitted)]
    assert [entry.contestant.name for entry in admitted] == [OURS, *peers]
    for entry in admitted:
        assert 0 < entry.error <= 1
        gradients = entry.replay()
        assert isinstance(gradients, tuple)
        assert [gradient.shape for gradient in gradients] == [(2, 4, 70, 16), (2, 2, 90, 16), (2, 2, 90, 16)]


@pytest.mark.parametrize("value", [math.nan, math.inf, 3.0])
def test_one_wrong_element_of_a_gradient_rejects_it(value: float) -> None:
    tensors = make_tensors(PROBLEM, CPU)
    judge = gradient_judge(PROBLEM, tensors)
    leaves = [tensor.clone().requires_grad_() for tensor in (tensors.q, tensors.k, tensors.v)]
    out, _ = unfused(*leaves, scale=tensors.scale, causal=PROBLEM.causal)
    assert tensors.backward is not None
    gradients = torch.autograd.grad(out, leaves, tensors.backward.dout)
    assert judge(gradients) <= 1
    for index in range(3):
        wrong = [gradient.clone() for gradient in gradients]
        wrong[index][1, -1, -1, -1] = value
        assert not judge(tuple(wrong)) <= 1


def test_deterministic_gradients_are_compared_with_usual_baselines(
    peers: tuple[str, ...], options: list[dict[str, object]]
) -> None:
    problem = msgspec.structs.replace(PROBLEM, deterministic=True)
    require_work(problem)
    results = entries(problem, make_tensors(problem, CPU), peers)
    assert all(isinstance(entry, Admitted) for entry in results)
    assert options == [{"deterministic": True}]
    with pytest.raises(UsageError, match="drop other probabilities"):
        require_work(msgspec.structs.replace(problem, dropout=True))


def test_implementation_that_cannot_be_timed_has_a_reason(peers: tuple[str, ...]) -> None:
    (ours, other) = entries(PROBLEM, make_tensors(PROBLEM, CPU), (FLASH_ATTN_4,))
    assert isinstance(ours, Admitted)
    assert isinstance(other, LeftOut)
    assert other.message == "it does not take fp32"


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_flash_attn_4_are_judged_in_its_own_layout(
    peers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    problem = msgspec.structs.replace(PROBLEM, packed=100, seqlen_kv=70) if packed else PROBLEM
    monkeypatch.setitem(peer_runs.PEER_DTYPES, FLASH_ATTN_4, (Dtype.FP32,))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", FakeFlashAttention4(problem))
    tensors = make_tensors(problem, CPU)
    binders = gradient_binders(problem, tensors, "", (FLASH_ATTN_4,))
    judge = gradient_judge(problem, tensors)
    run = binders[FLASH_ATTN_4]().run
    assert 0 < judge(run()) <= 1
    assert 0 < judge(run()) <= 1, "the backward pass runs repeatedly"
    gradients = run()
    assert isinstance(gradients, tuple)
    assert not judge((*gradients[:2], gradients[2].flip(1))) <= 1


def test_flex_attention_supports_repeated_backward_passes(
    peers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._functorch.config as compiling

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)

    def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, **options: object) -> Tensor:
        return unfused(q, k, v, scale=scale, causal=PROBLEM.causal)[0]

    # The real one has no backward pass on the CPU.
    monkeypatch.setattr(flex, "flex_attention", attend)
    # A setting that monkeypatch put back would be gone for all later tests.
    with compiling.patch(donated_buffer=True):
        (_, entry) = entries(PROBLEM, make_tensors(PROBLEM, CPU), (FLEX,))
        assert compiling.donated_buffer is False
    assert isinstance(entry, Admitted), entry


def test_backward_grid_and_its_units() -> None:
    problems = grid_problems("backward")
    assert "backward" in GRIDS
    assert len(problems) == 3 * 2 * 2
    assert all(problem.is_backward for problem in problems)
    assert {problem.batch * problem.seqlen_q for problem in problems} == {16_384}
    names = [case_of(problem) for problem in problems]
    assert names[0] == "bwd d64 full s2048"
    assert len(set(names)) == 12
    assert title_of(problems[0]).startswith("backward, bf16, head dim 64")
    one_query = msgspec.structs.replace(problems[0], seqlen_q=1)
    assert unit_of(one_query) is Unit.TFLOPS


def test_report_explains_flops_of_gradients() -> None:
    backward, forward = grid_problems("backward")[0], grid_problems("paper")[0]
    counted = "Gradients count 2.5 times as many"
    assert counted in markdown(report_of(a_run(a_bench(backward)), None))
    assert counted not in markdown(report_of(a_run(a_bench(forward)), None))
