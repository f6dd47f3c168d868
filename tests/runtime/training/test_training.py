"""Tests of the backends of both passes of a call with gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtune
from flashtune import testing
from flashtune.core.errors import ProblemError, VerificationError
from flashtune.core.features.records import NO_EXTRA_INPUTS
from flashtune.core.kernel import Specialization
from flashtune.core.layouts import Layout
from flashtune.core.notices import FlashtuneWarning
from flashtune.core.target import find_target
from flashtune.dispatch.bound_request import BoundRequest
from flashtune.request.call import dense_call
from flashtune.request.gradients import BackwardInputs, Gradients
from flashtune.runtime import prepare
from flashtune.runtime.autograd import with_side
from flashtune.runtime.kernel_loader import KernelLoader
from flashtune.runtime.session import SESSION
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from tests.runtime.training.training_calls import (
    backward_record,
    close,
    gradients,
    leaves,
    quiet,
    right,
)
from tests.support.machine import PROBLEM, Machine, tuned
from tests.support.records import make_record
from tests.support.values import present


@pytest.mark.slow
@quiet
def test_first_forward_pass_prepares_both_passes(machine: Machine) -> None:
    q, k, v = leaves(PROBLEM)
    out = flashtune.attention(q, k, v, causal=True)
    assert [kernel.family.split("_")[0] for kernel in machine.kernels] == ["forward", "backward"]
    assert machine.checked == machine.kernels
    assert machine.started == [(kernel, 0) for kernel in machine.kernels], "both are compiled at once"
    assert machine.backward_launches == 0
    close(torch.autograd.grad(out.square().sum(), (q, k, v)), right(q, k, v))
    gradients(PROBLEM, q, k, v)
    assert len(machine.kernels) == 2, "what was met before is bound"
    assert (machine.launches, machine.backward_launches) == (2, 2)


@quiet
def test_sdpa_serves_both_passes_where_kernels_fail(machine: Machine) -> None:
    machine.right = False
    q, k, v = leaves(PROBLEM)
    with pytest.warns(
        FlashtuneWarning, match=r"failed its self-check .* torch's SDPA \(in both passes\) serves"
    ):
        close(gradients(PROBLEM, q, k, v), right(q, k, v))
    assert (machine.launches, machine.backward_launches) == (0, 0)
    with pytest.raises(VerificationError, match="failed its self-check"):
        gradients(PROBLEM, q, k, v, prefer="generated")


@pytest.mark.parametrize("seqlen", [0, 8])
def test_backward_operators_refuse_tensors_on_the_cpu(seqlen: int) -> None:
    q = torch.zeros(1, 2, seqlen, 16, requires_grad=True)
    with pytest.raises(ProblemError, match="the tensors are on cpu: move them to a GPU"):
        prepare.prepare_alone(BoundRequest.of(dense_call(q, q, q)), KernelLoader())


@pytest.mark.parametrize("failing", ["forward", "backward"])
def test_explain_reports_the_baseline_of_both_passes_if_one_kernel_failed(
    machine: Machine, failing: str
) -> None:
    machine.judge = lambda kernel: not kernel.family.startswith(failing)
    explanation = flashtune.explain(*leaves(PROBLEM), causal=True)
    assert explanation.backward is not None
    assert (explanation.backend, explanation.backward.backend) == ("sdpa", "sdpa")
    assert (
        explanation.reason
        == explanation.backward.reason
        == "the selected kernel failed its self-check here (rows 7 of 1 allowed)"
    )
    assert explanation.server == explanation.backend


def test_backend_with_the_faster_sum_serves_both_passes(machine: Machine) -> None:
    q, k, v = leaves(PROBLEM, torch.bfloat16)

    def backends(forward: float, backward: float) -> tuple[str, str]:
        SESSION.forget()
        tuned(
            machine,
            make_record(PROBLEM, ms=1.0, peers={"sdpa-cudnn": forward}),
            backward_record(PROBLEM, 3.0, {"sdpa-cudnn": backward}),
        )
        told = flashtune.explain(q, k, v, causal=True)
        assert flashtune.explain(q, k, v, causal=True, prefer="generated").backend == "generated"
        assert flashtune.explain(q, k, v, causal=True, return_lse=True).backend == "generated"
        return told.backend, present(told.backward).backend

    assert backends(0.5, 3.4) == ("sdpa", "sdpa")
    assert backends(0.5, 3.6) == ("generated", "generated"), "the slower pass outweighs the faster one"
    assert backends(1.5, 2.53) == ("sdpa", "sdpa"), "the kernels gain no more than noise"
    assert backends(1.5, 2.55) == ("generated", "generated")
    machine.usual = None
    assert backends(0.1, 0.1) == ("generated", "generated")


@pytest.mark.slow
def test_compile_traces_operators_of_the_backend_of_both_passes(machine: Machine) -> None:
    peers = {"sdpa-cudnn": 0.5}
    tuned(machine, make_record(PROBLEM, peers=peers), backward_record(PROBLEM, 1.0, peers))
    torch._dynamo.reset()

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtune.attention(q, k, v, causal=True).float().square().sum()

    q, k, v = leaves(PROBLEM, torch.bfloat16)
    compiled = torch.autograd.grad(
        torch.compile(loss, backend="aot_eager", fullgraph=True)(q, k, v), (q, k, v)
    )
    wanted = torch.autograd.grad(loss(q, k, v), (q, k, v))
    for gradient, other in zip(compiled, wanted, strict=True):
        torch.testing.assert_close(gradient, other)
    assert (machine.launches, machine.backward_launches, machine.kernels) == (0, 0, [])


@quiet
@pytest.mark.parametrize("is_compiled", [False, True])
def test_kernels_compute_masks_that_sdpa_refuses_or_compilers_trace(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, is_compiled: bool
) -> None:
    machine.is_untrusted = True
    monkeypatch.setattr(prepare, "masked_sdpa_executor", lambda *_: None)
    machine.usual = "sdpa-efficient"
    mask = torch.ones(PROBLEM.batch, 1, PROBLEM.seqlen_q, PROBLEM.seqlen_kv, dtype=torch.bool)
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtune.attention(q, k, v, attn_mask=mask, causal=True)

    attend = torch.compile(attend, backend="aot_eager", fullgraph=True) if is_compiled else attend
    attend(*leaves(PROBLEM))
    assert machine.launches == 1


@quiet
def test_explain_describes_both_passes(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM), backward_record(PROBLEM, 3.0))
    q, k, v = leaves(PROBLEM, torch.bfloat16)
    told = flashtune.explain(q, k, v, causal=True)
    assert told.backward is not None
    assert (told.problem.direction, told.backward.problem.direction) == ("forward", "backward")
    assert told.standing == "unproven", "with the log-sum-exp it is another kernel"
    lines = str(told).splitlines()
    heads = [line for line in lines if not line.startswith(" ")]
    assert heads == [
        f"{told.problem.key} on nvidia-h200: generated",
        f"{told.backward.problem.key} on nvidia-h200: generated",
    ]
    assert "backward_split" in str(told)
    assert flashtune.explain(q.detach(), k.detach(), v.detach(), causal=True).backward is None
    assert (machine.launches, machine.kernels, machine.checked) == (0, [], [])


@pytest.mark.slow
@quiet
def test_deterministic_gradients_are_a_separate_problem(machine: Machine) -> None:
    q, k, v = leaves(PROBLEM)

    def asked(**options: Any) -> bool:
        told = flashtune.explain(q, k, v, causal=True, **options)
        assert not told.problem.deterministic
        return present(told.backward).problem.deterministic

    assert not asked()
    assert asked(deterministic=True)
    assert asked(deterministic=True, window=(100, 0))
    gradients(PROBLEM, q, k, v)
    try:
        torch.use_deterministic_algorithms(True)
        assert asked()
        close(gradients(PROBLEM, q, k, v), right(q, k, v))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(SESSION.executors) == 2
    with torch.no_grad():
        flashtune.attention(q, k, v, deterministic=True)
        flashtune.attention(q, k, v)
    assert len(SESSION.executors) == 3, "of no meaning where nobody goes back"


@pytest.mark.slow
@quiet
def test_plans_prepare_both_passes(machine: Machine) -> None:
    q, k, v = leaves(PROBLEM)
    past = q * 1.0
    planned = flashtune.plan(past, k, v, causal=True)
    assert machine.backward_launches == 1
    assert q.grad is None
    count = len(machine.kernels)
    close(torch.autograd.grad(planned(past, k, v).square().sum(), (q, k, v)), right(q, k, v))
    assert len(machine.kernels) == count
    with pytest.raises(ProblemError, match="differ from the planned ones"):
        planned(q.detach(), k.detach(), v.detach())


def test_unsupported_gradients_are_reported(machine: Machine) -> None:
    q, k, v = leaves(PROBLEM)
    cache = k.detach().to(torch.int8), v.detach().to(torch.int8)
    scale = torch.ones(1)
    with pytest.raises(ProblemError, match=r"no kernel family computes backward_.*leave out quantized_kv"):
        flashtune.attention(q, *cache, k_scale=scale, v_scale=scale, prefer="generated")
    with pytest.warns(FlashtuneWarning, match="so the unfused computation serves both passes"):
        flashtune.attention(q, *cache, k_scale=scale, v_scale=scale).sum().backward()
    assert q.grad is not None
    scale.requires_grad_()
    with pytest.raises(
        ProblemError, match="computes the gradient of k_scale, which requires grad: detach it"
    ):
        flashtune.attention(q, *cache, k_scale=scale, v_scale=torch.ones(1), prefer="generated")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"window": (3, 0)}, {"return_lse": True}])
def test_float64_uses_unfused_attention(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, heads, 4, 6, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))

    def attend(*tensors: Tensor) -> Any:
        return flashtune.attention(*tensors, causal=True, **options)

    told = flashtune.explain(q, k, v, causal=True, **options)
    assert (told.backend, told.reason) == ("unfused", "no kernel takes float64")
    result = attend(q, k, v)
    results = result if isinstance(result, tuple) else (result,)
    assert {tensor.dtype for tensor in results} == {torch.float64}
    assert torch.autograd.gradcheck(attend, (q, k, v))
    assert torch.autograd.gradgradcheck(attend, (q, k, v))
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), result)
    with torch.no_grad():
        torch.testing.assert_close(attend(q, k, v), result)
    with pytest.raises(ProblemError, match="prefer='fastest' to use the unfused computation"):
        flashtune.attention(q, k, v, prefer="generated", **options)


TENSORS = [torch.randn(2, 3, 5, 8) for _ in range(5)]


@pytest.mark.parametrize("wanted", [(), ("sinks",)])
@pytest.mark.parametrize("from_kernel", [False, True])
def test_gradients_of_sinks_are_summed_over_sequences(wanted: tuple[str, ...], from_kernel: bool) -> None:
    q, k, v, out, dout = TENSORS
    lse, sinks = torch.randn(2, 3, 5), torch.randn(3)
    by_sequence = -(torch.exp(sinks[:, None] - lse) * (out * dout).sum(-1)).sum(-1)

    def backward(_: BackwardInputs) -> Gradients:
        return Gradients(q, k, v, by_sequence if from_kernel else None)

    run = with_side(backward, Layout.BHSD, wanted)
    gradient = run(
        BackwardInputs(q, k, v, out, lse, dout, None, None, NO_EXTRA_INPUTS._replace(sinks=sinks))
    ).dsinks
    if not wanted:
        assert gradient is None
        return
    torch.testing.assert_close(present(gradient), by_sequence.sum(0))


@pytest.mark.parametrize(("family", "writes"), [("backward_hopper", True), ("backward_split", False)])
def test_hopper_kernels_write_gradients_of_sinks(family: str, writes: bool) -> None:
    problem = testing.problem("heads=2,kv_heads=1,seqlen=8,head_dim=64,dtype=bf16,backward", sinks=True)
    hopper = find_family(family)
    kernel = render(hopper, problem, hopper.default(problem, find_target("h200")), Specialization())
    assert kernel.writes("dsinks") is writes
