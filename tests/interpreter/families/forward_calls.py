"""Attention in the interpreter: problems, tensors in many layouts, and float64 references."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from flashtune.core.config import Config
from flashtune.core.kernel import Specialization, specialization_of
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.core.target import find_target
from flashtune.launch.binding import bind
from flashtune.launch.tensors import ForwardTensors
from flashtune.templates.family import Family
from flashtune.templates.rendering import render

TARGET = find_target("h200")
LAYOUTS = ["bhsd", "bshd", "packed", "padded", "offset", "shared"]


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem, one config, and the strides of the tensors."""

    family: Family
    problem: Problem
    config: Config
    layout: str = "bhsd"
    index_bits: int = 32
    lse: bool = True
    scale: float = 0.25

    def __str__(self) -> str:
        words = (
            self.family.name,
            self.problem.key,
            self.layout,
            self.index_bits,
            "lse" if self.lse else "no_lse",
        )
        return "-".join(map(str, (*words, self.config.label().replace(" ", ","))))


def make_problem(
    widths: tuple[int, int], heads: tuple[int, int], lengths: tuple[int, int], causal: Causal
) -> Problem:
    return Problem(
        dtype=Dtype.FP32,
        head_dim=widths[0],
        value_head_dim=widths[1],
        heads=heads[0],
        kv_heads=heads[1],
        batch=2,
        seqlen_q=lengths[0],
        seqlen_kv=lengths[1],
        causal=causal,
    )


def lay_out(layout: str, batch: int, heads: int, seqlen: int, width: int) -> Tensor:
    """Normal numbers seen as [batch, heads, seqlen, width] through one of many memory layouts."""
    if layout == "bshd":
        return torch.randn(batch, seqlen, heads, width).transpose(1, 2)
    if layout == "packed":  # one of three, as a fused projection leaves them
        return torch.randn(batch, seqlen, 3, heads, width)[:, :, 1].transpose(1, 2)
    if layout == "padded":  # a stride that is no multiple of anything
        return torch.randn(batch, heads, seqlen, width + 3)[..., :width]
    if layout == "offset":  # a pointer that is on no 16-byte border
        return torch.randn(batch * heads * seqlen * width + 1)[1:].view(batch, heads, seqlen, width)
    if layout == "shared":  # one sequence for the whole batch
        return torch.randn(1, heads, seqlen, width).expand(batch, heads, seqlen, width)
    return torch.randn(batch, heads, seqlen, width)


def make_inputs(problem: Problem, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    keys = (problem.batch, problem.kv_heads, problem.seqlen_kv)
    return (
        lay_out(layout, problem.batch, problem.heads, problem.seqlen_q, problem.head_dim),
        lay_out(layout, *keys, problem.head_dim),
        lay_out(layout, *keys, problem.value_head_dim),
    )


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan)


def run(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """Output and log-sum-exp, from memory that was full of NaN before."""
    problem = case.problem
    rows = (problem.batch, problem.heads, problem.seqlen_q)
    out = poisoned(*rows, problem.value_head_dim)
    lse = poisoned(*rows) if case.lse else None
    found = specialization_of((q, k, v, out), case.lse)
    specialization = Specialization(found.alignment, max(case.index_bits, found.index_bits), case.lse)
    kernel = render(case.family, problem, case.config, specialization)
    launch = bind(
        kernel, TARGET, ForwardTensors(q, k, v, out), allocate=lambda shape, device: poisoned(*shape)
    )
    launch((q, k, v, out, lse), case.scale)
    return out, lse


def reference(problem: Problem, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64; rows that see no key are 0 and -inf."""
    k, v = (tensor.double().repeat_interleave(problem.group_size, 1) for tensor in (k, v))
    scores = q.double() @ k.mT * scale
    if problem.causal is not Causal.NONE:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(problem.diagonal)
        scores = scores.masked_fill(~visible, -torch.inf)
    return torch.nan_to_num(torch.softmax(scores, -1)) @ v, torch.logsumexp(scores, -1)


def check(case: Case, q: Tensor, k: Tensor, v: Tensor) -> None:
    out, lse = run(case, q, k, v)
    expected_out, expected_lse = reference(case.problem, q, k, v, case.scale)
    torch.testing.assert_close(out.double(), expected_out, atol=2e-5, rtol=1e-5)
    if lse is not None:
        torch.testing.assert_close(lse.double(), expected_lse, atol=2e-5, rtol=1e-5)
