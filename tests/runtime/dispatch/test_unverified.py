"""Tests of verification status: unverified kernels are checked before they serve."""

import warnings

import msgspec
import pytest
import torch

import flashtune
from flashtune.core.errors import KernelError, VerificationError
from flashtune.core.notices import FlashtuneWarning, search_command
from flashtune.core.problem import Problem
from flashtune.request.call import dense_call
from flashtune.runtime.op_library import operands
from flashtune.tuner.workloads.shapes import parse_shape
from tests.support.machine import PROBLEM, Machine, expected, inputs, tuned
from tests.support.records import make_record


def test_timed_kernel_serves_without_check_or_warning(machine: Machine) -> None:
    record = make_record(PROBLEM, peers={"sdpa-cudnn": 2.0})
    tuned(machine, record)
    q, k, v = inputs(PROBLEM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = flashtune.attention(q, k, v, causal=True)
        again = flashtune.attention(q, k, v, causal=True)
    torch.testing.assert_close(out, expected(q, k, v))
    assert torch.equal(out, again)
    assert [kernel.digest for kernel in machine.kernels] == [record.kernel]
    assert (machine.checked, machine.launches) == ([], 2)
    assert machine.steps == ["compile"]


def test_preload_runs_while_an_unverified_kernel_compiles(machine: Machine) -> None:
    q, k, v = inputs(PROBLEM)
    with pytest.warns(FlashtuneWarning):
        flashtune.attention(q, k, v, causal=True)
    assert machine.steps == ["preload", "compile", "end", "check"]


def test_untuned_shapes_warn_once_with_the_search_command(machine: Machine) -> None:
    q, k, v = inputs(PROBLEM)
    with pytest.warns(FlashtuneWarning) as told:
        flashtune.attention(q, k, v, causal=True)
    shape = "heads=8,kv_heads=2,seqlen=512,head_dim=64,dtype=bf16,causal,batch=2"
    assert str(told[0].message).endswith(f'run flashtune search --shape "{shape}"')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flashtune.attention(q[:, :, :100], k, v, causal=True)
    assert len(machine.checked) == 2


def test_search_command_round_trips_the_problem() -> None:
    for changes in ({}, {"causal": "top_left"}, {"causal": "none", "seqlen_kv": 700}, {"value_head_dim": 32}):
        fields = msgspec.to_builtins(PROBLEM) | changes
        posed = msgspec.convert(fields, Problem)
        shape = search_command(posed).split('"')[1]
        assert parse_shape(shape) == (posed,)


def test_a_wrong_kernel_never_serves(machine: Machine) -> None:
    machine.right = False
    q, k, v = inputs(PROBLEM)
    with pytest.warns(FlashtuneWarning, match=r"self-check on nvidia-h200 \(rows 7 of .*\), so torch's SDPA"):
        out = flashtune.attention(q, k, v, causal=True)
    torch.testing.assert_close(out, expected(q, k, v), atol=2e-2, rtol=2e-2)
    with pytest.raises(VerificationError, match="failed its self-check"):
        flashtune.attention(q, k[:, :, :100], v[:, :, :100], causal=True, prefer="generated")
    out, lse = flashtune.attention(q, k, v, causal=True, return_lse=True)
    assert lse.shape == q.shape[:3]
    assert machine.launches == 0


def test_failure_is_warned_once_per_process(machine: Machine) -> None:
    machine.right = False
    q, k, v = inputs(PROBLEM)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        outs = [flashtune.attention(q[:, :, :length], k, v, causal=True) for length in (512, 500, 300)]
    for out in outs:
        reference = expected(q[:, :, : out.shape[2]], k, v)
        torch.testing.assert_close(out, reference, atol=2e-2, rtol=2e-2)
    ours = [str(warning.message) for warning in told if warning.category is FlashtuneWarning]
    assert len(ours) == 1
    assert "self-check" in ours[0]


def test_nothing_is_checked_during_a_capture(machine: Machine) -> None:
    q, k, v = inputs(PROBLEM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planned = flashtune.plan(q, k, v, causal=True)
    checked = len(machine.checked)
    assert checked == 1, "the plan has checked before"
    machine.capturing = True
    torch.testing.assert_close(planned(q, k, v), expected(q, k, v))
    for prefer in ("fastest", "generated"):
        with pytest.raises(KernelError, match=r"flashtune\.plan"):
            flashtune.attention(q[:, :, :99], k, v, causal=True, prefer=prefer)
    assert len(machine.checked) == checked
    machine.capturing = False
    flashtune.attention(q[:, :, :99], k, v, causal=True)
    assert len(machine.checked) == checked + 1


@pytest.mark.filterwarnings("ignore::flashtune.FlashtuneWarning")
def test_calls_with_other_addresses_are_known_during_a_capture(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilers copy tensors before they capture a graph."""
    aligned = inputs(PROBLEM)
    shifted = [
        torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape) for tensor in aligned
    ]
    for operand, other in zip(shifted, aligned, strict=True):
        operand.copy_(other)
        assert operand.data_ptr() % 16
    bias = torch.zeros(1, 1, PROBLEM.seqlen_q, PROBLEM.seqlen_kv + 8, dtype=aligned[0].dtype)
    odd, even = bias[..., 1 : PROBLEM.seqlen_kv + 1], bias[..., 8:]
    assert odd.stride() == even.stride()

    flashtune.attention(*shifted, causal=True)
    flashtune.attention(*shifted, attn_bias=odd)
    machine.capturing = True
    torch.testing.assert_close(
        flashtune.attention(*aligned, causal=True), expected(*aligned), atol=2e-2, rtol=2e-2
    )
    want = expected(*aligned, causal="none")
    for operand in (odd, even):
        out = flashtune.attention(*aligned, attn_bias=operand)
        torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)
    with pytest.raises(KernelError, match="being captured"):
        flashtune.attention(*aligned, causal=False)
    machine.capturing = False
    flashtune.attention(*aligned, causal=False)
    machine.capturing = True
    with pytest.raises(KernelError, match="being captured"):
        flashtune.attention(*shifted, causal=False)


@pytest.mark.filterwarnings("ignore::flashtune.FlashtuneWarning")
def test_gradients_of_other_addresses_are_known_during_a_capture(machine: Machine) -> None:
    """Also at the operator of the backward pass, which compiled programs call."""
    aligned = inputs(PROBLEM)
    shifted = [
        torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape) for tensor in aligned
    ]
    for operand, other in zip(shifted, aligned, strict=True):
        operand.copy_(other)
    out, lse = flashtune.attention(*aligned, causal=True, return_lse=True)
    launches: list[tuple[torch.Tensor, ...]] = []
    machine.launch = lambda *_, **options: lambda values, *scale: launches.append(values)

    def run_backward(*tensors: torch.Tensor) -> None:
        call = dense_call(*tensors, causal=True, return_lse=True)
        torch.ops.flashtune.attention_backward(torch.ones_like(out), None, out, lse, *operands(call))

    run_backward(*shifted)
    machine.capturing = True
    run_backward(*aligned)
    assert len(launches) == 2


@pytest.mark.filterwarnings("ignore::flashtune.FlashtuneWarning")
def test_calls_of_other_lengths_share_a_rendered_kernel(machine: Machine) -> None:
    q, k, v = inputs(PROBLEM)
    for length in (PROBLEM.seqlen_q, PROBLEM.seqlen_q - 1):
        flashtune.attention(q[:, :, :length], k, v, causal=True, prefer="generated")
    first, second = machine.kernels
    assert first is second


def test_kernel_that_does_not_compile_is_replaced(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM))
    machine.compiles = False
    q, k, v = inputs(PROBLEM)
    with pytest.warns(FlashtuneWarning, match=r"out of registers, so torch's SDPA serves: run flash"):
        out = flashtune.attention(q, k, v, causal=True)
    torch.testing.assert_close(out, expected(q, k, v), atol=2e-2, rtol=2e-2)
    with pytest.raises(KernelError, match="out of registers"):
        flashtune.attention(q, k[:, :, :511], v[:, :, :511], causal=True, prefer="generated")
