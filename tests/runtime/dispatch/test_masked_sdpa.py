"""Tests of SDPA for calls with a bias or a mask, with flashtune's semantics."""

import itertools
import runpy
from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashtune
from flashtune.core.notices import FlashtuneWarning
from flashtune.core.problem import Bias, Causal, Dtype, Problem
from flashtune.core.record import Record
from flashtune.dispatch import masked_sdpa
from flashtune.dispatch.masked_sdpa import MaskTrials, additive_mask, masked_attention
from flashtune.dispatch.sdpa import chosen_backend
from flashtune.request.call import dense_call
from flashtune.request.read_call import read_call
from flashtune.tuner.tables import hub_dispatcher
from tests.support.attention_operators import by_definition
from tests.support.machine import PROBLEM, Machine, tuned
from tests.support.records import make_record

LENGTHS = [(7, 7), (5, 9), (9, 5), (1, 6)]
BIASED = msgspec.structs.replace(PROBLEM, causal=Causal.NONE, bias=Bias.BOOLEAN)
# Shapes of a bias over [2, 4, seqlen_q, seqlen_kv]; 0 stands for the whole extent.
SHAPES = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 1, 1, 0), (0, 0), (1, 0), (0, 0, 0)]


def drawn(seqlen_q: int, seqlen_kv: int, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seqlen_q * 100 + seqlen_kv)
    q = torch.randn(2, 4, seqlen_q, 16, dtype=torch.float64)
    k = torch.randn(2, kv_heads, seqlen_kv, 16, dtype=torch.float64)
    return q, k, torch.randn(2, kv_heads, seqlen_kv, 24, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shift", "causal", "boolean"),
    [(shift, *case) for shift, case in enumerate(itertools.product(Causal, (False, True)))],
)
def test_masks_have_the_semantics_of_kernels(shift: int, causal: Causal, boolean: bool) -> None:
    for number, shape in enumerate(SHAPES):
        # The shifts combine every shape with all lengths.
        lengths = LENGTHS[(number + shift) % len(LENGTHS)]
        q, k, v = drawn(*lengths)
        whole = (2, 4, *lengths)[4 - len(shape) :]
        size = tuple(extent or full for extent, full in zip(shape, whole, strict=True))
        bias = torch.randn(size, dtype=torch.float64)
        # A row that sees no key, wherever the shape has more than one.
        bias = (bias > -0.5) if boolean else bias
        bias[..., 0, :] = False if boolean else -torch.inf
        is_causal, bottom_right = causal is not Causal.NONE, causal is Causal.BOTTOM_RIGHT
        expected, _ = by_definition(q, k, v, bias, causal=is_causal, scale=0.3, bottom_right=bottom_right)
        for mask in (bias, bias.expand(2, 4, *lengths)):
            torch.testing.assert_close(masked_attention(q, k, v, mask, 0.3, causal), expected)
        assert not masked_attention(q, k, v, bias, 0.0, causal).isnan().any()


def test_gradients_of_rows_without_keys_are_zero_in_the_unfused_path() -> None:
    q, k, v = (tensor.float().requires_grad_() for tensor in drawn(7, 9))
    mask = torch.rand(2, 1, 7, 9) < 0.7
    mask[:, :, 0] = False
    with sdpa_kernel(SDPBackend.MATH):
        out = masked_attention(q, k, v, mask, 0.3, Causal.NONE)
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    right, _ = by_definition(q, k, v, mask, scale=0.3)
    expected = torch.autograd.grad(right.square().sum(), (q, k, v))
    assert gradients[0][:, :, 0].eq(0).all()
    torch.testing.assert_close(gradients, expected)


def test_mask_is_not_expanded() -> None:
    q, k, _ = drawn(7, 9)
    bias = torch.randn(7, 9, dtype=torch.float64)
    mask = additive_mask(q, k, bias.expand(2, 4, 7, 9), Causal.NONE)
    assert (mask.shape, mask.data_ptr()) == ((1, 1, 7, 9), bias.data_ptr())
    padding = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    assert additive_mask(q, k, padding.expand(2, 4, 7, 9), Causal.NONE).shape == (2, 1, 1, 9)
    assert additive_mask(q, k, padding, Causal.TOP_LEFT).shape == (2, 1, 7, 9)


def test_single_query_at_the_last_key_needs_no_causal_mask() -> None:
    q, k, _ = drawn(1, 9)
    bias = torch.randn(1, 9, dtype=torch.float64)
    assert additive_mask(q, k, bias, Causal.BOTTOM_RIGHT).data_ptr() == bias.data_ptr()
    assert additive_mask(q, k, bias, Causal.TOP_LEFT)[..., 1:].eq(-torch.inf).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_masked_non_finite_key_gives_nan_rows_in_sdpa(value: float) -> None:
    q, k, v = drawn(7, 9)
    mask = torch.ones(7, 9, dtype=torch.bool)
    mask[:, 4] = False
    k[:, :, 4] = value
    assert masked_attention(q, k, v, mask, 0.3, Causal.NONE).isnan().all()


# The runtime's choice


def masked_record(problem: Problem, **peers: float) -> Record:
    """Returns a record of a bias problem with a time of 1 ms, and with the times of peers in ms."""
    times = {name.replace("_", "-"): ms for name, ms in peers.items()}
    return make_record(problem, peers=times, family="forward_masked")


def call_of(problem: Problem, **changes: Any) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Inputs and the mask of a call; its first query sees no key."""
    torch.manual_seed(3)
    dtype = torch.float16 if problem.dtype is Dtype.FP16 else torch.bfloat16
    q = torch.randn(problem.batch, problem.heads, problem.seqlen_q, problem.head_dim, dtype=dtype)
    k = torch.randn(problem.batch, problem.kv_heads, problem.seqlen_kv, problem.head_dim, dtype=dtype)
    mask = torch.rand(problem.batch, 1, problem.seqlen_q, problem.seqlen_kv) < 0.7
    mask[:, :, 0] = False
    if problem.bias is Bias.BOOLEAN:
        return (q, k, k.flip(2)), {"attn_mask": mask, **changes}
    bias = torch.randn(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)
    return (q, k, k.flip(2)), {"attn_bias": bias, **changes}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Bias.BOOLEAN, Bias.ADDITIVE])
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
def test_sdpa_serves_masks_where_it_is_faster(
    machine: Machine, launches: list[str], kind: Bias, causal: str
) -> None:
    problem = msgspec.structs.replace(BIASED, bias=kind, causal=Causal(causal))
    tuned(machine, masked_record(problem, sdpa_cudnn=0.3, sdpa_efficient=0.7))
    given, options = call_of(problem, causal=causal)
    told = flashtune.explain(*given, **options)
    assert (told.backend, told.reason) == ("sdpa", "sdpa-cudnn was measured as fast or faster")
    assert "sdpa-cudnn 0.3 ms" in str(told)
    out = flashtune.attention(*given, **options)
    assert launches == []
    (bias,) = mask_alone(options).values()
    wide = bias if bias.dtype is torch.bool else bias.double()
    q, k, v = (one.double() for one in given)
    expected = masked_attention(q, k, v, wide, 0.125, Causal(causal))
    assert (out[:, :, 0] == 0).all(), "the first query sees no key"
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    negated = flashtune.attention(-given[0], *given[1:], scale=-0.125, **options)
    torch.testing.assert_close(negated, out)
    turned = [one.transpose(1, 2) for one in given]
    torch.testing.assert_close(flashtune.attention(*turned, layout="bshd", **options).transpose(1, 2), out)
    torch.testing.assert_close(flashtune.plan(*given, **options)(*given, **mask_alone(options)), out)


def mask_alone(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name.startswith("attn")}


@pytest.mark.parametrize(
    ("asked", "family"),
    [
        ({"prefer": "generated"}, "forward_masked"),
        ({"return_lse": True}, "forward_masked"),
        ({"window": (100, 0)}, "forward_hopper"),
        ({"softcap": 20.0}, "forward_hopper"),
        ({"dropout_p": 0.1}, "forward_hopper"),
    ],
)
@pytest.mark.filterwarnings("ignore::flashtune.core.notices.FlashtuneWarning")
def test_generated_kernels_serve_masks_with_features_sdpa_lacks(
    machine: Machine, launches: list[str], asked: dict[str, Any], family: str
) -> None:
    """A record of a portable kernel serves its problem only. Others have the default config of Hopper's."""
    tuned(machine, masked_record(BIASED, sdpa_cudnn=0.3))
    given, options = call_of(BIASED, **asked)
    assert flashtune.explain(*given, **options).backend == "generated"
    flashtune.attention(*given, **options)
    assert launches == [family]


def test_sdpa_does_not_serve_gradients_of_a_mask(machine: Machine) -> None:
    tuned(machine, masked_record(BIASED, sdpa_cudnn=0.3))
    (q, k, v), options = call_of(BIASED)
    assert flashtune.explain(q.requires_grad_(), k, v, **options).backend == "generated"
    additive = msgspec.structs.replace(BIASED, bias=Bias.ADDITIVE)
    tuned(machine, masked_record(additive, sdpa_cudnn=0.3))
    given, options = call_of(additive)
    options["attn_bias"].requires_grad_()
    assert flashtune.explain(*given, **options).backend == "generated"


@pytest.mark.parametrize(("usual", "peers"), [(None, 0.3), ("sdpa-efficient", 0.3), ("sdpa-cudnn", 1.02)])
def test_only_the_sdpa_backend_in_use_is_compared(
    machine: Machine, launches: list[str], usual: str | None, peers: float
) -> None:
    machine.usual = usual
    tuned(machine, masked_record(BIASED, sdpa_cudnn=peers, sdpa_efficient=1.5))
    given, options = call_of(BIASED)
    assert flashtune.explain(*given, **options).backend == "generated"


@pytest.mark.parametrize(
    ("peer", "backend", "dtype"),
    [(0.5, "sdpa", Dtype.BF16), (1.2, "generated", Dtype.BF16), (1.2, "generated", Dtype.FP16)],
)
@pytest.mark.filterwarnings("ignore::flashtune.core.notices.FlashtuneWarning")
def test_untuned_masks_are_served_by_estimated_times(
    machine: Machine, launches: list[str], peer: float, backend: str, dtype: Dtype
) -> None:
    tuned(machine, masked_record(BIASED, sdpa_cudnn=peer))
    given, options = call_of(msgspec.structs.replace(BIASED, seqlen_q=300, seqlen_kv=700, dtype=dtype))
    told = flashtune.explain(*given, **options)
    assert told.backend == backend
    assert told.selection is not None
    assert ("is expected to be faster" in told.reason) == (backend == "sdpa")
    flashtune.attention(*given, **options)
    assert launches == ([] if backend == "sdpa" else [told.selection.record.family])


@pytest.fixture
def sdpa(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """SDPA as masks are computed with it; its `side_effect` may be another function."""
    fake = mock.Mock(side_effect=scaled_dot_product_attention)
    monkeypatch.setattr(masked_sdpa, "scaled_dot_product_attention", fake)
    return fake


def finite_masks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, enable_gqa: bool) -> Tensor:
    """SDPA as its cuDNN backend is where boolean masks add a finite number."""
    lowest = mask.clamp(min=-65504.0)
    return scaled_dot_product_attention(q, k, v, lowest, scale=scale, enable_gqa=enable_gqa)


def no_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, enable_gqa: bool) -> Tensor:
    out = scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=enable_gqa)
    return out.masked_fill((mask == -torch.inf).all(-1, keepdim=True), 0.0)


def no_plan(q: Tensor, *rest: object, **options: object) -> Tensor:
    raise RuntimeError("No valid execution plans built.\nTraceback")


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        (finite_masks, "gives no zeros for rows that see no key"),
        (no_mask, "does not add the mask to the scores"),
        (no_plan, "refuses masks (RuntimeError: No valid execution plans built.)"),
    ],
)
def test_sdpa_is_checked_before_it_serves_a_mask(
    machine: Machine, launches: list[str], sdpa: mock.Mock, backend: Callable[..., Tensor], why: str
) -> None:
    sdpa.side_effect = backend
    tuned(machine, masked_record(BIASED, sdpa_cudnn=0.3))
    given, options = call_of(BIASED)
    assert flashtune.explain(*given, **options).backend == "sdpa", "nothing was tried so far"
    with pytest.warns(FlashtuneWarning) as warned:
        flashtune.attention(*given, **options)
    assert [str(one.message) for one in warned] == [
        f"torch's SDPA {why}, so another kernel serves {BIASED.key}"
    ]
    assert launches == ["forward_masked"]
    assert flashtune.explain(*given, **options).backend == "generated"
    flashtune.attention(*given, **options)
    assert launches == ["forward_masked"] * 2


@pytest.mark.parametrize(
    ("error", "why", "later"),
    [
        (
            RuntimeError("misaligned strides"),
            "refuses its mask .RuntimeError: misaligned strides",
            "generated",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), "has no memory for its mask", "sdpa"),
    ],
)
def test_generated_kernel_serves_if_sdpa_fails(
    machine: Machine, launches: list[str], sdpa: mock.Mock, error: Exception, why: str, later: str
) -> None:
    def fails(q: Tensor, *rest: Any, **options: Any) -> Tensor:
        if q.shape[2] == BIASED.seqlen_q:
            raise error
        return scaled_dot_product_attention(q, *rest, **options)

    sdpa.side_effect = fails
    tuned(machine, masked_record(BIASED, sdpa_cudnn=0.3))
    given, options = call_of(BIASED)
    with pytest.warns(FlashtuneWarning, match=why):
        flashtune.attention(*given, **options)
    assert launches == ["forward_masked"]
    assert flashtune.explain(*given, **options).backend == later


@pytest.mark.parametrize("kind", [Bias.BOOLEAN, Bias.ADDITIVE])
@pytest.mark.parametrize("first", [0, 1])
def test_unaligned_biases_never_reach_sdpa(
    machine: Machine, launches: list[str], kind: Bias, first: int
) -> None:
    problem = msgspec.structs.replace(BIASED, bias=kind)
    tuned(machine, masked_record(problem, sdpa_cudnn=0.3))
    given, options = call_of(problem)
    ((name, bias),) = options.items()
    moved = torch.empty(bias.numel() + 1, dtype=bias.dtype)[1:].view_as(bias).copy_(bias)
    both = [bias, moved]
    served = {}
    for index in (first, 1 - first, first):
        before = len(launches)
        flashtune.attention(*given, **{name: both[index]})
        served[index] = "generated" if len(launches) > before else "sdpa"
        assert flashtune.explain(*given, **{name: both[index]}).backend == served[index]
    # A boolean mask is made additive in memory of its own.
    assert served == {0: "sdpa", 1: "sdpa" if kind is Bias.BOOLEAN else "generated"}


@pytest.mark.filterwarnings("ignore::flashtune.core.notices.FlashtuneWarning")
def test_refusal_is_cached_by_strides(machine: Machine, launches: list[str], sdpa: mock.Mock) -> None:
    def refuses_gaps(q: Tensor, *rest: Any, **options: Any) -> Tensor:
        if q.shape[2] == BIASED.seqlen_q and not q.is_contiguous():
            raise RuntimeError("no such strides")
        return scaled_dot_product_attention(q, *rest, **options)

    sdpa.side_effect = refuses_gaps
    tuned(machine, masked_record(BIASED, sdpa_cudnn=0.3))
    (q, k, v), options = call_of(BIASED)
    apart = torch.cat([q, q], -1)[..., : q.shape[-1]]
    flashtune.attention(apart, k, v, **options)
    assert launches == ["forward_masked"]
    flashtune.attention(q, k, v, **options)
    assert launches == ["forward_masked"]


def test_sdpa_check_runs_on_the_serving_backend(machine: Machine, launches: list[str]) -> None:
    machine.usual_of_trials = "sdpa-efficient"
    tuned(machine, masked_record(BIASED, sdpa_cudnn=0.3))
    given, options = call_of(BIASED)
    with pytest.warns(FlashtuneWarning, match="picks sdpa-efficient for the trial .* in place of sdpa-cudnn"):
        flashtune.attention(*given, **options)
    assert launches == ["forward_masked"]


def test_only_the_checked_sdpa_backend_serves(machine: Machine, launches: list[str], sdpa: mock.Mock) -> None:
    calls = []

    def counted(*given: Any, **options: Any) -> Tensor:
        calls.append(machine.usual)
        return scaled_dot_product_attention(*given, **options)

    sdpa.side_effect = counted
    tuned(machine, masked_record(BIASED, sdpa_cudnn=0.3))
    given, options = call_of(BIASED)
    expected = flashtune.attention(*given, **options)
    machine.usual = "sdpa-efficient"
    torch.testing.assert_close(flashtune.attention(*given, **options), expected, atol=2e-2, rtol=2e-2)
    assert set(calls) == {"sdpa-cudnn"}
    assert launches == []


def test_cached_executor_serves_masks_with_other_strides(machine: Machine, launches: list[str]) -> None:
    tuned(machine, masked_record(BIASED, sdpa_cudnn=3.0))
    (q, k, v), options = call_of(BIASED)
    flashtune.attention(q, k, v, **options)
    steps = len(machine.steps)
    flashtune.attention(torch.cat([q, q], -1)[..., : q.shape[-1]], k, v, **options)
    assert launches == ["forward_masked"] * 2
    assert len(machine.steps) == steps


@pytest.mark.parametrize("seqlen_q", [1, 70])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sdpa_on_the_cpu_passes_its_check(seqlen_q: int, kv_heads: int, dtype: torch.dtype) -> None:
    q = torch.randn(2, 4, seqlen_q, 32, dtype=dtype)
    k = torch.randn(2, kv_heads, 90, 32, dtype=dtype)
    request = read_call(dense_call(q, k, k))
    bias = torch.ones(2, 1, 1, 90, dtype=torch.bool)
    backend = chosen_backend(q, k, k, bias, False)
    assert MaskTrials(chosen_backend).refusal(request, backend, q, k, k, bias) is None


@pytest.mark.parametrize("module", [masked_sdpa, hub_dispatcher])
def test_a_replaced_sdpa_is_not_called(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = torch.nn.functional.scaled_dot_product_attention

    def mine(*args: Any, **options: Any) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", mine)
    # Also if the module is imported afterwards.
    for names in (vars(module), runpy.run_path(module.__file__, run_name="a_copy")):
        assert names["scaled_dot_product_attention"] is usual
