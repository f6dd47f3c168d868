"""How much memory a launch takes beside its inputs and outputs."""

from __future__ import annotations

import math

import torch

from flashtune.compilation import load_module
from flashtune.dtypes import TORCH_DTYPES
from flashtune.kernel import Kernel
from flashtune.problem import Problem

FLOAT32_BYTES = 4


def workspace_bytes(kernel: Kernel, problem: Problem) -> int:
    """Bytes of the workspaces that a backward kernel asks for, on contiguous tensors of a problem.

    Args:
        kernel: It takes no side inputs.
        problem: The backward problem.
    """
    rows = (problem.batch, problem.heads, problem.seqlen_q)
    keys = (problem.batch, problem.kv_heads, problem.seqlen_kv)
    shapes = (
        (*rows, problem.head_dim),
        (*keys, problem.head_dim),
        (*keys, problem.value_head_dim),
        (*rows, problem.value_head_dim),
    )
    dtype = TORCH_DTYPES[problem.dtype]
    q, k, v, out = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    workspaces: tuple[tuple[int, ...], ...]
    _, workspaces, _ = load_module(kernel).launch_plan(q, k, v, out, out, q, k, v)
    return FLOAT32_BYTES * sum(math.prod(shape) for shape in workspaces)
