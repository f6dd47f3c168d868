"""GPU jobs of separate processes: windows and packed sequences of the Hopper family."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.kernel import Kernel
from flashtune.core.layouts import TORCH_DTYPES
from flashtune.core.problem import Problem
from flashtune.core.target import device_target
from flashtune.launch.binding import bind
from flashtune.launch.tensors import ForwardTensors
from tests.gpu.hopper.hopper_jobs import DEVICE, context_lost_ends_the_process
from tests.problems.plain_masks import plain_attention

Lengths = tuple[tuple[int, int], ...]
# Errors that rounding to 16 bits may cause in weights and in averages of normal values.
OUT_ALLOWED = 0.03
LSE_ALLOWED = 0.003
UNTOUCHED = 777.0
# Rows of packed tensors behind the last sequence.
SPARE = 200


def check_dense(kernel: Kernel, problem: Problem, lengths: Lengths) -> str:
    """Holds a kernel against plain attention at several lengths; the first that is wrong, or nothing."""
    with context_lost_ends_the_process():
        for queries, keys in lengths:
            wrong = _faults(kernel, problem, (problem.batch, queries, keys), NO_EXTRA_INPUTS)
            if wrong:
                return f"{queries} queries, {keys} keys: {wrong}"
    return ""


def check_packed(kernel: Kernel, problem: Problem, lengths: Lengths) -> str:
    """Likewise, with contiguous sequences of these lengths."""
    starts = [torch.tensor([0, *itertools.accumulate(one)]).int() for one in zip(*lengths, strict=True)]
    rows, keys = (int(one[-1]) + SPARE for one in starts)
    with context_lost_ends_the_process():
        return _faults(
            kernel, problem, (1, rows, keys), ExtraInputs(cu_seqlens_q=starts[0], cu_seqlens_kv=starts[1])
        )


def _faults(kernel: Kernel, problem: Problem, shape: tuple[int, int, int], side: ExtraInputs) -> str:
    batch, rows, keys = shape
    chance = torch.Generator().manual_seed(rows + keys)

    def normal(heads: int, length: int, width: int) -> Tensor:
        drawn = torch.randn(batch, length, heads, width, generator=chance)
        return drawn.transpose(1, 2).to(TORCH_DTYPES[problem.dtype])

    q = normal(problem.heads, rows, problem.head_dim)
    k, v = (normal(problem.kv_heads, keys, one) for one in (problem.head_dim, problem.value_head_dim))
    scale = problem.head_dim**-0.5
    expected = plain_attention(problem, q, k, v, side, scale)
    if side.cu_seqlens_q is not None:
        # Rows behind the last sequence must not matter.
        k[:, :, keys - SPARE :] = v[:, :, keys - SPARE :] = math.nan
    q, k, v = (one.to(DEVICE) for one in (q, k, v))
    out = torch.empty(batch, rows, problem.heads, problem.value_head_dim, dtype=q.dtype, device=DEVICE)
    out = out.transpose(1, 2)
    lse = torch.empty(batch, problem.heads, rows, device=DEVICE)
    here = NO_EXTRA_INPUTS
    if side.cu_seqlens_q is not None and side.cu_seqlens_kv is not None:
        here = ExtraInputs(
            cu_seqlens_q=side.cu_seqlens_q.to(DEVICE), cu_seqlens_kv=side.cu_seqlens_kv.to(DEVICE)
        )
    launch = bind(kernel, device_target(0), ForwardTensors(q, k, v, out), here)
    found = []
    for _ in range(2):
        out.fill_(UNTOUCHED)
        lse.fill_(UNTOUCHED)
        launch((q, k, v, out, lse), scale, here)
        found.append((out.cpu(), lse.cpu()))
    if not all(torch.equal(*pair) for pair in zip(*found, strict=True)):
        return "two launches that differ"
    for name, got, meant, allowed in zip(
        ("outputs", "log-sum-exps"), found[0], expected, (OUT_ALLOWED, LSE_ALLOWED), strict=True
    ):
        # Rows that no sequence has are left as they are.
        right = meant.nan_to_num(nan=float(got.new_tensor(UNTOUCHED)), neginf=-math.inf)
        error = torch.where(got == right, 0.0, (got - right).abs()).nan_to_num(nan=math.inf)
        if float(error.max()) > allowed:
            place = (error > allowed).nonzero()[0].tolist()
            return f"{name} are off by {float(error.max()):.3g}, first at {place}"
    return ""
