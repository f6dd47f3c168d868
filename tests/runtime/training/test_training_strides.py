"""Tests of unaligned tensors, and of gradients with other strides than in the forward pass."""

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor

import flashtune
from flashtune.core.errors import ProblemError
from flashtune.core.features.records import ExtraInputs
from flashtune.core.kernel import Alignment
from flashtune.core.problem import Problem
from flashtune.launch.tensors import BackwardTensors
from flashtune.request.gradients import BackwardInputs
from flashtune.runtime import backward_executors
from tests.runtime.training.training_calls import backward_record, close, executor_of, leaves, quiet
from tests.support.machine import PROBLEM, Machine, expected, tuned
from tests.support.records import make_record


@pytest.mark.slow
@quiet
def test_gradient_with_other_strides_is_bound_once(machine: Machine) -> None:
    q, k, v = leaves(PROBLEM)
    for _ in range(2):
        out = flashtune.attention(q, k, v, causal=True)
        moved = torch.randn_like(out).transpose(1, 2).contiguous().transpose(1, 2)
        gradients = torch.autograd.grad(out, (q, k, v), moved)
        close(gradients, torch.autograd.grad(expected(q, k, v), (q, k, v), moved))
    assert [kernel.family for kernel in machine.kernels[1:]] == ["backward_fused"] * 2
    assert len(machine.checked) == 2, "strides alone are bound anew"


@pytest.mark.slow
@quiet
def test_gradient_that_no_kernel_can_address_is_copied(machine: Machine) -> None:
    q, k, v = leaves(PROBLEM)
    out = flashtune.attention(q, k, v, causal=True)
    for dout in (
        torch.tensor(2.0).expand(out.shape),
        torch.randn(*out.shape, 2)[..., 0],
        torch.randn(out.numel() + 1)[1:].view(out.shape),
    ):
        gradients = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        close(gradients, torch.autograd.grad(expected(q, k, v), (q, k, v), dout))
    assert len(machine.kernels) == 2
    assert machine.kernels[1].specialization.alignment is Alignment.SIXTEEN


@quiet
def test_gradient_with_unaligned_strides_of_size_1_dims_is_copied(machine: Machine) -> None:
    q, k, v = leaves(msgspec.structs.replace(PROBLEM, heads=1, kv_heads=1))
    out = flashtune.attention(q, k, v, causal=True)
    dout = torch.randn(2, 512, 64)[..., None].permute(0, 3, 1, 2)
    assert dout.is_contiguous()
    assert dout.stride(1) == 1
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    close(gradients, torch.autograd.grad(expected(q, k, v), (q, k, v), dout))
    assert len(machine.kernels) == 2


@quiet
def test_strides_changed_by_hooks_are_bound_again(machine: Machine) -> None:
    bound: list[tuple[int, ...]] = []

    def bind(
        kernel: object, target: object, tensors: object, side: ExtraInputs, *, compiled: object
    ) -> Callable[..., None]:
        assert side.bias is not None
        if isinstance(tensors, BackwardTensors):
            bound.append(side.bias.stride())
        return lambda *_: None

    machine.launch = bind
    q, k, v = leaves(PROBLEM, torch.bfloat16)
    bias = torch.randn(512, 512, dtype=torch.bfloat16).expand(2, 8, 512, 512)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.contiguous(), lambda kept: kept):
        flashtune.attention(q, k, v, causal=True, attn_bias=bias).sum().backward()
    assert bound == [bias.stride(), bias.contiguous().stride()]


@pytest.mark.slow
@quiet
def test_number_of_cached_launches_is_bounded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_executors, "MAX_LAUNCHES", 2)
    q, k, v = leaves(PROBLEM)
    out = flashtune.attention(q, k, v, causal=True)
    for length in (512, 513, 514, 515):
        dout = torch.randn(2, 8, length, 64)[:, :, :512]
        gradients = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        close(gradients, torch.autograd.grad(expected(q, k, v), (q, k, v), dout))
    assert len(machine.kernels) == 1 + 4
    bound = executor_of(out)
    assert len(bound._launches) == 2


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "padded rows": lambda saved: torch.nn.functional.pad(saved, (0, 3))[..., : saved.shape[-1]],
    "other order": lambda saved: saved.mT.contiguous().mT if saved.dim() > 1 else saved,
    "unaligned": lambda saved: (
        torch.empty(saved.numel() + 1, dtype=saved.dtype)[1:].view(saved.shape).copy_(saved)
    ),
    "other type": lambda saved: saved.double(),
}


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("change", CHANGES)
def test_saved_tensors_of_another_form_are_copied(machine: Machine, change: str) -> None:
    q, k, v = leaves(PROBLEM)
    with torch.autograd.graph.saved_tensors_hooks(CHANGES[change], lambda kept: kept):
        out = flashtune.attention(q, k, v, causal=True)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    close(gradients, torch.autograd.grad(expected(q, k, v), (q, k, v), dout))


@quiet
def test_saved_tensors_of_another_shape_are_refused(machine: Machine) -> None:
    q, k, v = leaves(PROBLEM)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved[:1], lambda kept: kept):
        out = flashtune.attention(q, k, v, causal=True)
    with pytest.raises(ProblemError, match="a hook of saved tensors returned shape"):
        out.sum().backward()


@quiet
def test_tensors_that_a_kernel_cannot_address_are_copied(machine: Machine) -> None:
    q, k, v = leaves(PROBLEM)
    out = flashtune.attention(q, k, v, causal=True)
    odd = torch.nn.functional.pad(q.detach(), (0, 3))[..., : q.shape[3]]
    lse = torch.logsumexp(torch.randn(*q.shape[:3], 2), -1).mT.contiguous().mT
    dout, bound = torch.randn_like(out), executor_of(out)
    inputs = BackwardInputs(q, k, v, out, lse.contiguous(), dout, None, None)
    close(bound(inputs._replace(q=odd, lse=lse))[:3], bound(inputs)[:3])


def slices(problem: Problem, gate: int, start: int) -> list[Tensor]:
    """Returns q, k and v as slices of one projection with a gate at the end of each row."""
    width = problem.head_dim
    counts = problem.heads, problem.kv_heads, problem.kv_heads
    row = sum(counts) * width + gate
    memory = torch.randn(problem.batch * problem.seqlen_q * row + start, dtype=torch.bfloat16)
    rows = memory[start:].view(problem.batch, problem.seqlen_q, row)
    parts = rows[..., : row - gate].split([count * width for count in counts], -1)
    return [part.unflatten(-1, (-1, width)).transpose(1, 2) for part in parts]


@quiet
@pytest.mark.parametrize(("gate", "start"), [(4, 0), (0, 1), (8, 0)])
@pytest.mark.parametrize("long", [True, False])
def test_unaligned_tensors_of_long_calls_are_copied(
    machine: Machine, copy_ms: Callable[[float], None], gate: int, start: int, long: bool
) -> None:
    tuned(machine, make_record(PROBLEM), backward_record(PROBLEM, 1.0, {}))
    copy_ms(0.0 if long else 1.0)
    short = msgspec.structs.replace(PROBLEM, seqlen_q=150, seqlen_kv=150)
    unaligned = (gate, start) != (8, 0)
    q, k, v = (tensor.requires_grad_() for tensor in slices(short, gate, start))
    told = flashtune.explain(q, k, v, causal=True)
    assert told.backward is not None
    for reason in (told.reason, told.backward.reason):
        assert ("q, k, v are copied first" in reason) == (unaligned and long)
    out = flashtune.attention(q, k, v, causal=True)
    wanted = expected(q, k, v)
    close((out,), (wanted,))
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    close(gradients, torch.autograd.grad(wanted, (q, k, v), dout))
    kinds = {kernel.specialization.alignment for kernel in machine.kernels}
    narrow = {Alignment.FOUR if gate == 4 else Alignment.ANY}
    assert kinds == narrow if unaligned and not long else not kinds & {Alignment.FOUR, Alignment.ANY}
