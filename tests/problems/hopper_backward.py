"""Problems, configs and kernels of the family `backward_hopper` for tests."""

from typing import Any

import msgspec
import torch
from torch import Tensor

from flashtune import testing
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.layouts import TORCH_DTYPES
from flashtune.core.problem import Problem
from flashtune.core.target import find_target
from flashtune.templates.backward_hopper.space import HopperBackwardConfig
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render

FAMILY = find_family("backward_hopper")
H200 = find_target("h200")
PLAIN = Specialization()


def a_problem(head_dim: int = 128, value_head_dim: int = 0, **changes: Any) -> Problem:
    """8 heads over 2 of keys, 1000 queries and 1100 keys, twice."""
    return testing.problem(
        "heads=8,kv_heads=2,seqlen_q=1000,seqlen_kv=1100,head_dim=64,dtype=bf16,batch=2,backward",
        head_dim=head_dim,
        value_head_dim=value_head_dim or head_dim,
        **changes,
    )


def config_of(problem: Problem, **changes: Any) -> HopperBackwardConfig:
    """The family's default with changes, decoded as a table's would be."""
    default = FAMILY.default(problem, H200)
    return msgspec.convert({**msgspec.to_builtins(default), **changes}, HopperBackwardConfig)


def kernel_of(problem: Problem, specialization: Specialization = PLAIN, **changes: Any) -> Kernel:
    """The kernel of that config."""
    return render(FAMILY, problem, config_of(problem, **changes), specialization)


def like(problem: Problem) -> tuple[Tensor, ...]:
    """Returns tensors without data to plan a launch with; the heads of a token are adjacent."""
    dtype = TORCH_DTYPES[problem.dtype]

    def empty(heads: int, length: int, width: int) -> Tensor:
        return torch.empty(problem.batch, length, heads, width, dtype=dtype, device="meta").transpose(1, 2)

    queries, keys = (problem.heads, problem.seqlen_q), (problem.kv_heads, problem.seqlen_kv)
    qk, v = problem.head_dim, problem.value_head_dim
    sides = ((*queries, qk), (*keys, qk), (*keys, v), (*queries, v), (*queries, v))
    return tuple(empty(*side) for side in (*sides, (*queries, qk), (*keys, qk), (*keys, v)))
