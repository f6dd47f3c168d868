"""Backward kernels of score and mask functions compile for Hopper, with a default config that fits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Direction, Dtype, Problem
from flashtune.core.target import find_target
from flashtune.launch.binding import compile_binary
from flashtune.request.functions.tracing import trace
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render

SPLIT, H200 = find_family("backward_split"), find_target("nvidia-h200")
SLOPES, TABLE, GATES = torch.rand(8), torch.rand(8, 65), torch.rand(2, 512)
Function = Callable[..., Any]
FUNCTIONS: dict[str, tuple[Function | None, Function | None]] = {
    "slopes and causal": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), lambda b, h, q, k: q >= k),
    "relative bias": (lambda s, b, h, q, k: s + TABLE[h, (q - k).clamp(-32, 32) + 32], None),
    "gates and softcap": (lambda s, b, h, q, k: 20.0 * torch.tanh(s * GATES[b, q] / 20.0), None),
    "mask of heads": (None, lambda b, h, q, k: ((q - k) // 16 % 2 == 0) ^ (h % 2 == 0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_compile(name: str, deterministic: bool) -> None:
    functions = trace(*FUNCTIONS[name]).functions
    problem = Problem(
        dtype=Dtype.BF16, head_dim=128, value_head_dim=128, heads=8, kv_heads=2, batch=2, seqlen_q=512,
        seqlen_kv=512, functions=functions.with_gradients(range(len(functions.tables))),
        block_mask=128 if functions.mask >= 0 else 0, direction=Direction.BACKWARD,
        deterministic=deterministic,
    )  # fmt: skip
    assert SPLIT.supports(problem, H200) is None
    kernel = render(SPLIT, problem, SPLIT.default(problem, H200), Specialization(lse=True))
    assert kernel.writes("dtables") == bool(functions.tables)
    for binary in compile_binary(kernel, H200).values():
        assert binary.metadata.shared <= H200.sram_per_block
