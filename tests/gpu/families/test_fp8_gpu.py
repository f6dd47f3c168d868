"""Tests of quantised inputs on a Hopper GPU: tolerances, and attention with scales."""

from collections.abc import Iterator
from typing import NamedTuple, TypedDict

import msgspec
import pytest
import torch
from torch import Tensor

import flashtune
from flashtune import testing
from flashtune.core.errors import ProblemError
from flashtune.core.features.records import ExtraInputs
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal, Problem
from flashtune.core.target import device_target
from flashtune.dispatch.tables import Tables
from flashtune.request.quantization import quantize
from flashtune.templates.family import Family
from flashtune.templates.registry import families
from flashtune.verification.cases import Level
from flashtune.verification.check import check_kernel, check_rendered
from flashtune.verification.reference.forward import expect, sample
from flashtune.verification.tolerance import worst_ratio
from tests.problems.plain_e4m3 import CONFIG, MISTAKES, PROBLEM, plain_e4m3
from tests.support.runtime import Tuned, using

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::flashtune.core.notices.FlashtuneWarning")]

HOPPER = 90


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if device_target().capability != HOPPER:
        pytest.skip("only Hopper's kernels take e4m3")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.mark.parametrize("index_bits", [32, 64])
def test_correct_kernel_passes_full_level(device: torch.device, index_bits: int) -> None:
    verdict = check_rendered(plain_e4m3(index_bits), PROBLEM, CONFIG, device_target(), device, Level.FULL)
    assert verdict.passed, verdict.failed
    assert verdict.worst_ratio < 0.9


@pytest.mark.slow
def test_correct_kernel_passes_at_long_lengths(device: torch.device) -> None:
    long = msgspec.structs.replace(PROBLEM, batch=1, seqlen_kv=32768)
    verdict = check_rendered(plain_e4m3(), long, CONFIG, device_target(), device, Level.FULL)
    assert verdict.passed, verdict.failed


@pytest.mark.parametrize(("old", "new"), MISTAKES)
def test_broken_kernels_are_refused(device: torch.device, old: str, new: str) -> None:
    kernel = plain_e4m3()
    broken = msgspec.structs.replace(kernel, source=kernel.source.replace(old, new))
    assert not check_rendered(broken, PROBLEM, CONFIG, device_target(), device, Level.FULL, seed=4).passed


def quantized_families(problem: Problem) -> list[Family]:
    return [family for family in families() if family.supports(problem, device_target()) is None]


@pytest.mark.parametrize("causal", list(Causal))
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("lse", [False, True])
def test_defaults_of_families_pass_full_level(
    device: torch.device, causal: Causal, width: int, lse: bool
) -> None:
    problem = msgspec.structs.replace(
        PROBLEM, head_dim=width, value_head_dim=width, seqlen_kv=1024, causal=causal
    )
    able = quantized_families(problem)
    if not able:
        pytest.skip("no family takes this problem")
    for family in able:
        config = family.default(problem, device_target())
        verdict = check_kernel(family, problem, config, Specialization(lse=lse), device_target(), device)
        assert verdict.passed, verdict.failed


class Named(TypedDict, total=False):
    """Scales as `attention` takes them."""

    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor


class Inputs(NamedTuple):
    """Quantised inputs, their problem and their scales."""

    problem: Problem
    tensors: tuple[Tensor, Tensor, Tensor]
    scales: Named


@pytest.fixture
def inputs() -> Iterator[Inputs]:
    """Inputs of head dim 128; nothing is tuned, whatever ships for this GPU."""
    problem = testing.problem(
        "heads=8,kv_heads=2,seqlen_q=500,seqlen_kv=700,head_dim=128,dtype=e4m3,causal,batch=2"
    )
    if not quantized_families(problem):
        pytest.skip("no family takes quantised inputs")
    generator = torch.Generator("cuda").manual_seed(5)
    shapes = ((2, 8, 500, 128), (2, 2, 700, 128), (2, 2, 700, 128))
    sizes = (3.0, 0.2, 40.0)
    pairs = [
        quantize(size * torch.randn(shape, generator=generator, device="cuda"))
        for shape, size in zip(shapes, sizes, strict=True)
    ]
    (q, q_scale), (k, k_scale), (v, v_scale) = pairs
    with using(Tuned(Tables({}, {}))):
        yield Inputs(problem, (q, k, v), {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale})


def assert_right(inputs: Inputs, out: Tensor, scales: Named, scale: float | None = None) -> None:
    problem = inputs.problem
    chosen = sample(problem, torch.Generator("cuda").manual_seed(1))
    q, k, v = inputs.tensors
    if scale is not None and scale < 0:
        q, scale = (-q.float()).to(q.dtype), -scale
    extra_inputs = ExtraInputs(scales.get("q_scale"), scales.get("k_scale"), scales.get("v_scale"))
    expected = expect(problem, q, k, v, scale or problem.head_dim**-0.5, chosen, extra_inputs)
    rows = out.flatten(0, 1)[chosen.heads][:, chosen.rows]
    assert out.dtype is torch.bfloat16
    assert worst_ratio(rows, expected.out, expected.allowed).item() <= 1


def test_attention_uses_the_scales_that_are_given(inputs: Inputs) -> None:
    q, k, v = inputs.tensors
    assert_right(inputs, flashtune.attention(q, k, v, causal=True, **inputs.scales), inputs.scales)
    scalar = torch.full((), 0.01, device="cuda")
    some: tuple[Named, ...] = (
        {},
        {"q_scale": inputs.scales["q_scale"]},
        {"k_scale": inputs.scales["k_scale"]},
        {"v_scale": inputs.scales["v_scale"]},
        {"q_scale": scalar.expand(2, 8), "k_scale": scalar.expand(2, 2)},
    )
    for scales in some:
        # Elements without their scale are large: scores keep their size by the softmax scale.
        out = flashtune.attention(q, k, v, causal=True, scale=1e-5, **scales)
        assert_right(inputs, out, scales, 1e-5)
    negative = flashtune.attention(q, k, v, causal=True, scale=-0.1, **inputs.scales)
    assert_right(inputs, negative, inputs.scales, -0.1)


def test_layouts_and_log_sum_exp(inputs: Inputs) -> None:
    q, k, v = inputs.tensors
    moved = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    out, lse = flashtune.attention(*moved, causal=True, layout="bshd", return_lse=True, **inputs.scales)
    assert_right(inputs, out.transpose(1, 2), inputs.scales)
    assert lse.isfinite().all()


def test_plans_are_captured_and_replayed_with_new_values(inputs: Inputs) -> None:
    q, k, v = inputs.tensors
    planned = flashtune.plan(q, k, v, causal=True, **inputs.scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = planned(q, k, v, **inputs.scales)
    inputs.scales["v_scale"].mul_(3.0)
    v.copy_(v.flip(2))
    graph.replay()
    assert_right(inputs, out, inputs.scales)


def test_compiled_programs_support_scales(inputs: Inputs) -> None:
    @torch.compile(fullgraph=True)
    def program(q: Tensor, k: Tensor, v: Tensor, scales: Named) -> Tensor:
        return 2.0 * flashtune.attention(q, k, v, causal=True, **scales)

    assert_right(inputs, program(*inputs.tensors, inputs.scales) / 2.0, inputs.scales)


def test_tensors_that_tma_cannot_address_are_refused(inputs: Inputs) -> None:
    q, k, v = (tensor[..., :120].contiguous() for tensor in inputs.tensors)
    with pytest.raises(ProblemError):
        flashtune.attention(q, k, v, causal=True)
