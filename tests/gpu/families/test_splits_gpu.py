"""Tests on a GPU of kernels that split keys: CUDA graphs with lengths that change on the device."""

from typing import Any

import pytest
import torch

from flashtune import testing
from flashtune.core.kernel import Specialization
from flashtune.core.target import device_target
from flashtune.launch.binding import bind
from flashtune.launch.tensors import ForwardTensors
from flashtune.templates.forward_hopper.perf_model import split_variants as hopper_variants
from flashtune.templates.forward_masked.perf_model import split_variants as masked_variants
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.verification.lengths import Lengths
from tests.problems.plain_masks import plain_attention

pytestmark = pytest.mark.gpu

SHAPE = "heads=8,kv_heads=1,head_dim=128,dtype=bf16,batch=3,seqlen_q=40,seqlen_kv=8192,causal"
LENGTHS = (8000, 5, 3001), (17, 8192, 64), (0, 1, 2)
FEATURES = [
    {"kv_lengths": True},
    {"page_size": 16, "window_left": 2000},
    {"packed": 57, "page_size": 64, "sinks": True},
]


@pytest.mark.parametrize("family", ["forward_masked", "forward_hopper"])
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_graphs_are_replayed_with_other_lengths(family: str, features: dict[str, Any]) -> None:
    problem, target = testing.problem(SHAPE, **features), device_target()
    if find_family(family).supports(problem, target) is not None:
        pytest.skip(f"{family} does not run here")
    variants = hopper_variants if family == "forward_hopper" else masked_variants
    config: Any = [*variants(problem, find_family(family).default(problem, target), target)][-1]  # type: ignore[arg-type]
    kernel = render(find_family(family), problem, config, Specialization(lse=True))
    queries = (40, 3, 14) if problem.packed else (40,) * 3
    inputs = testing.tensors(problem, device="cuda", layout="bshd", lengths=Lengths(queries, (8192,) * 3))
    q, k, v, side = inputs.q, inputs.k, inputs.v, inputs.extra
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
    launch = bind(kernel, target, ForwardTensors(q, k, v, out), side)
    launch((q, k, v, out, lse), 0.09, side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch((q, k, v, out, lse), 0.09, side)
    assert side.seqlens_kv is not None
    for keys in LENGTHS:
        side.seqlens_kv.copy_(torch.tensor(keys, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        here: dict[str, Any] = {
            name: value.cpu() for name, value in side._asdict().items() if isinstance(value, torch.Tensor)
        }
        expected = plain_attention(problem, q.cpu(), k.cpu(), v.cpu(), side._replace(**here), 0.09)
        for result, exact in zip((out, lse), expected, strict=True):
            torch.testing.assert_close(result.cpu().double(), exact, atol=2e-2, rtol=2e-2)
