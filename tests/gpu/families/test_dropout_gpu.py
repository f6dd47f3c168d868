"""Tests of dropout on a GPU, in both passes."""

from typing import Any

import pytest
import torch

import flashtune
from tests.gpu.calls import tensors

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("untuned")]
DROPOUT = 0.3


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
