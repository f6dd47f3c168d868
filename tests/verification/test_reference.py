"""Tests of the reference against torch's float64 attention, and of its sampled rows."""

import functools

import pytest
import torch
from torch import Tensor

from flashtune import testing
from flashtune.core.features.records import NO_EXTRA_INPUTS
from flashtune.core.layouts import TORCH_DTYPES
from flashtune.core.problem import Causal, Direction, Dtype, Problem
from flashtune.request.functions.tracing import trace
from flashtune.verification.inputs.score_steps import away_from_steps, queries_near_steps
from flashtune.verification.lengths import equal_lengths
from flashtune.verification.reference.forward import BORDER, LAST_ROWS, Expected, Sample, expect, sample
from flashtune.verification.reference.scores import CHUNK_KEYS, CHUNK_SCORES, chunked

make_problem = functools.partial(
    testing.problem,
    "heads=4,kv_heads=2,seqlen_q=37,seqlen_kv=50,head_dim=16,value_head_dim=24,dtype=bf16,batch=2",
)


def make_tensors(problem: Problem) -> tuple[Tensor, Tensor, Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(3)
    dtype = TORCH_DTYPES[problem.dtype]
    q = torch.randn(problem.batch, problem.heads, problem.seqlen_q, problem.head_dim, generator=generator).to(
        dtype
    )
    keys = (problem.batch, problem.kv_heads, problem.seqlen_kv)
    k = torch.randn(*keys, problem.head_dim, generator=generator).to(dtype)
    v = torch.randn(*keys, problem.value_head_dim, generator=generator).to(dtype)
    return q, k, v, generator


def expect_all(problem: Problem, scale: float = 0.3) -> tuple[Expected, Tensor, Tensor, Tensor]:
    q, k, v, generator = make_tensors(problem)
    return expect(problem, q, k, v, scale, sample(problem, generator)), q, k, v


@pytest.mark.parametrize("causal", list(Causal))
@pytest.mark.parametrize("lengths", [(37, 50), (50, 37), (1, 9), (9, 1), (20, 20)])
def test_reference_is_float64_attention(causal: Causal, lengths: tuple[int, int]) -> None:
    problem = make_problem(causal=causal, seqlen_q=lengths[0], seqlen_kv=lengths[1])
    expected, q, k, v = expect_all(problem)
    rows = torch.arange(problem.seqlen_q)[:, None]
    mask = torch.arange(problem.seqlen_kv) <= rows + problem.diagonal
    if causal is Causal.NONE:
        mask = torch.ones_like(mask)
    wide_k, wide_v = (tensor.double().repeat_interleave(2, 1) for tensor in (k, v))
    scores = (q.double() @ wide_k.mT * 0.3).masked_fill(~mask, float("-inf"))
    torch.testing.assert_close(expected.lse, scores.logsumexp(-1).flatten(0, 1))
    weights = scores.softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(expected.out, (weights @ wide_v).flatten(0, 1))


def test_rows_without_keys_must_be_exact() -> None:
    problem = make_problem(causal=Causal.BOTTOM_RIGHT, seqlen_q=30, seqlen_kv=20)
    expected, *_ = expect_all(problem)
    assert (expected.out[:, :10] == 0).all()
    assert (expected.allowed[:, :10] == 0).all()
    assert expected.lse[:, :10].isneginf().all()
    assert (expected.allowed[:, 10:] > 0).all()


@pytest.mark.parametrize(("dtype", "largest"), [(Dtype.BF16, 0.2), (Dtype.FP16, 0.02), (Dtype.FP32, 1e-4)])
def test_bounds_follow_the_precision(dtype: Dtype, largest: float) -> None:
    expected, *_ = expect_all(make_problem(dtype=dtype))
    assert 0 < expected.allowed.max() < largest
    assert expected.lse_allowed.max() < 1e-4


def test_bounds_shrink_where_rows_average_more_keys() -> None:
    expected, *_ = expect_all(make_problem(causal=Causal.TOP_LEFT, seqlen_q=600, seqlen_kv=600), scale=0.05)
    assert expected.allowed[:, -50:].mean() < 0.2 * expected.allowed[:, :10].mean()


def test_long_problems_are_sampled_at_bounds_and_at_the_end() -> None:
    problem = make_problem(seqlen_q=16384, seqlen_kv=16384, heads=64, kv_heads=8, batch=4)
    heads, rows = (set(part.tolist()) for part in sample(problem, torch.Generator().manual_seed(1)))
    assert set(range(16384 - LAST_ROWS, 16384)) <= rows
    assert {0, BORDER - 1, BORDER, 77 * BORDER - 1, 77 * BORDER} <= rows
    assert len(rows) < 1000
    assert {0, 4 * 64 - 1} <= heads
    assert len(heads) < 4 * 64


def test_chunking_does_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem()
    whole, q, k, v = expect_all(problem)
    monkeypatch.setitem(CHUNK_SCORES, "cpu", 1)
    chosen = Sample(torch.arange(8), torch.arange(problem.seqlen_q))
    for result, other in zip(whole, expect(problem, q, k, v, 0.3, chosen), strict=True):
        torch.testing.assert_close(result, other)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_copies_of_keys_do_not_change_results(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int
) -> None:
    problem = make_problem(heads=heads, kv_heads=kv_heads, seqlen_q=2)
    whole, q, k, v = expect_all(problem)
    monkeypatch.setitem(CHUNK_KEYS, "cpu", 50 * (16 + 24))
    chosen = Sample(torch.arange(2 * heads), torch.arange(2))
    shared = {chunk.copies for chunk in chunked(problem, chosen.heads, 2, "cpu")}
    assert shared == {1}
    for result, other in zip(whole, expect(problem, q, k, v, 0.3, chosen), strict=True):
        torch.testing.assert_close(result, other)


@pytest.mark.parametrize("rows", [1, 16, 500])
@pytest.mark.parametrize(
    "fields",
    [
        {"heads": 128, "kv_heads": 1, "batch": 64, "seqlen_kv": 4096, "head_dim": 576, "value_head_dim": 512},
        {"heads": 128, "kv_heads": 1, "batch": 7, "seqlen_kv": 49153, "head_dim": 576, "value_head_dim": 512},
        {"heads": 32, "kv_heads": 8, "batch": 64, "seqlen_kv": 8192, "head_dim": 128, "value_head_dim": 128},
        {"heads": 64, "kv_heads": 64, "batch": 8, "seqlen_kv": 131072, "head_dim": 64, "value_head_dim": 64},
    ],
)
def test_chunk_size_is_bounded(fields: dict[str, int], rows: int) -> None:
    problem = make_problem(**fields)
    heads = torch.arange(problem.batch * problem.heads)
    chunks = chunked(problem, heads, rows, "cuda")
    assert torch.equal(torch.cat([chunk.heads for chunk in chunks]), heads)
    elements = problem.seqlen_kv * (problem.head_dim + problem.value_head_dim)
    for chunk in chunks:
        assert len(chunk.heads) * rows * problem.seqlen_kv <= CHUNK_SCORES["cuda"] or len(chunk.heads) == 1
        assert chunk.copies * elements <= CHUNK_KEYS["cuda"]
        assert chunk.copies == len(chunk.heads) or len(set((chunk.heads // problem.group_size).tolist())) == 1
    # Launches of many small chunks would take longer than the work.
    assert len(chunks) <= 2 * problem.batch * max(problem.kv_heads, problem.heads * rows // 128)


def test_small_problem_is_one_chunk() -> None:
    problem = make_problem()
    (chunk,) = chunked(problem, torch.arange(8), 37, "cpu")
    assert chunk.copies == len(chunk.heads) == 8


def test_rows_whose_scores_are_minus_infinity_must_be_exact() -> None:
    functions = trace(lambda s, b, h, q, k: 2 * torch.where((s < 9) & (q > 9), s, -torch.inf), None).functions
    expected, *_ = expect_all(make_problem(functions=functions))
    assert (expected.out[:, :10] == 0).all()
    assert (expected.allowed[:, :10] == 0).all()
    assert expected.lse[:, :10].isneginf().all()
    assert expected.lse[:, 10:].isfinite().all()
    assert (expected.allowed[:, 10:] > 0).all()


def test_derivatives_of_score_functions_enlarge_tolerances() -> None:
    functions = trace(lambda s, b, h, q, k: s * 900, None).functions
    problem = make_problem(dtype=Dtype.FP32, functions=functions)
    q, k, v, generator = make_tensors(problem)
    rows = sample(problem, generator)
    expected = expect(problem, q, k, v, 0.01, rows)
    # A change of each score by a few roundoffs of its bound, as by the order of the sum of its products.
    bound = q.norm(dim=-1).amax() * k.norm(dim=-1).amax() * 2.0**-22
    columns = (
        torch.nn.functional.pad(q, (0, 1), value=float(bound)),
        torch.nn.functional.pad(k, (0, 1), value=1.0),
    )
    columns[1][..., ::2, -1] = -1.0
    moved = expect(problem, *columns, v, 0.01, rows)
    change = (moved.out - expected.out).abs().amax(-1)
    assert (change <= expected.allowed).all()
    assert (change > 0.01 * expected.allowed).any()


@pytest.mark.parametrize("is_backward", [False, True])
def test_queries_with_scores_near_steps_are_changed(is_backward: bool) -> None:
    # The derivative alone has a step.
    functions = trace(lambda s, b, h, q, k: s.abs(), None).functions
    direction = Direction.BACKWARD if is_backward else Direction.FORWARD
    problem = make_problem(functions=functions, seqlen_q=300, seqlen_kv=2000, direction=direction)
    q, k, v, _ = make_tensors(problem)
    k[:, :, 7] = 0.0
    k[:, :, 7, :2] = torch.tensor([1.0, -1.0])
    q[:, :, 5, 1] = q[:, :, 5, 0]
    everything = Sample(torch.arange(problem.batch * problem.heads), torch.arange(problem.seqlen_q))
    case = 0.3, NO_EXTRA_INPUTS, equal_lengths(problem), everything
    near = queries_near_steps(problem, (q, k, v), *case)
    changed = away_from_steps(problem, (q, k, v), *case, torch.Generator().manual_seed(0))
    rows = (changed != q).any(-1)
    if not is_backward:
        assert near is None
        assert not rows.any()
        return
    assert near is not None
    assert near[:, :, 5].all()
    assert torch.equal(rows, near)
    left = queries_near_steps(problem, (changed, k, v), *case)
    assert left is not None
    assert not left.any()
