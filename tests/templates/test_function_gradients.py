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
from flashtune.tuner.binary.resources import read_resources

SPLIT, HOPPER, H200 = (
    find_family("backward_split"),
    find_family("backward_hopper"),
    find_target("nvidia-h200"),
)
SLOPES, TABLE, GATES = torch.rand(8), torch.rand(8, 65), torch.rand(2, 512)
ROWS = torch.rand(8, 512)
Function = Callable[..., Any]
FUNCTIONS: dict[str, tuple[Function | None, Function | None]] = {
    "slopes and causal": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), lambda b, h, q, k: q >= k),
    "relative bias": (lambda s, b, h, q, k: s + TABLE[h, (q - k).clamp(-32, 32) + 32], None),
    "gates and softcap": (lambda s, b, h, q, k: 20.0 * torch.tanh(s * GATES[b, q] / 20.0), None),
    "numbers of queries": (lambda s, b, h, q, k: s + GATES[b, q] + ROWS[h, q], None),
    "mask of heads": (None, lambda b, h, q, k: ((q - k) // 16 % 2 == 0) ^ (h % 2 == 0)),
}


# The most bytes that a kernel spills, by head dim. Gradients of captured tensors need registers for a tile of
# places or of derivatives.
SPILLED = {64: 300, 128: 64}
SPILLED_WITH_TABLES = {64: 1200, 128: 300}


def a_problem(name: str, head_dim: int, *, trains: bool, **changes: Any) -> Problem:
    functions = trace(*FUNCTIONS[name]).functions
    trained = range(len(functions.tables)) if trains else ()
    return Problem(
        dtype=Dtype.BF16, head_dim=head_dim, value_head_dim=head_dim, heads=8, kv_heads=2, batch=2,
        seqlen_q=512, seqlen_kv=512, functions=functions.with_gradients(trained),
        direction=Direction.BACKWARD, **changes,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_native_kernels_have_no_serialised_products_and_spill_few_bytes(
    name: str, head_dim: int, trains: bool
) -> None:
    problem = a_problem(name, head_dim, trains=trains)
    assert HOPPER.supports(problem, H200) is None
    kernel = render(HOPPER, problem, HOPPER.default(problem, H200), Specialization(lse=True))
    resources = read_resources(kernel, H200)
    assert not resources.serialized_wgmma
    assert resources.spill_bytes <= (SPILLED_WITH_TABLES if kernel.writes("dtables") else SPILLED)[head_dim]


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_compile(name: str, deterministic: bool) -> None:
    size = 128 if FUNCTIONS[name][1] else 0
    problem = a_problem(name, 128, trains=True, block_mask=size, deterministic=deterministic)
    assert SPLIT.supports(problem, H200) is None
    kernel = render(SPLIT, problem, SPLIT.default(problem, H200), Specialization(lse=True))
    assert kernel.writes("dtables") == bool(problem.functions.tables)
    for binary in compile_binary(kernel, H200).values():
        assert binary.metadata.shared <= H200.sram_per_block
