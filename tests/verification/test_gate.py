"""Tests of the tolerances on flash attention in torch: correct in 16 bits, and with small errors."""

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor

from flashtune import testing
from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.layouts import TORCH_DTYPES
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.request.quantization import quantize
from flashtune.verification.probes import Probe, make_values
from flashtune.verification.reference.forward import expect, sample
from flashtune.verification.tolerance import (
    PRODUCTS_AT_ONCE,
    TRUNCATED_UNIT,
    UNIT_ROUNDOFF,
    WEIGHT_RANGE,
    RowScale,
    allowed_error,
    inverse,
    larger,
    worst_ratio,
)

BLOCK = 64
LOG2_E = 1.4426950408889634
Spoil = Callable[[Tensor, int], Tensor]
Mistake = Callable[[ExtraInputs], ExtraInputs]


def online(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    spoil: Spoil,
    scales: ExtraInputs,
    excess: float,
) -> tuple[Tensor, Tensor]:
    """Attention as a flash kernel rounds it: float32 scores and sums, weights in the inputs' type.

    `excess` is the difference of the running maximum and the true one, in log2.
    """
    shape = q.shape[:3]
    rows, weight_range = torch.arange(problem.seqlen_q), WEIGHT_RANGE[problem.dtype]
    low, final = TORCH_DTYPES[problem.dtype], TORCH_DTYPES[problem.out_dtype]
    q_size, k_size, v_size = (_size(factor, problem) for factor in scales.scales)
    visible = torch.full_like(rows, problem.seqlen_kv)
    if problem.causal is not Causal.NONE:
        visible = (rows + problem.diagonal + 1).clamp(0, problem.seqlen_kv)
    head = torch.arange(problem.heads) // problem.group_size
    k, v = k[:, head], v[:, head]  # 8-bit floats cannot be repeated
    largest, total = torch.full(shape, float("-inf")), torch.zeros(shape)
    accumulator = torch.zeros(*shape, problem.value_head_dim)
    for start in range(0, problem.seqlen_kv, BLOCK):
        block = slice(start, start + BLOCK)
        products = product(problem, torch.zeros(()), q, k[:, :, block].mT)
        scores = products * (scale * LOG2_E * q_size * k_size)
        keys = torch.arange(start, start + scores.shape[-1])
        scores = spoil(scores.masked_fill(keys >= visible[:, None], float("-inf")), start)
        maximum = torch.maximum(largest, scores.amax(-1) + excess)
        shift = maximum.masked_fill(maximum.isneginf(), 0.0)
        weights, rescale = torch.exp2(scores - shift[..., None]), torch.exp2(largest - shift)
        total = total * rescale + weights.sum(-1)
        low_weights = (weights * weight_range).to(low)
        accumulator = product(problem, accumulator * rescale[..., None], low_weights, v[:, :, block])
        largest = maximum
    divisor = total.masked_fill(total == 0, 1.0)
    out = accumulator * v_size / (weight_range * divisor[..., None])
    return out.to(final), (largest + total.log2()) / LOG2_E


def _size(factor: Tensor | None, problem: Problem) -> Tensor:
    """A scale for each query head, [batch, heads, 1, 1]."""
    if factor is None:
        return torch.ones(())
    return factor.repeat_interleave(problem.heads // factor.shape[1], 1)[..., None, None]


def product(problem: Problem, start: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """A product added to a float32 sum, with few bits for 8-bit inputs like on Hopper."""
    if not problem.dtype.is_quantized:
        return start + left.float() @ right.float()
    total = start.double()
    for first in range(0, left.shape[-1], PRODUCTS_AT_ONCE):
        some = slice(first, first + PRODUCTS_AT_ONCE)
        products = left[..., some, None].double() * right[..., None, some, :].double()
        # All are cut off at one place, which the largest of them decides.
        largest = products.abs().amax(-2).maximum(total.abs())
        unit = torch.exp2(torch.frexp(largest).exponent.double() - 1) * TRUNCATED_UNIT
        total = ((products / unit.unsqueeze(-2)).trunc().sum(-2) + (total / unit).trunc()) * unit
        unit = torch.exp2(torch.frexp(total).exponent.double() - 1) * TRUNCATED_UNIT
        total = (total / unit).trunc() * unit
    return total.float()


def ratios(
    problem: Problem,
    probe: Probe,
    seed: int,
    spoil: Spoil,
    mistake: Mistake = lambda scales: scales,
    excess: float = 0.0,
) -> tuple[float, float]:
    """The largest row and log-sum-exp errors relative to the tolerances."""
    generator = torch.Generator().manual_seed(seed)
    scale = problem.head_dim**-0.5
    values = make_values(probe, problem, scale, BLOCK, generator)
    scales = NO_EXTRA_INPUTS
    if problem.dtype.is_quantized:
        (q, q_scale), (k, k_scale), (v, v_scale) = (quantize(value) for value in values)
        scales = ExtraInputs(q_scale, k_scale, v_scale)
    else:
        q, k, v = (value.to(TORCH_DTYPES[problem.dtype]) for value in values)
    chosen = sample(problem, generator)
    expected = expect(problem, q, k, v, scale, chosen, scales)
    results = online(problem, q, k, v, scale, spoil, mistake(scales), excess)
    out, lse = (tensor.flatten(0, 1)[:, chosen.rows] for tensor in results)
    return (
        worst_ratio(out, expected.out, expected.allowed).item(),
        worst_ratio(lse[..., None], expected.lse[..., None], expected.lse_allowed).item(),
    )


def make_problem(dtype: Dtype, causal: Causal, seqlen_q: int, seqlen_kv: int, width: int = 64) -> Problem:
    shape = f"heads=4,kv_heads=2,seqlen_q={seqlen_q},seqlen_kv={seqlen_kv},head_dim={width}"
    return testing.problem(shape, dtype=dtype, causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize("probe", list(Probe))
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv", "width"), [(200, 200, 64), (1, 700, 8), (90, 20, 16)])
def test_correct_results_pass(dtype: Dtype, probe: Probe, seqlen_q: int, seqlen_kv: int, width: int) -> None:
    problem = make_problem(dtype, Causal.BOTTOM_RIGHT, seqlen_q, seqlen_kv, width)
    out, lse = ratios(problem, probe, 11, lambda scores, start: scores)
    assert out <= 1
    assert lse <= 1


@pytest.mark.slow
def test_probabilities_relative_to_a_larger_maximum_pass() -> None:
    problem = make_problem(Dtype.E4M3, Causal.NONE, 70, 257)
    assert max(ratios(problem, Probe.STEEP, 4, lambda scores, start: scores, excess=0.5)) <= 1


def test_probabilities_that_are_rounded_alike_pass() -> None:
    problem = make_problem(Dtype.E4M3, Causal.NONE, 1, 256)
    ones = torch.ones(1, 1, dtype=torch.float64)
    # Of 256 columns, the largest sum of random values is about three times as large as the usual one.
    row = RowScale(spread=ones, largest=3.0 * ones, score=0.0 * ones, keys=256.0 * ones, lse=0.0 * ones)
    assert allowed_error(0.0 * ones, row, problem) >= UNIT_ROUNDOFF[Dtype.E4M3] * row.largest


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
def test_small_errors_fail(dtype: Dtype, spoil: Spoil) -> None:
    problem = make_problem(dtype, Causal.NONE, 130, 640)
    worst = [max(ratios(problem, probe, 5, spoil)) for probe in (Probe.RANDOM, Probe.NEEDLE, Probe.FAR_BELOW)]
    assert max(worst) > 2


@pytest.mark.slow
@pytest.mark.parametrize("probe", [Probe.RANDOM, Probe.NEEDLE])
def test_missing_block_of_quantized_keys_fails(probe: Probe) -> None:
    problem = make_problem(Dtype.E4M3, Causal.NONE, 130, 640)
    assert ratios(problem, probe, 5, forget_block)[0] > 2


@pytest.mark.slow
def test_missing_quantized_key_is_detected_in_lse() -> None:
    problem = make_problem(Dtype.E4M3, Causal.NONE, 130, 640)
    assert ratios(problem, Probe.RANDOM, 5, forget_key)[1] < 1, "8-bit scores are not that exact"
    assert ratios(problem, Probe.FAINT, 5, forget_key)[1] > 100


@pytest.mark.parametrize(
    "mistake",
    [
        lambda scales: scales._replace(q_scale=scales.q_scale.roll(1, 1)),
        lambda scales: scales._replace(k_scale=scales.k_scale.flip(1)),
        lambda scales: scales._replace(v_scale=scales.v_scale.flip(1)),
        lambda scales: scales._replace(v_scale=scales.v_scale.flip(0)),
        lambda scales: scales._replace(k_scale=scales.q_scale[:, : scales.k_scale.shape[1]]),
        lambda _: NO_EXTRA_INPUTS,
    ],
    ids=[
        "q of another head",
        "k of another head",
        "v of another head",
        "v of another sequence",
        "q's",
        "none",
    ],
)
def test_wrong_scales_fail(mistake: Mistake) -> None:
    problem = msgspec.structs.replace(make_problem(Dtype.E4M3, Causal.NONE, 70, 100, 32), batch=2)
    worst = max(
        max(ratios(problem, Probe.RANDOM, seed, lambda scores, start: scores, mistake)) for seed in (1, 2)
    )
    assert worst > 2


def test_nan_and_infinity_are_not_within_bounds() -> None:
    exact = torch.zeros(1, 2, 3, dtype=torch.float64)
    allowed = torch.ones(1, 2, dtype=torch.float64)
    for value in (float("nan"), float("inf"), float("-inf")):
        result = torch.zeros(1, 2, 3)
        result[0, 1, 2] = value
        assert not worst_ratio(result, exact, allowed).item() <= 1
    assert worst_ratio(exact.float(), exact, torch.zeros(1, 2, dtype=torch.float64)).item() == 0
    assert worst_ratio(exact.float() + 1e-30, exact, torch.zeros(1, 2, dtype=torch.float64)).item() > 1


@pytest.mark.parametrize(("power", "right"), [(-127, True), (-100, False)])
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP32])
def test_rows_with_subnormal_probabilities_may_be_zero(dtype: Dtype, power: int, right: bool) -> None:
    plain = make_problem(dtype, Causal.NONE, 1, 1)
    problem = msgspec.structs.replace(plain, sinks=True)
    q, k, v = (torch.ones(1, heads, 1, 64).to(TORCH_DTYPES[dtype]) for heads in (4, 2, 2))
    # The score is 8, and the sink's weight is that of the key times 2 to the power of -power.
    side = ExtraInputs(sinks=torch.full((4,), 8.0 - power / LOG2_E))
    expected = expect(problem, q, k, v, 0.125, sample(problem, torch.Generator()), side)
    assert (expected.out.log2() - power).abs().max() < 0.01
    zeros = torch.zeros(expected.out.shape)
    assert (worst_ratio(zeros, expected.out, expected.allowed).item() <= 1) is right


def test_only_minus_infinity_matches_minus_infinity() -> None:
    exact = torch.full((1, 1, 1), -torch.inf, dtype=torch.float64)
    allowed = torch.full((1, 1), 1e20, dtype=torch.float64)
    assert worst_ratio(exact.float(), exact, allowed).item() == 0
    for value in (float("nan"), torch.inf, torch.finfo(torch.float32).min, -1e30, 0.0):
        assert not worst_ratio(torch.full((1, 1, 1), value), exact, allowed).item() <= 1


def test_operations_without_kernel_loading_are_equal() -> None:
    first, other = torch.randn(2, 4, 5, dtype=torch.float64)
    first[0, 0] = float("nan")
    assert torch.equal(larger(first, other).nan_to_num(9.0), first.maximum(other).nan_to_num(9.0))
    positive = torch.tensor([1e-300, 3e-7, 1.0, 7.0, 1e300], dtype=torch.float64)
    torch.testing.assert_close(inverse(positive), 1 / positive, rtol=1e-15, atol=0.0)
