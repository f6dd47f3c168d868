"""Tests of the arguments of backward kernels and of timed baselines."""

import functools

import msgspec
import pytest
import torch
from torch.nn.attention import SDPBackend

from flashtune import testing
from flashtune.core.kernel import Specialization, specialization_of
from flashtune.core.problem import Bias, Causal, Problem, score_bytes
from flashtune.core.target import find_target
from flashtune.launch.tensors import BackwardTensors
from flashtune.templates.registry import find_family
from flashtune.tuner.candidates import Candidate, contiguous_specialization
from flashtune.tuner.execution import sdpa, timed_runs
from flashtune.tuner.execution.inputs import Tensors, make_tensors
from flashtune.tuner.workloads.models import backward_of, forward_of, saving_lse, training_passes
from flashtune.tuner.workloads.shapes import parse_shape
from tests.problems.plain_masks import plain_attention
from tests.tuner.conftest import GpuMemory
from tests.tuner.execution.conftest import Binder

CPU = torch.device("cpu")
PROBLEM = testing.problem(
    "heads=4,kv_heads=2,seqlen_q=40,seqlen_kv=56,head_dim=16,value_head_dim=24,dtype=fp32,causal,batch=2,backward"
)
CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "full": {"causal": Causal.NONE},
    "rows that see nothing": {"seqlen_q": 70},
    "window": {"window_left": 9},
    "additive": {"bias": Bias.ADDITIVE},
    "alibi": {"alibi": True},
    "deterministic": {"deterministic": True},
    "packed": {"packed": 90, "seqlen_q": 56},
}


def backward(name: str) -> Problem:
    return msgspec.structs.replace(PROBLEM, **CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_backward_tensors_have_a_correct_output_and_empty_gradients(name: str) -> None:
    problem = backward(name)
    tensors = make_tensors(problem, CPU)
    inputs = tensors.backward
    assert inputs is not None
    out, lse = plain_attention(problem, tensors.q, tensors.k, tensors.v, tensors.side, tensors.scale)
    torch.testing.assert_close(inputs.out.double(), out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(inputs.lse.double(), lse, rtol=1e-4, atol=1e-5)
    assert inputs.lse.is_contiguous()
    for tensor, gradient in zip(inputs[:4], (inputs.dq, inputs.dk, inputs.dv, inputs.dout), strict=True):
        assert (gradient.shape, gradient.stride()) == (tensor.shape, tensor.stride())
    assert (inputs.dbias is not None) == (problem.bias is Bias.ADDITIVE)
    assert (inputs.dslopes is not None) == problem.alibi
    assert inputs.dlse is None


def test_forward_tensors_have_lse_only_if_needed() -> None:
    problem = forward_of(PROBLEM)
    assert make_tensors(problem, CPU).lse is None
    lse = make_tensors(problem, CPU, lse=True).lse
    assert lse is not None
    assert lse.shape == (2, 4, 40)
    assert make_tensors(problem, CPU).backward is None


def gradients(problem: Problem, tensors: Tensors) -> list[torch.Tensor]:
    """Gradients of a float64 computation by autograd, with those of a bias last."""
    inputs = tensors.backward
    assert inputs is not None
    leaves = [tensor.double().requires_grad_() for tensor in (tensors.q, tensors.k, tensors.v)]
    side = tensors.side
    if side.bias is not None:
        leaves.append(side.bias.double().requires_grad_())
        side = side._replace(bias=leaves[3])
    out, _ = plain_attention(problem, leaves[0], leaves[1], leaves[2], side, tensors.scale)
    return list(torch.autograd.grad(out, leaves, inputs.dout.double()))


@pytest.mark.parametrize("name", ["plain", "additive"])
@pytest.mark.usefixtures("backends")
def test_baselines_are_timed_without_their_forward_pass(name: str, gpu_memory: GpuMemory) -> None:
    problem = backward(name)
    room = timed_runs.GRADIENT_SCORE_COPIES * score_bytes(problem) / timed_runs.MEMORY_SHARE
    gpu_memory.free = room + 1
    tensors = make_tensors(problem, CPU)
    expected = gradients(problem, tensors)
    runs = dict(timed_runs.peer_runs(problem, tensors))
    assert list(runs) == ["sdpa-math", "unfused"]
    for run in runs.values():
        run()
        computed = run()
        assert isinstance(computed, tuple)
        for gradient, other in zip(computed, expected, strict=True):
            torch.testing.assert_close(gradient.double(), other, rtol=1e-3, atol=1e-4)


def test_unfused_gradients_are_timed_if_scores_fit(
    gpu_memory: GpuMemory, backends: dict[str, SDPBackend]
) -> None:
    gpu_memory.free = timed_runs.GRADIENT_SCORE_COPIES * score_bytes(PROBLEM) / timed_runs.MEMORY_SHARE
    backends.clear()
    assert list(timed_runs.peer_runs(PROBLEM, make_tensors(PROBLEM, CPU))) == []


def test_varlen_problems_have_no_baselines() -> None:
    packed = backward("packed")
    assert list(timed_runs.peer_runs(packed, make_tensors(packed, CPU))) == []


def test_gradients_of_dropout_use_the_mask_of_the_seed() -> None:
    problem = msgspec.structs.replace(PROBLEM, dropout=True)
    tensors = make_tensors(problem, CPU)
    assert tensors.backward is not None
    out, lse = plain_attention(problem, *tensors.backward[:3], tensors.side, tensors.scale)
    torch.testing.assert_close(tensors.backward.out.double(), out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tensors.backward.lse.double(), lse, rtol=1e-4, atol=1e-5)


def test_sdpa_uses_the_same_dropout_rate() -> None:
    problem = msgspec.structs.replace(forward_of(PROBLEM), dropout=True, seqlen_kv=40)
    tensors = make_tensors(problem, CPU)
    call = sdpa.sdpa_call(problem, tensors)
    assert isinstance(call, functools.partial)
    assert call.keywords["dropout_p"] == tensors.side.dropout == 0.1
    assert call.keywords["attn_mask"] is None


def test_backward_launch_receives_all_gradients(binder: Binder) -> None:
    tensors = make_tensors(PROBLEM, CPU)
    family, target = find_family("forward_q_outer"), find_target("h200")
    candidate = Candidate(family.name, family.default(forward_of(PROBLEM), target))
    timed_runs.kernel_run(PROBLEM, candidate, Specialization(), target, tensors)()
    assert binder.bound == [(None, target, tensors.backward, tensors.side)]
    assert isinstance(binder.launches[0][0], BackwardTensors)
    assert binder.launches == [(tensors.backward, tensors.scale, tensors.side)]


def test_training_lists_both_passes_of_each_problem_once() -> None:
    shape = "heads=4,seqlen=512,head_dim=64"
    (forward,) = parse_shape(shape)
    (reproducible,) = parse_shape(f"{shape},backward,deterministic")
    assert training_passes([forward]) == (forward, backward_of(forward))
    assert training_passes([backward_of(forward), forward]) == (forward, backward_of(forward))
    assert training_passes([reproducible]) == (forward, reproducible)
    assert forward_of(reproducible) == forward
    (other,) = parse_shape(f"{shape},causal")
    assert saving_lse([forward, other, reproducible]) == {forward}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_forward_kernel_that_a_search_compiles_ahead_is_that_of_the_gradients_inputs(
    changes: dict[str, object],
) -> None:
    problem = msgspec.structs.replace(PROBLEM, **changes)
    tensors = make_tensors(problem, CPU)
    inputs = (tensors.q, tensors.k, tensors.v, tensors.out)
    needed = specialization_of(inputs, lse=True, bias=tensors.side.bias)
    assert contiguous_specialization(forward_of(problem), lse=True) == needed
