"""Tests of dropout on a GPU against torch, in both passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtune
from flashtune.request.dropout import draw_seed, kept_weights
from tests.gpu.calls import Triple, tensors

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("untuned")]
DROPOUT = 0.3
# The largest error over the largest number: bf16 gradients of unlike sums.
TOLERANCE = 2e-2


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention in float64 with the weights that the next seed keeps."""
    seed = draw_seed(q.device)
    batch, heads, queries, width = q.shape
    group = heads // k.shape[1]
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    scores = q @ k.mT * width**-0.5
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril(k.shape[2] - queries)
        scores = scores.masked_fill(~seen, -torch.inf)
    numbers = torch.arange(batch * heads, device=q.device)
    stay = kept_weights(seed, numbers, torch.arange(queries, device=q.device), k.shape[2], DROPOUT)
    weights: Tensor = scores.softmax(-1) * stay.view_as(scores) / (1 - DROPOUT)
    return weights @ v


def leaves(given: Triple, dtype: torch.dtype = torch.bfloat16) -> Triple:
    q, k, v = (tensor.detach().to(dtype).requires_grad_() for tensor in given)
    return q, k, v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_dropout_of_both_passes_matches_torch(causal: bool, head_dim: int, deterministic: bool) -> None:
    given = tensors(300, 401, head_dim)
    ours, exact = leaves(given), leaves(given, torch.float64)
    torch.manual_seed(11)
    out = flashtune.attention(
        *ours, causal=causal, dropout_p=DROPOUT, prefer="generated", deterministic=deterministic
    )
    dout = torch.randn_like(out)
    torch.manual_seed(11)
    expected = plain(*exact, causal)
    found = (out, *torch.autograd.grad(out, ours, dout))
    right = (expected, *torch.autograd.grad(expected, exact, dout.double()))
    for one, other in zip(found, right, strict=True):
        assert (one.double() - other).abs().max() < TOLERANCE * other.abs().max()


def test_graph_replays_draw_new_masks() -> None:
    q, k, v = tensors(300, 400)
    plan: Any = flashtune.plan(q, k, v, dropout_p=DROPOUT, prefer="generated")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan(q, k, v)
    results = []
    for _ in range(2):
        graph.replay()
        results.append(out.clone())
    assert not torch.equal(*results)
    torch.cuda.manual_seed(5)
    graph.replay()
    first = out.clone()
    torch.cuda.manual_seed(5)
    graph.replay()
    assert torch.equal(out, first)


def test_dropout_rates() -> None:
    """With equal probabilities and values of one, a row is the kept share over its expectation."""
    # Outputs in bfloat16 are so coarse that rounding alone would widen their spread by 6 %.
    q, k, v = (torch.zeros(2, 8, 4096, 64, dtype=torch.float16, device="cuda") for _ in range(3))
    _, lse = flashtune.attention(q, k, v, dropout_p=0.1, prefer="generated", return_lse=True)
    assert (lse - torch.tensor(4096.0).log().item()).abs().max() < 1e-4
    out = flashtune.attention(q, k, torch.ones_like(v), dropout_p=0.1, prefer="generated").double()[..., 0]
    spread = (0.1 / 0.9 / 4096) ** 0.5
    assert abs(out.mean() - 1) < 2e-4
    assert abs(out.std() / spread - 1) < 0.05
