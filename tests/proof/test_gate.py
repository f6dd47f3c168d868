"""The gate on flash attention written in torch: right in 16 bits, and wrong in small ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashtune.problem import Causal, Dtype, Problem
from flashtune.proof.gate import worst_ratio
from flashtune.proof.inputs import TORCH_DTYPES
from flashtune.proof.probes import Probe, make_values
from flashtune.proof.reference import expect, sample

BLOCK = 64
LOG2_E = 1.4426950408889634
Spoil = Callable[[Tensor, int], Tensor]


def online(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, scale: float, spoil: Spoil
) -> tuple[Tensor, Tensor]:
    """Attention as a flash kernel rounds it: float32 scores and sums, weights in the inputs' type."""
    shape = q.shape[:3]
    low, rows = q.dtype, torch.arange(problem.seqlen_q)
    visible = torch.full_like(rows, problem.seqlen_kv)
    if problem.causal is not Causal.NONE:
        visible = (rows + problem.diagonal + 1).clamp(0, problem.seqlen_kv)
    k, v = (tensor.repeat_interleave(problem.group_size, 1) for tensor in (k, v))
    largest, total = torch.full(shape, float("-inf")), torch.zeros(shape)
    accumulator = torch.zeros(*shape, problem.value_head_dim)
    for start in range(0, problem.seqlen_kv, BLOCK):
        block = slice(start, start + BLOCK)
        scores = q.float() @ k[:, :, block].float().mT * torch.tensor(scale * LOG2_E)
        keys = torch.arange(start, start + scores.shape[-1])
        scores = spoil(scores.masked_fill(keys >= visible[:, None], float("-inf")), start)
        maximum = torch.maximum(largest, scores.amax(-1))
        shift = maximum.masked_fill(maximum.isneginf(), 0.0)
        weights, rescale = torch.exp2(scores - shift[..., None]), torch.exp2(largest - shift)
        total = total * rescale + weights.sum(-1)
        accumulator = accumulator * rescale[..., None] + weights.to(low).float() @ v[:, :, block].float()
        largest = maximum
    divisor = total.masked_fill(total == 0, 1.0)
    return (accumulator / divisor[..., None]).to(low), (largest + total.log2()) / LOG2_E


def ratios(problem: Problem, probe: Probe, seed: int, spoil: Spoil) -> tuple[float, float]:
    """Worst row error and worst log-sum-exp error over what is allowed."""
    generator = torch.Generator().manual_seed(seed)
    scale = problem.head_dim**-0.5
    values = make_values(probe, problem, scale, BLOCK, generator)
    q, k, v = (value.to(TORCH_DTYPES[problem.dtype]) for value in values)
    chosen = sample(problem, generator)
    expected = expect(problem, q, k, v, scale, chosen)
    out, lse = (tensor.flatten(0, 1)[:, chosen.rows] for tensor in online(problem, q, k, v, scale, spoil))
    return (
        worst_ratio(out, expected.out, expected.allowed).item(),
        worst_ratio(lse[..., None], expected.lse[..., None], expected.lse_allowed).item(),
    )


def make_problem(dtype: Dtype, causal: Causal, seqlen_q: int, seqlen_kv: int, width: int = 64) -> Problem:
    return Problem(
        dtype=dtype,
        head_dim=width,
        value_head_dim=width,
        heads=4,
        kv_heads=2,
        batch=1,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        causal=causal,
    )


@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize("probe", list(Probe))
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv", "width"), [(200, 200, 64), (1, 700, 8), (90, 20, 16)])
def test_right_results_pass(dtype: Dtype, probe: Probe, seqlen_q: int, seqlen_kv: int, width: int) -> None:
    problem = make_problem(dtype, Causal.BOTTOM_RIGHT, seqlen_q, seqlen_kv, width)
    out, lse = ratios(problem, probe, 11, lambda scores, start: scores)
    assert out <= 1
    assert lse <= 1


def forget_key(scores: Tensor, start: int) -> Tensor:
    """One key of 640 is not seen by one row of 130."""
    if start == 2 * BLOCK:
        scores[:, :, 77, 20] = float("-inf")
    return scores


def forget_block(scores: Tensor, start: int) -> Tensor:
    """One block of ten is not seen by one row."""
    if start == 3 * BLOCK:
        scores[:, :, 129] = float("-inf")
    return scores


def round_scores(scores: Tensor, start: int) -> Tensor:
    """Scores are held in 8 bits."""
    return scores.to(torch.bfloat16).float()


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16])
@pytest.mark.parametrize("spoil", [forget_key, forget_block, round_scores])
def test_small_mistakes_fail(dtype: Dtype, spoil: Spoil) -> None:
    problem = make_problem(dtype, Causal.NONE, 130, 640)
    worst = [max(ratios(problem, probe, 5, spoil)) for probe in (Probe.RANDOM, Probe.NEEDLE, Probe.FAR_BELOW)]
    assert max(worst) > 2


def test_nan_and_infinity_are_never_within_bounds() -> None:
    exact = torch.zeros(1, 2, 3, dtype=torch.float64)
    allowed = torch.ones(1, 2, dtype=torch.float64)
    for value in (float("nan"), float("inf"), float("-inf")):
        result = torch.zeros(1, 2, 3)
        result[0, 1, 2] = value
        assert not worst_ratio(result, exact, allowed).item() <= 1
    assert worst_ratio(exact.float(), exact, torch.zeros(1, 2, dtype=torch.float64)).item() == 0
    assert worst_ratio(exact.float() + 1e-30, exact, torch.zeros(1, 2, dtype=torch.float64)).item() > 1
