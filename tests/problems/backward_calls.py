"""Calls of a backward pass on the CPU, and their reference gradients."""

import functools
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from flashtune import testing
from flashtune.core.config import Config
from flashtune.core.features.records import ExtraInputs
from flashtune.core.kernel import specialization_of
from flashtune.core.problem import Bias, Problem
from flashtune.core.target import find_target
from flashtune.launch.binding import bind
from flashtune.launch.tensors import BackwardTensors
from flashtune.templates.family import Family, unsupported_reason
from flashtune.templates.rendering import render
from flashtune.verification.lengths import Lengths, equal_lengths
from tests.problems.kernel_cases import BOTH_PASSES

TARGET = find_target("h200")
SCALE = 0.3
# Queries and keys of packed sequences: empty ones, and on borders.
LENGTHS = ((19, 40), (0, 12), (7, 0), (16, 33), (33, 17))


class Call(NamedTuple):
    """The arguments of a backward pass, and the exact gradients that portable kernels write, by name."""

    tensors: BackwardTensors
    side: ExtraInputs
    expected: dict[str, Tensor]


a_problem = functools.partial(
    testing.problem,
    "heads=2,kv_heads=1,seqlen_q=35,seqlen_kv=53,head_dim=24,value_head_dim=16,dtype=fp32,batch=2,backward",
)


def make_call(problem: Problem, *, with_dlse: bool = False) -> Call:
    """Tensors of a problem; what is written is NaN before. Packed sequences are those of `LENGTHS`."""
    return differentiate(make_inputs(problem, with_dlse=with_dlse))


def make_inputs(problem: Problem, *, with_dlse: bool = False) -> testing.Inputs:
    lengths = equal_lengths(problem)
    if problem.packed:
        queries, keys = zip(*LENGTHS, strict=True)
        problem = msgspec.structs.replace(problem, seqlen_q=max(queries), seqlen_kv=max(keys))
        lengths = Lengths(queries, tuple(own - 5 * (own > 5) for own in keys) if problem.kv_lengths else keys)
    elif problem.kv_lengths:
        lengths = lengths._replace(keys=(problem.seqlen_kv - 7, 0, 16)[: problem.batch])
    return testing.tensors(problem, scale=SCALE, layout="bshd", lengths=lengths, dlse=with_dlse)


def differentiate(inputs: testing.Inputs) -> Call:
    """The call of inputs, with the results of the reference."""
    reference = testing.reference(inputs)
    expected = {
        each.name: each.exact
        for each in reference[2:]
        # Portable kernels leave the gradient of sinks to torch.
        if each is not None and each.name != "dsinks"
    }
    assert inputs.dout is not None
    tensors = BackwardTensors(
        *(inputs.q, inputs.k, inputs.v),
        reference.out.exact.float(),
        reference.lse.exact.float().contiguous(),
        inputs.dout,
        **{name: torch.full_like(exact, torch.nan, dtype=torch.float32) for name, exact in expected.items()},
        dlse=inputs.dlse,
    )
    return Call(tensors, inputs.extra, expected)


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
    required = specialization_of(tensors.planned, tensors.dlse is not None)
    specialization = msgspec.structs.replace(required, index_bits=max(required.index_bits, index_bits))
    if problem.bias is Bias.ADDITIVE and tensors.dbias is None:
        specialization = msgspec.structs.replace(specialization, constant_bias=True)
    assert unsupported_reason(family, problem, TARGET, specialization) is None
    kernel = render(family, problem, config, specialization)
    bind(kernel, TARGET, tensors, side)(tensors, SCALE, side)
    for name, right in expected.items():
        gradient = getattr(tensors, name).double()
        torch.testing.assert_close(
            gradient,
            right.double(),
            atol=tolerance,
            rtol=tolerance,
            msg=functools.partial("{}: {}".format, name),
        )


def combined(family: Family, *names: str, **changes: Any) -> Problem | None:
    """A problem of several features, or None where they contradict each other."""
    asked: dict[str, Any] = {}
    for name in names:
        for field, value in BOTH_PASSES[name].items():
            if asked.setdefault(field, value) != value:
                return None
    problem = a_problem(**asked, **changes)
    return None if family.supports(problem, TARGET) else problem
