"""Calls of a backward pass on the CPU, and float64 gradients by autograd."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from flashtune.core.config import Config
from flashtune.core.features.records import ExtraInputs
from flashtune.core.kernel import specialization_of
from flashtune.core.problem import Bias, Direction, Dtype, Problem
from flashtune.core.target import find_target
from flashtune.launch.binding import bind
from flashtune.launch.tensors import BackwardTensors
from flashtune.templates.family import Family, unsupported_reason
from flashtune.templates.rendering import render
from tests.problems.block_lists import visible_blocks, with_lists
from tests.problems.plain_masks import plain_attention

TARGET = find_target("h200")
SCALE = 0.3
# Queries and keys of packed sequences: empty ones, and on borders.
LENGTHS = ((19, 40), (0, 12), (7, 0), (16, 33), (33, 17))
# Hides keys that are seen otherwise, and has a gradient.
LEAST = -40.0
FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window_left": 11},
    "window_right": {"window_left": 21, "window_right": 6},
    "right_alone": {"window_right": 3},
    "wide_window": {"window_left": 2**31 - 1, "window_right": 2**31 - 1},
    "first_tokens": {"window_left": 9, "sink_tokens": 4},
    "chunk": {"chunk": 16},
    "odd_chunk": {"chunk": 13, "sink_tokens": 18},
    "prefix": {"prefix": True},
    "softcap": {"softcap": True},
    "alibi": {"alibi": True},
    "additive": {"bias": Bias.ADDITIVE},
    "boolean": {"bias": Bias.BOOLEAN},
    "sinks": {"sinks": True},
    "dropout": {"dropout": True},
    "packed": {"packed": 75},
    "lengths": {"kv_lengths": True},
}


class Call(NamedTuple):
    """The arguments of a backward pass, and the gradients by autograd."""

    tensors: BackwardTensors
    side: ExtraInputs
    expected: dict[str, Tensor]


def a_problem(**changes: Any) -> Problem:
    problem = Problem(
        dtype=Dtype.FP32,
        head_dim=24,
        value_head_dim=16,
        heads=2,
        kv_heads=1,
        batch=2,
        seqlen_q=35,
        seqlen_kv=53,
        direction=Direction.BACKWARD,
    )
    return msgspec.structs.replace(problem, **changes)


def make_call(problem: Problem, *, with_dlse: bool = False) -> Call:
    """Tensors of a problem; what is written is NaN before. Packed sequences are those of `LENGTHS`."""
    torch.manual_seed(0)
    batch, queries, keys = problem.batch, problem.seqlen_q, problem.seqlen_kv
    side = ExtraInputs(softcap=1.5 if problem.softcap else None)
    if problem.dropout:
        side = side._replace(seed=torch.randint(2**63 - 1, (1,)), dropout=0.3)
    sequences = batch
    own_k: list[int] = []
    if problem.packed:
        batch, sequences = 1, len(LENGTHS)
        own_q, own_k = ([one[axis] for one in LENGTHS] for axis in (0, 1))
        queries, keys = sum(own_q), sum(own_k)
        side = side._replace(cu_seqlens_q=starts(own_q), cu_seqlens_kv=starts(own_k))
    if problem.kv_lengths:
        counts = [own - 5 * (own > 5) for own in own_k] if problem.packed else [keys - 7, 0, 16][:batch]
        side = side._replace(seqlens_kv=torch.tensor(counts, dtype=torch.int32))
    bias = torch.randn(batch, problem.heads, queries, keys) if problem.bias is not Bias.NONE else None
    if bias is not None:
        # Rows and blocks that nobody sees, the first of a row among them.
        hidden = torch.rand(bias.shape) < 0.3
        hidden[:, 0, 3:9] = True
        hidden[..., :20] = True
        bias = ~hidden if problem.bias is Bias.BOOLEAN else bias.masked_fill(hidden, LEAST)
    prefix = torch.tensor([23, 0, 5, 9, 70][:sequences], dtype=torch.int32)
    side = side._replace(
        slopes=torch.rand(sequences, problem.heads) if problem.alibi else None,
        bias=bias,
        sinks=torch.randn(problem.heads) * 3 if problem.sinks else None,
        prefix=prefix if problem.prefix else None,
    )
    if problem.block_mask:
        side = with_lists(side, visible_blocks(problem))
    q = torch.randn(batch, queries, problem.heads, problem.head_dim).transpose(1, 2)
    k = torch.randn(batch, keys, problem.kv_heads, problem.head_dim).transpose(1, 2)
    v = torch.randn(batch, keys, problem.kv_heads, problem.value_head_dim).transpose(1, 2)
    return differentiate(problem, (q, k, v), side, with_dlse=with_dlse)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def differentiate(
    problem: Problem, given: tuple[Tensor, Tensor, Tensor], side: ExtraInputs, *, with_dlse: bool
) -> Call:
    """Runs the forward pass and its gradient in float64."""
    leaves = {name: one.detach().requires_grad_() for name, one in zip("qkv", given, strict=True)}
    laid = {"slopes": side.slopes, "bias": side.bias if problem.bias is Bias.ADDITIVE else None}
    leaves |= {name: one.detach().requires_grad_() for name, one in laid.items() if one is not None}
    followed = side._replace(slopes=leaves.get("slopes"), bias=leaves.get("bias", side.bias))
    out, lse = plain_attention(problem, leaves["q"], leaves["k"], leaves["v"], followed, SCALE)
    dout = torch.randn(out.shape)
    dlse = torch.randn(lse.shape) if with_dlse else None
    seen = ~lse.isneginf()
    loss = (out * dout).sum() + (0 if dlse is None else (lse[seen] * dlse[seen]).sum())
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    written = [f"d{name}" for name in leaves]
    tensors = BackwardTensors(
        *given,
        out.detach().float(),
        lse.detach().float(),
        dout,
        **{name: torch.full_like(one, torch.nan) for name, one in zip(written, leaves.values(), strict=True)},
        dlse=dlse,
    )
    return Call(tensors, side, dict(zip(written, gradients, strict=True)))


def check_gradients(
    family: Family,
    problem: Problem,
    config: Config,
    call: Call,
    index_bits: int = 32,
    tolerance: float = 1e-4,
) -> None:
    """Runs a kernel under the interpreter and compares all gradients."""
    tensors, side, expected = call
    found = specialization_of(tensors.planned, tensors.dlse is not None)
    specialization = msgspec.structs.replace(found, index_bits=max(found.index_bits, index_bits))
    if problem.bias is Bias.ADDITIVE and tensors.dbias is None:
        specialization = msgspec.structs.replace(specialization, constant_bias=True)
    assert unsupported_reason(family, problem, TARGET, specialization) is None
    kernel = render(family, problem, config, specialization)
    bind(kernel, TARGET, tensors, side)(tensors, SCALE, side)
    for name, right in expected.items():
        given = getattr(tensors, name).double()
        torch.testing.assert_close(
            given,
            right.double(),
            atol=tolerance,
            rtol=tolerance,
            msg=functools.partial("{}: {}".format, name),
        )


def combined(family: Family, *names: str, **changes: Any) -> Problem | None:
    """A problem of several features, or None where they contradict each other."""
    asked: dict[str, Any] = {}
    for name in names:
        for field, value in FEATURES[name].items():
            if asked.setdefault(field, value) != value:
                return None
    problem = a_problem(**asked, **changes)
    return None if family.supports(problem, TARGET) else problem
