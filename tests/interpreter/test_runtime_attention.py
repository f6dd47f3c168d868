"""Tests of `attention` in the interpreter, against float64."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

import flashtune
from flashtune.launch.compilation import interpreting
from flashtune.request.call import CausalOption, LayoutOption
from flashtune.runtime.session import SESSION

# Bounds for the errors of float32, and of rounding the result to 16 bits.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def fresh_runtime() -> Iterator[None]:
    assert interpreting()
    SESSION.reset()
    yield
    SESSION.forget()


def reference(
    q: Tensor, k: Tensor, v: Tensor, causal: CausalOption, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64, from the definition, heads first."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if causal:
        diagonal = 0 if causal == "top_left" else k.shape[2] - q.shape[2]
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(diagonal)
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


def agree(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: CausalOption = False,
    scale: float | None = None,
    layout: LayoutOption = "bhsd",
) -> None:
    out, lse = flashtune.attention(q, k, v, causal=causal, scale=scale, layout=layout, return_lse=True)
    alone = flashtune.attention(q, k, v, causal=causal, scale=scale, layout=layout)
    assert torch.equal(out, alone)
    assert out.dtype is q.dtype
    assert out.is_contiguous()
    if layout == "bshd":
        q, k, v, out = (tensor.transpose(1, 2) for tensor in (q, k, v, out))
    expected, expected_lse = reference(q, k, v, causal, scale)
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


def tensors(
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    seqlen_q: int = 40,
    seqlen_kv: int = 50,
    head_dim: int = 32,
    value_head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seqlen_q + 1000 * seqlen_kv + head_dim)
    return (
        torch.randn(batch, heads, seqlen_q, head_dim, dtype=dtype),
        torch.randn(batch, kv_heads, seqlen_kv, head_dim, dtype=dtype),
        torch.randn(batch, kv_heads, seqlen_kv, value_head_dim, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_dtypes_masks_and_layouts(dtype: torch.dtype, causal: CausalOption, layout: LayoutOption) -> None:
    q, k, v = tensors(batch=2, dtype=dtype)
    if layout == "bshd":
        q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
    agree(q, k, v, causal, layout=layout)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 33), (33, 1), (17, 64), (65, 31), (64, 64)])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_lengths(lengths: tuple[int, int], causal: CausalOption) -> None:
    agree(*tensors(seqlen_q=lengths[0], seqlen_kv=lengths[1]), causal)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_empty_problems(lengths: tuple[int, int], causal: CausalOption) -> None:
    agree(*tensors(seqlen_q=lengths[0], seqlen_kv=lengths[1]), causal)
    agree(*tensors(batch=0), causal)


@pytest.mark.parametrize("widths", [(8, 8), (40, 24), (96, 80), (1, 1), (33, 7), (16, 64)])
def test_head_dims(widths: tuple[int, int]) -> None:
    agree(*tensors(head_dim=widths[0], value_head_dim=widths[1]), True)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (5, 1)])
def test_head_groups(heads: tuple[int, int]) -> None:
    agree(*tensors(batch=2, heads=heads[0], kv_heads=heads[1], seqlen_q=9, seqlen_kv=12), True)


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.5, 3.0])
def test_scales(scale: float) -> None:
    agree(*tensors(), True, scale)


def test_unaligned_and_non_contiguous_views() -> None:
    q, k, v = tensors()
    shifted = torch.empty(q.numel() + 1)[1:].view(q.shape).copy_(q)
    agree(shifted, k, v)
    wide = torch.empty(*k.shape[:3], 37)[..., 2:34].copy_(k)
    agree(q, wide, v, True)
    agree(q, k.expand(1, 2, 50, 32), v.expand(1, 2, 50, 32), True)
    agree(q, k[:, :, ::2], v[:, :, ::2])
    packed = torch.randn(2, 20, 3, 4, 32)
    q, k, v = packed.unbind(2)
    agree(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), True)
    agree(q, k, v, True, layout="bshd")


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    batch=st.integers(0, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    seqlen_q=st.integers(0, 70),
    seqlen_kv=st.integers(0, 70),
    head_dim=st.integers(1, 48),
    value_head_dim=st.integers(1, 48),
    causal=st.sampled_from([False, True, "top_left"]),
    layout=st.sampled_from(["bhsd", "bshd"]),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_any_shape(
    batch: int,
    kv_heads: int,
    group: int,
    seqlen_q: int,
    seqlen_kv: int,
    head_dim: int,
    value_head_dim: int,
    causal: CausalOption,
    layout: LayoutOption,
    dtype: torch.dtype,
) -> None:
    q, k, v = tensors(batch, kv_heads * group, kv_heads, seqlen_q, seqlen_kv, head_dim, value_head_dim, dtype)
    if layout == "bshd":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    agree(q, k, v, causal, layout=layout)


def test_plan_and_explain() -> None:
    q, k, v = tensors()
    planned = flashtune.plan(q, k, v, causal=True, scale=-0.2)
    assert torch.equal(planned(q, k, v), flashtune.attention(q, k, v, causal=True, scale=-0.2))
    told = flashtune.explain(q, k, v, causal=True)
    assert told.backend == "interpreter"
    assert "TRITON_INTERPRET=1" in str(told)


def test_calls_do_not_warn_or_search() -> None:
    with warnings.catch_warnings():
        # Triton 3.6's interpreter warns of its own use of numpy.
        warnings.simplefilter("error", flashtune.FlashtuneWarning)
        flashtune.attention(*tensors(), prefer="generated")


@pytest.mark.parametrize("return_lse", [False, True])
def test_rows_after_the_last_packed_sequence_are_zero(return_lse: bool) -> None:
    q, k, v = (torch.randn(20, 2, 16, requires_grad=True) for _ in range(3))
    starts = torch.tensor([0, 5, 13], dtype=torch.int32)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            if return_lse:
                packed = q, k, v, starts, starts, 8, 8
                out, lse = flashtune.attention_varlen(*packed, causal=True, return_lse=True)
                assert (lse[:, 13:] == -torch.inf).all()
            else:
                out = flashtune.attention_varlen(q, k, v, starts, starts, 8, 8, causal=True)
        assert not out[13:].any()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert not gradient[13:].any()
