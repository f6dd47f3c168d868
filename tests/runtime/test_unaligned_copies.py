"""Tests of copies of unaligned tensors before a pass."""

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor

import flashtune
from flashtune.core.kernel import Alignment
from flashtune.core.problem import Problem
from tests.runtime.training.training_calls import backward_record, close, quiet
from tests.support.machine import PROBLEM, Machine, expected, tuned
from tests.support.records import make_record


def slices(problem: Problem, gate: int, start: int) -> list[Tensor]:
    """Returns q, k and v as slices of one projection, whose rows end in a gate."""
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
