"""Tests of quantised inputs: scales, refusals, and arguments of executors and launches."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtune
from flashtune.core.errors import ProblemError
from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.problem import Dtype
from flashtune.launch.launch import MIN_SCALE, launch_of
from flashtune.launch.tensors import ForwardTensors
from flashtune.launch.workspaces import Workspaces, allocate_workspace
from flashtune.request.call import dense_call
from flashtune.request.quantization import negated, quantize
from flashtune.request.read_call import read_call
from flashtune.request.request import Prefer
from flashtune.runtime.call_key import call_key
from tests.emulator.tensor_maps import Noted, queued
from tests.support.machine import Machine

BATCH, HEADS, KV_HEADS, ROWS, WIDTH = 2, 4, 2, 16, 32
E4M3 = torch.float8_e4m3fn
CPU = torch.device("cpu")
Triple = tuple[Tensor, Tensor, Tensor]


def normal(heads: int) -> Tensor:
    return torch.randn(BATCH, heads, ROWS, WIDTH, generator=torch.Generator().manual_seed(heads))


@pytest.fixture
def tensors() -> Triple:
    q, k, v = (quantize(normal(heads))[0] for heads in (HEADS, KV_HEADS, KV_HEADS))
    return q, k, v


def scale_of(heads: int, value: float = 0.5) -> Tensor:
    return torch.full((BATCH, heads), value)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantize_uses_the_whole_range_of_each_head(layout: str, dtype: torch.dtype) -> None:
    sizes = torch.tensor([[0.01, 1.0, 30.0, 5e4], [1.0, 0.0, 2.0, 1e-5]])
    tensor = (normal(HEADS) * sizes[:, :, None, None]).to(dtype)
    view = tensor if layout == "bhsd" else tensor.transpose(1, 2)
    elements, scale = quantize(view, layout=layout)
    assert (elements.dtype, elements.shape, elements.is_contiguous()) == (E4M3, view.shape, True)
    assert (scale.dtype, scale.shape) == (torch.float32, (BATCH, HEADS))
    heads_first = elements if layout == "bhsd" else elements.transpose(1, 2)
    largest = heads_first.float().abs().amax((2, 3))
    assert (largest == torch.where(sizes == 0, 0.0, 448.0)).all()
    assert scale[1, 1] == 1, "a head of zeros has a scale that divides"
    back = heads_first.float() * scale[:, :, None, None]
    # Half a unit in the last place, or of the smallest step below the normal numbers.
    allowed = torch.maximum(tensor.float().abs() * 2**-4, scale[:, :, None, None] * 2**-10)
    assert ((back - tensor.float()).abs() <= 1.001 * allowed).all()


def test_quantize_accepts_empty_and_refuses_invalid_tensors() -> None:
    elements, scale = quantize(torch.empty(2, 3, 0, 8))
    assert elements.shape == (2, 3, 0, 8)
    assert torch.equal(scale, torch.ones(2, 3))
    with pytest.raises(ProblemError, match="3 dimensions"):
        quantize(torch.zeros(1, 2, 3))
    with pytest.raises(ProblemError, match=r"torch\.int32"):
        quantize(torch.zeros(1, 2, 3, 4, dtype=torch.int32))
    with pytest.raises(ProblemError, match="layout cannot be 'hbsd'"):
        quantize(torch.zeros(1, 2, 3, 4), layout="hbsd")


def test_negation_flips_only_signs(tensors: Triple) -> None:
    assert torch.equal(negated(tensors[0]).float(), -tensors[0].float())
    assert torch.equal(negated(torch.ones(2)), -torch.ones(2))


def test_a_request_of_quantized_inputs_has_a_wider_output(tensors: Triple) -> None:
    request = read_call(dense_call(*tensors, causal=True))
    assert request.problem.dtype is Dtype.E4M3
    assert request.out_dtype is torch.bfloat16
    assert request.prefer is Prefer.GENERATED, "no baseline takes such tensors"


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (
            ExtraInputs(q_scale=torch.ones(BATCH, KV_HEADS)),
            r"q_scale is torch.float32 of shape \[2, 2\]: .* \[2, 4\]",
        ),
        (
            ExtraInputs(k_scale=torch.ones(BATCH, HEADS)),
            r"k_scale .* of shape \[2, 4\]: pass float32 of shape \[2, 2\]",
        ),
        (ExtraInputs(v_scale=torch.ones(KV_HEADS)), r"v_scale .* of shape \[2\]"),
        (ExtraInputs(v_scale=torch.ones(BATCH, KV_HEADS).half()), "v_scale is torch.float16"),
        (ExtraInputs(k_scale=torch.ones(BATCH, KV_HEADS, device="meta")), "k_scale is on meta and q on cpu"),
        (ExtraInputs(q_scale=0.5), "q_scale is a float"),  # type: ignore[arg-type]
    ],
)
def test_mismatched_scales_are_refused(tensors: Triple, scales: ExtraInputs, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        read_call(dense_call(*tensors)._replace(side=scales))


def test_quantized_inputs_need_a_gpu_and_no_gradient(tensors: Triple) -> None:
    q, k, v = tensors
    for call in (flashtune.attention, flashtune.plan, flashtune.explain):
        with pytest.raises(ProblemError, match="on cpu and e4m3 is computed on a GPU alone"):
            call(q, k, v, v_scale=scale_of(KV_HEADS))


def test_call_key_depends_on_presence_of_scales_not_on_values(tensors: Triple) -> None:
    q, k, v = tensors

    def key(*scales: Any) -> tuple[object, ...]:
        return call_key(dense_call(q, k, v)._replace(side=ExtraInputs(*scales)))

    first, second = scale_of(HEADS), scale_of(HEADS, 3.0)
    assert key(first, None, None) == key(second, None, None)
    presences = {
        key(first, None, None),
        key(None, first, None),
        key(first, first, first),
        key(first, first, None),
    }
    presences.add(call_key(dense_call(q, k, v)))
    assert len(presences) == 5


BackwardCase = dict[str, Any]


@pytest.fixture
def launches(machine: Machine) -> list[BackwardCase]:
    """Launches that note their arguments."""
    calls: list[BackwardCase] = []

    def launch(
        tensors: tuple[Tensor, ...],
        scale: float,
        side: ExtraInputs = NO_EXTRA_INPUTS,
    ) -> None:
        q, _, _, out, lse = tensors
        calls.append({"q": q, "out": out, "lse": lse, "scale": scale, "scales": side})
        out.zero_()

    machine.launch = lambda *_, **__: launch
    return calls


def test_call_allocates_wider_output_and_passes_scales(tensors: Triple, launches: list[BackwardCase]) -> None:
    q, k, v = tensors
    q_scale, spread = scale_of(HEADS), torch.tensor([[3.0], [5.0]]).expand(BATCH, KV_HEADS)
    out, lse = flashtune.attention(q, k, v, scale=-0.3, return_lse=True, q_scale=q_scale, v_scale=spread)
    assert (out.dtype, out.shape) == (torch.bfloat16, (BATCH, HEADS, ROWS, WIDTH))
    assert (lse.dtype, lse.shape) == (torch.float32, (BATCH, HEADS, ROWS))
    (launch,) = launches
    assert launch["scale"] == 0.3
    assert torch.equal(launch["q"].float(), -q.float()), "a negative scale negates q"
    assert launch["scales"].q_scale is q_scale
    assert launch["scales"].k_scale is None
    assert launch["scales"].v_scale.is_contiguous()
    assert torch.equal(launch["scales"].v_scale, spread)
    assert flashtune.attention(q, k, v).dtype is torch.bfloat16
    assert launches[-1]["scales"] == NO_EXTRA_INPUTS


def test_scales_are_checked_on_cached_shapes(tensors: Triple, launches: list[BackwardCase]) -> None:
    q, k, v = tensors
    flashtune.attention(q, k, v, k_scale=scale_of(KV_HEADS))
    with pytest.raises(ProblemError, match="k_scale"):
        flashtune.attention(q, k, v, k_scale=scale_of(HEADS))
    assert len(launches) == 1


def test_plan_requires_the_planned_scales(tensors: Triple, launches: list[BackwardCase]) -> None:
    q, k, v = tensors
    planned = flashtune.plan(q, k, v, scale=-1.0, v_scale=scale_of(KV_HEADS))
    out = planned(q, k, v, v_scale=scale_of(KV_HEADS, 9.0))
    assert out.dtype is torch.bfloat16
    assert (launches[-1]["scales"].v_scale == 9).all()
    assert launches[-1]["scale"] == 1.0
    for scales in ({}, {"q_scale": scale_of(HEADS), "v_scale": scale_of(KV_HEADS)}):
        with pytest.raises(ProblemError, match="which are given"):
            planned(q, k, v, **scales)


def test_operators_have_scale_arguments(tensors: Triple, launches: list[BackwardCase]) -> None:
    q, k, v = tensors
    factors = scale_of(HEADS), scale_of(KV_HEADS), scale_of(KV_HEADS, 2.0)
    op = torch.ops.flashtune.attention
    out = op(q, k, v, "none", None, "bhsd", "fastest", *factors)
    assert [scale is other for scale, other in zip(launches[-1]["scales"].scales, factors, strict=True)] == [
        True
    ] * 3
    assert op(q, k, v, "none", None, "bhsd", "fastest").dtype is torch.bfloat16
    assert launches[-1]["scales"] == NO_EXTRA_INPUTS
    meta = [tensor.to("meta") for tensor in (q, k, v)]
    shapes = op(*meta, "none", None, "bhsd", "fastest", *(factor.to("meta") for factor in factors))
    assert (shapes.dtype, shapes.shape) == (out.dtype, out.shape)


def remembering(kept: list[Tensor]) -> Callable[[tuple[int, ...], torch.device], Tensor]:
    def allocate(shape: tuple[int, ...], device: torch.device) -> Tensor:
        kept.append(allocate_workspace(shape, device))
        return kept[-1]

    return allocate


def addresses(*tensors: Tensor) -> Sequence[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_prologue_writes_the_workspace_of_the_kernel(tensors: Triple, no_device: None) -> None:
    q, k, v = tensors
    out, ones, k_scale = torch.empty(BATCH, HEADS, ROWS, WIDTH), torch.ones(BATCH * HEADS), scale_of(KV_HEADS)
    kernel, prologue, kept = Noted(), Noted(), list[Tensor]()
    names = "q k v out out q_scale k_scale v_scale values scale"
    scratch = Workspaces({"values": (256,)}, CPU, remembering(kept))
    stages = queued((prologue, "v values"), (kernel, names))
    launch = launch_of(stages, ForwardTensors._fields, CPU, scratch, ones=ones)
    launch((q, k, v, out, None), 0.0, ExtraInputs(k_scale=k_scale))
    assert prologue.values == [(*addresses(v, kept[0]),)]
    factors = addresses(ones, k_scale, ones)
    assert kernel.values == [(*addresses(q, k, v, out, out), *factors, kept[0].data_ptr(), MIN_SCALE)]
