"""Tests of both loop orders on a GPU: their verification, and races."""

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from flashtune import testing
from flashtune.core.kernel import Alignment, Specialization, specialization_of
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.core.target import device_target
from flashtune.launch.binding import bind
from flashtune.launch.tensors import ForwardTensors
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.verification.cases import Level
from flashtune.verification.check import check_kernel

pytestmark = pytest.mark.gpu

FAMILIES = ("forward_q_outer", "forward_kv_outer")


PLAIN = [(causal, dtype, (64, 64)) for causal in Causal for dtype in (Dtype.BF16, Dtype.FP16, Dtype.FP32)]
PLAIN += [
    (Causal.BOTTOM_RIGHT, dtype, widths)
    for dtype in (Dtype.BF16, Dtype.FP32)
    for widths in ((8, 8), (40, 40), (64, 128), (96, 96), (256, 256))
]
# Launches of a kernel that must write equal bits.
REPEATS = 200


def make_problem(causal: Causal = Causal.NONE, **changes: Any) -> Problem:
    return testing.problem("heads=8,kv_heads=2,seqlen=1024,head_dim=64,batch=2", causal=causal, **changes)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("causal", "dtype", "widths"), PLAIN)
def test_defaults_pass_full_level(name: str, causal: Causal, dtype: Dtype, widths: tuple[int, int]) -> None:
    family, target = find_family(name), device_target()
    problem = make_problem(causal, dtype=dtype, head_dim=widths[0], value_head_dim=widths[1])
    config = family.default(problem, target)
    device = torch.device("cuda", 0)
    verdict = check_kernel(family, problem, config, Specialization(lse=True), target, device, Level.FULL)
    assert verdict.passed, verdict.failed
    assert verdict.device == torch.cuda.get_device_name(0)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("alignment", list(Alignment))
@pytest.mark.parametrize("index_bits", [32, 64])
def test_every_specialisation_passes(name: str, alignment: Alignment, index_bits: int) -> None:
    family, target = find_family(name), device_target()
    problem = make_problem(Causal.BOTTOM_RIGHT, head_dim=40)
    config = family.default(problem, target)
    device = torch.device("cuda", 0)
    specialization = Specialization(alignment, index_bits)
    verdict = check_kernel(family, problem, config, specialization, target, device, Level.QUICK)
    assert verdict.passed, verdict.failed


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("index_bits", [32, 64])
def test_strict_level_passes_beyond_2_31_elements(name: str, index_bits: int) -> None:
    family, target = find_family(name), device_target()
    problem = make_problem(Causal.BOTTOM_RIGHT)
    config = family.default(problem, target)
    device = torch.device("cuda", 0)
    specialization = Specialization(index_bits=index_bits)
    verdict = check_kernel(family, problem, config, specialization, target, device, Level.STRICT)
    assert verdict.passed, verdict.failed


def poisoned(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.full(shape, torch.nan, device=device)


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
    family, target = find_family("forward_kv_outer"), device_target()
    tile = {"block_m": block_m, "block_n": block_n, "num_warps": num_warps, "num_stages": 1}
    # More programs than multiprocessors, many turns of both loops, ragged ends.
    problem = make_problem(
        causal, heads=16, kv_heads=8, batch=16, seqlen_q=515, seqlen_kv=643, head_dim=head_dim
    )
    inputs = testing.tensors(problem, "cuda")
    q, k, v = inputs.q, inputs.k, inputs.v
    outs = [torch.empty(q.shape, dtype=q.dtype, device="cuda") for _ in range(2)]
    sums = [torch.empty(q.shape[:3], device="cuda") for _ in range(2)]
    config = msgspec.convert(tile, family.config_type)
    kernel = render(family, problem, config, specialization_of((q, k, v, outs[0]), lse=True))
    launch = bind(kernel, target, ForwardTensors(q, k, v, outs[0]), allocate=poisoned)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for repeat in range(REPEATS):
        out, lse = outs[repeat > 0], sums[repeat > 0]
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        launch((q, k, v, out, lse), inputs.scale)
        if repeat:
            differing += (outs[0].view(torch.int16) != out.view(torch.int16)).sum()
            differing += (sums[0].view(torch.int32) != lse.view(torch.int32)).sum()
    assert int(differing) == 0
    expected = testing.reference(inputs)
    testing.close(outs[0], expected.out)
    testing.close(sums[0], expected.lse)
