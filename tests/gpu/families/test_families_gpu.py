"""Tests of both loop orders on a GPU: references, addresses beyond 2^31, and races."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune import testing
from flashtune.core.config import Config
from flashtune.core.kernel import Alignment, specialization_of
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.core.target import device_target
from flashtune.launch.binding import bind
from flashtune.launch.launch import Launch
from flashtune.launch.tensors import ForwardTensors
from flashtune.templates.family import Family
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render

pytestmark = pytest.mark.gpu

FORWARD = [find_family(name) for name in ("forward_q_outer", "forward_kv_outer")]
BY_FAMILY = pytest.mark.parametrize("family", FORWARD, ids=lambda family: family.name)
REPEATS = 200


def a_problem(widths: tuple[int, int], lengths: tuple[int, int], **changes: Any) -> Problem:
    shape = f"seqlen_q={lengths[0]},seqlen_kv={lengths[1]},head_dim={widths[0]},value_head_dim={widths[1]}"
    return testing.problem(f"heads=4,kv_heads=2,batch=2,{shape}", **changes)


def make_inputs(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    inputs = testing.tensors(problem, "cuda")
    return inputs.q.contiguous(), inputs.k.contiguous(), inputs.v.contiguous()


def poisoned(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.full(shape, torch.nan, device=device)


def launch_of(
    family: Family, problem: Problem, config: Config | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor
) -> Launch:
    target = device_target(0)
    kernel = render(
        family,
        problem,
        config or family.default(problem, target),
        specialization_of((q, k, v, out), lse=True),
    )
    return bind(kernel, target, ForwardTensors(q, k, v, out), allocate=poisoned)


def check(
    family: Family, problem: Problem, q: Tensor, k: Tensor, v: Tensor, config: Config | None = None
) -> None:
    out = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype, device="cuda")
    lse = poisoned(tuple(q.shape[:3]), q.device)
    scale = problem.head_dim**-0.5
    launch_of(family, problem, config, q, k, v, out)((q, k, v, out, lse), scale)
    expected = testing.reference(testing.Inputs(problem, q, k, v, scale))
    testing.close(out, expected.out)
    testing.close(lse, expected.lse)


@BY_FAMILY
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16, Dtype.FP32])
@pytest.mark.parametrize("widths", [(8, 8), (40, 40), (64, 128), (96, 96), (128, 128), (256, 256)])
def test_default_configs_are_correct(family: Family, dtype: Dtype, widths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    for causal in Causal:
        for lengths in ((1, 300), (257, 191), (129, 513)):
            problem = a_problem(widths, lengths, dtype=dtype, causal=causal)
            check(family, problem, *make_inputs(problem))


@BY_FAMILY
def test_misaligned_views(family: Family) -> None:
    torch.manual_seed(0)
    problem = a_problem((64, 64), (130, 190))
    wide = [
        torch.randn(2, n, h, 67, dtype=torch.bfloat16, device="cuda")
        for n, h in ((130, 4), (190, 2), (190, 2))
    ]
    q, k, v = (tensor[..., 1:65].transpose(1, 2) for tensor in wide)
    assert specialization_of((q, k, v), lse=False).alignment is Alignment.ANY
    check(family, problem, q, k, v)


@pytest.mark.alone
@BY_FAMILY
def test_offsets_beyond_32_bits(family: Family) -> None:
    """Two sequences more than 2^31 elements apart."""
    torch.manual_seed(0)
    problem = a_problem((64, 64), (200, 200), causal=Causal.BOTTOM_RIGHT)
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of GPU memory")
    inputs: list[Tensor] = []
    for tensor in make_inputs(problem):
        apart = 2**31 + 64
        memory = torch.empty(apart + tensor[0].numel(), dtype=tensor.dtype, device="cuda")
        view = memory.as_strided(tensor.shape, (apart, *tensor.stride()[1:]))
        inputs.append(view.copy_(tensor))
    assert specialization_of(tuple(inputs), lse=False).index_bits == 64
    q, k, v = inputs
    check(family, problem, q, k, v)


@pytest.mark.parametrize("causal", list(Causal))
@pytest.mark.parametrize(
    ("block_m", "block_n", "num_warps", "head_dim"),
    [
        (16, 16, 4, 16),
        (16, 64, 8, 64),
        (64, 16, 2, 64),
        (32, 32, 16, 40),
        (128, 64, 8, 128),
        (64, 32, 4, 256),
    ],
)
def test_kv_outer_has_no_races(
    block_m: int, block_n: int, num_warps: int, head_dim: int, causal: Causal
) -> None:
    """Rows go through global memory between blocks of keys: equal bits in every run, right ones."""
    family = find_family("forward_kv_outer")
    config = family.config_type(  # type: ignore[call-arg]
        block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=1
    )
    torch.manual_seed(0)
    # More programs than multiprocessors, many turns of both loops, ragged ends.
    problem = a_problem((head_dim, head_dim), (515, 643), causal=causal, batch=16, heads=16, kv_heads=8)
    q, k, v = make_inputs(problem)
    check(family, problem, q, k, v, config)
    results = [
        torch.full((*q.shape[:3], head_dim), torch.nan, dtype=q.dtype, device="cuda") for _ in range(2)
    ]
    sums = [poisoned(tuple(q.shape[:3]), q.device) for _ in range(2)]
    launch = launch_of(family, problem, config, q, k, v, results[0])
    launch((q, k, v, results[0], sums[0]), 0.1)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS):
        results[1].fill_(torch.nan)
        sums[1].fill_(torch.nan)
        launch((q, k, v, results[1], sums[1]), 0.1)
        differing += (results[0].view(torch.int16) != results[1].view(torch.int16)).sum()
        differing += (sums[0].view(torch.int32) != sums[1].view(torch.int32)).sum()
    assert int(differing) == 0
