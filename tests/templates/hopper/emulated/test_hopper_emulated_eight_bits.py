"""Tests of emulated 8-bit Hopper kernels: the layout of probabilities and values."""

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from flashtune.core.features.records import NO_EXTRA_INPUTS
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.request.quantization import E4M3
from flashtune.templates.rendering import render
from tests.emulator.program import emulate
from tests.problems.hopper import FAMILY, a_config, a_problem
from tests.problems.plain_masks import largest_error, plain_attention

UNTOUCHED = 777.0
TWO = {
    "num_consumer_groups": 2,
    "rows_per_group": 64,
    "block_n": 64,
    "num_stages": 2,
    "q_stages": 1,
    "ping_pong": True,
}
THREE = {**TWO, "num_consumer_groups": 3, "q_stages": 2, "p_stages": 1}
EARLY = {**THREE, "p_stages": 2, "conditional_rescale": False, "ping_pong": False}
CONFIGS = pytest.mark.parametrize("config", [TWO, THREE, EARLY], ids=["registers", "shared", "two tiles"])


def in_order_of_weights(v: Tensor) -> Tensor:
    """Values as the kernel's prologue leaves them, [batch, kv_heads, head_dim, keys in groups of sixteen]."""
    batch, heads, keys, width = v.shape
    whole = torch.zeros(batch, heads, -(-keys // 16) * 16, width, dtype=v.dtype)
    whole[:, :, :keys] = v
    # Place 4t + 2b + c of sixteen holds key 8b + 2t + c.
    exchanged = whole.view(batch, heads, -1, 2, 4, 2, width).permute(0, 1, 6, 2, 4, 3, 5)
    return exchanged.reshape(batch, heads, width, -1)


def worst_error(problem: Problem, config: dict[str, Any]) -> float:
    """Of outputs and log-sum-exps over plain attention; numbers are not rounded."""
    kernel = render(FAMILY, problem, a_config(problem, **config), Specialization(lse=True))
    chance = torch.Generator().manual_seed(2)

    def drawn(heads: int, length: int, width: int) -> tuple[Tensor, Tensor]:
        values = torch.randn(problem.batch, heads, length, width, generator=chance, dtype=torch.float64)
        return values, 0.5 + torch.rand(problem.batch, heads, generator=chance, dtype=torch.float64)

    q, q_scale = drawn(problem.heads, problem.seqlen_q, problem.head_dim)
    k, k_scale = drawn(problem.kv_heads, problem.seqlen_kv, problem.head_dim)
    v, v_scale = drawn(problem.kv_heads, problem.seqlen_kv, problem.value_head_dim)
    scale = problem.head_dim**-0.5
    scaled_q, scaled_k, scaled_v = (
        tensor * by[:, :, None, None] for tensor, by in ((q, q_scale), (k, k_scale), (v, v_scale))
    )
    expected = plain_attention(problem, scaled_q, scaled_k, scaled_v, NO_EXTRA_INPUTS, scale)
    out = torch.full((*q.shape[:3], v.shape[3]), UNTOUCHED, dtype=torch.float64)
    lse = torch.full(q.shape[:3], UNTOUCHED, dtype=torch.float64)
    inputs = (q, k, in_order_of_weights(v))
    like = (
        *(torch.empty(tensor.shape, dtype=E4M3, device="meta") for tensor in inputs),
        out.to("meta").bfloat16(),
    )
    memory = (*(tensor.flatten().numpy() for tensor in inputs), out.view(-1).numpy())
    scales = tuple(tensor.flatten().numpy() for tensor in (q_scale, k_scale, v_scale))
    emulate(kernel, like, memory, scales, lse.view(-1).numpy(), scale, 2)
    return largest_error((out, lse), expected)


@pytest.mark.slow
@CONFIGS
@pytest.mark.parametrize("causal", list(Causal))
def test_probabilities_match_their_values(config: dict[str, Any], causal: Causal) -> None:
    problem = a_problem(32, dtype=Dtype.E4M3, causal=causal, heads=4, kv_heads=2)
    for queries, keys in ((300, 300), (129, 340), (200, 70)):
        shape = msgspec.structs.replace(problem, seqlen_q=queries, seqlen_kv=keys)
        assert worst_error(shape, config) < 1e-12, (queries, keys)


@pytest.mark.slow
@CONFIGS
def test_windows(config: dict[str, Any]) -> None:
    problem = a_problem(32, dtype=Dtype.E4M3, heads=2, kv_heads=1, batch=1, seqlen_q=400, seqlen_kv=420)
    for sides in ({"window_left": 70}, {"window_left": 65, "window_right": 63}, {"window_right": 30}):
        assert worst_error(msgspec.structs.replace(problem, **sides), config) < 1e-12, sides
