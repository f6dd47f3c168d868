"""Tests of executors and the call cache, with launches that only record their arguments."""

import math
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

import flashtune
from flashtune.core.errors import ProblemError
from flashtune.core.kernel import Alignment, Kernel, Specialization
from flashtune.dispatch.bound_request import BoundRequest
from flashtune.launch import workspaces
from flashtune.launch.compiler_process import CompilerProcess
from flashtune.launch.kernel_cache import kernel_of
from flashtune.request.call import dense_call
from flashtune.runtime import executors
from flashtune.runtime.call_cache import run_call, write_call
from flashtune.runtime.session import SESSION
from tests.support.machine import PROBLEM, TARGET, Machine, expected, inputs, tuned
from tests.support.records import make_record


def test_bshd_layout_is_passed_as_strides(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM))
    q, k, v = inputs(PROBLEM)
    moved = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    out, lse = flashtune.attention(*moved, causal=True, layout="bshd", return_lse=True)
    assert out.is_contiguous()
    torch.testing.assert_close(out.transpose(1, 2), expected(q, k, v))
    assert lse.shape == q.shape[:3]


def test_a_negative_scale_negates_the_queries(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM))
    q, k, v = inputs(PROBLEM)
    for scale in (-0.3, 0.3):
        out = flashtune.attention(q, k, v, causal=True, scale=scale)
        torch.testing.assert_close(out, expected(q, k, v, scale=scale))
    planned = flashtune.plan(q, k, v, causal=True, scale=-0.3)
    torch.testing.assert_close(planned(q, k, v), expected(q, k, v, scale=-0.3))


@pytest.mark.parametrize("kind", ["same", "strided", "unaligned", "wider"])
def test_outputs_are_written_to_a_tensor_of_the_caller(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    tuned(machine, make_record(PROBLEM))
    q, k, v = inputs(PROBLEM)
    memory = torch.zeros(2 * q.numel(), dtype=q.dtype)
    out = {
        "same": memory[: q.numel()].view(q.shape),
        "strided": memory.view(*q.shape, 2)[..., 0],
        "unaligned": memory[1 : 1 + q.numel()].view(q.shape),
        "wider": torch.zeros(q.shape),
    }[kind]
    call = dense_call(q, k, v, causal=True, scale=-0.3)
    run_call(call)
    allocated: list[object] = []
    allocate = workspaces.allocator
    SESSION.forget()

    def counting(like: torch.Tensor, device: torch.device) -> Callable[[], torch.Tensor]:
        new = allocate(like, device)
        return lambda: allocated.append(like) or new()  # type: ignore[func-returns-value]

    monkeypatch.setattr(executors, "allocator", counting)
    for _ in range(2):
        out.zero_()
        write_call(out, call)
        torch.testing.assert_close(out.to(q.dtype), expected(q, k, v, scale=-0.3))
    assert len(allocated) == (0 if kind == "same" else 2)


def test_outputs_of_baselines_are_copied(machine: Machine) -> None:
    q, k, v = (tensor.double() for tensor in inputs(PROBLEM))
    out = torch.zeros_like(q)
    write_call(out, dense_call(q, k, v, causal=True))
    torch.testing.assert_close(out, flashtune.attention(q, k, v, causal=True))
    assert not machine.launches


def test_plan_with_negative_scale_keeps_strides_of_views(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM))
    q, k, v = inputs(PROBLEM)
    # Negated, a view with gaps lies without: its strides are others than the call's.
    gaps = torch.stack([q, -q], 3)[:, :, :, 0]
    planned = flashtune.plan(gaps, k, v, causal=True, scale=-0.3)
    torch.testing.assert_close(planned(gaps, k, v), expected(q, k, v, scale=-0.3))


def test_executors_are_cached_by_alignment(machine: Machine, copy_ms: Callable[[float], None]) -> None:
    copy_ms(math.inf)
    tuned(machine, make_record(PROBLEM))
    q, k, v = inputs(PROBLEM)
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    strided = torch.empty(*q.shape[:3], q.shape[3] + 3, dtype=q.dtype)[..., : q.shape[3]].copy_(q)
    for view in (q, shifted, strided):
        torch.testing.assert_close(flashtune.attention(view, k, v, causal=True), expected(q, k, v))
    alignments = [kernel.specialization.alignment for kernel in machine.kernels]
    assert alignments == [Alignment.SIXTEEN, Alignment.ANY, Alignment.ANY]
    assert len(machine.checked) == 2, "what the receipt does not cover is checked"


def test_large_strides_need_64_bit_indices() -> None:
    q = torch.empty_strided((2, 8, 512, 64), (2**31, 2**15, 64, 1), device="meta", dtype=torch.bfloat16)
    k = q[:, :2]
    bound = BoundRequest.of(dense_call(q, k, k, causal=True))
    assert bound.forward_properties == Specialization(Alignment.SIXTEEN, 64, False)


def test_fastest_backend_serves_unless_generated_is_preferred(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM, ms=1.0, peers={"sdpa-cudnn": 0.5}))
    q, k, v = inputs(PROBLEM)
    flashtune.attention(q, k, v, causal=True)
    assert machine.launches == 0
    flashtune.attention(q, k, v, causal=True, prefer="generated")
    flashtune.attention(q, k, v, causal=True, return_lse=True)
    assert machine.launches == 2
    assert flashtune.explain(q, k, v, causal=True).backend == "sdpa"


def test_unfused_attention_may_serve_short_sequences(machine: Machine) -> None:
    machine.usual = None
    tuned(machine, make_record(PROBLEM, ms=1.0, peers={"unfused": 0.5}))
    q, k, v = inputs(PROBLEM)
    assert flashtune.explain(q, k, v, causal=True).backend == "unfused"
    torch.testing.assert_close(flashtune.attention(q, k, v, causal=True), expected(q, k, v))
    assert machine.launches == 0


@pytest.mark.parametrize("axis", ["batch", "seqlen_q", "seqlen_kv"])
def test_empty_problems_never_launch(machine: Machine, axis: str) -> None:
    q, k, v = inputs(msgspec.structs.replace(PROBLEM, **{axis: 0}))
    out, lse = flashtune.attention(q, k, v, return_lse=True, prefer="generated")
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert not out.any()
    assert lse.shape == q.shape[:3]
    assert (lse == -torch.inf).all()
    assert machine.launches == 0


def test_plan_refuses_tensors_that_differ_from_the_planned(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM))
    q, k, v = inputs(PROBLEM)
    planned = flashtune.plan(q, k, v, causal=True)
    torch.testing.assert_close(planned(q + 1, k, v), expected(q + 1, k, v))
    for other in (q.float(), q[:, :, 1:], q.transpose(1, 2).contiguous().transpose(1, 2)):
        with pytest.raises(ProblemError, match="differ from the planned ones"):
            planned(other, k, v)


@pytest.mark.slow
def test_concurrent_threads_prepare_an_executor_once(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM))
    q, k, v = inputs(PROBLEM)
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(flashtune.attention(q, k, v, causal=True)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(machine.kernels) == 1
    assert len(results) == 8
    assert all(torch.equal(result, results[0]) for result in results)


def test_explain_takes_kernels_that_another_process_rendered(machine: Machine) -> None:
    class Rendering(CompilerProcess):
        def prepared(self, *_: object) -> Kernel:
            return msgspec.structs.replace(kernel_of(record, specialization), source="other = 1")

    record = make_record(PROBLEM, ms=1.0, peers={"sdpa-cudnn": 1.2})
    tuned(machine, record)
    specialization = record.specialization
    assert specialization is not None
    machine.compile_apart(Rendering(), record, specialization, TARGET)
    q, k, v = inputs(PROBLEM)
    assert flashtune.explain(q, k, v, causal=True).kernel not in ("", record.kernel)


def test_explain_names_the_backend_without_a_launch(machine: Machine) -> None:
    record = make_record(PROBLEM, ms=1.0, peers={"sdpa-cudnn": 1.2})
    tuned(machine, record)
    q, k, v = inputs(PROBLEM)
    told = flashtune.explain(q, k, v, causal=True)
    assert (told.backend, told.standing, told.kernel) == ("generated", "timed", record.kernel)
    text = str(told)
    assert PROBLEM.key in text
    assert "sdpa-cudnn 1.2 ms" in text
    assert "flashtune search" not in text
    with_lse = flashtune.explain(q, k, v, causal=True, return_lse=True)
    assert with_lse.standing == "unproven"
    assert "flashtune search" in str(with_lse)
    near = flashtune.explain(q[:, :, :300], k, v, causal=True)
    assert near.standing == "verified"
    assert "nearest" in str(near)
    assert (machine.launches, machine.kernels, machine.checked) == (0, [], [])
