"""Tests of gradients on a GPU against float64, and of their determinism."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune import testing
from flashtune.request.call import CausalOption
from tests.gpu.calls import tensors
from tests.gpu.families.gradient_calls import (
    DEVICE,
    DROPOUT,
    attend,
    check,
    close,
    gradients,
    leaves,
)
from tests.gpu.marks import SERVED

pytestmark = SERVED

REPEATS = 1000


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("lengths", "causal"),
    [
        ((256, 256), True),
        ((256, 256), False),
        ((300, 417), True),
        ((417, 300), True),
        ((129, 65), "top_left"),
    ],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_against_float64(
    head_dim: int, lengths: tuple[int, int], causal: CausalOption, deterministic: bool
) -> None:
    check(leaves(*lengths, head_dim=head_dim), causal, deterministic=deterministic)


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.float16, 64), (torch.float16, 128), (torch.float32, 64), (torch.bfloat16, 40)],
)
def test_other_dtypes_and_head_dims(dtype: torch.dtype, head_dim: int) -> None:
    check(leaves(200, 330, dtype=dtype, head_dim=head_dim), True)


@pytest.mark.parametrize("kv_heads", [1, 4, 8])
def test_grouped_query_heads(kv_heads: int) -> None:
    check(leaves(300, 300, kv_heads=kv_heads), True)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("way", ["layout", "views", "of_one_tensor", "expanded"])
def test_layouts(way: str, head_dim: int) -> None:
    q, k, v = tensors(320, 320, head_dim=head_dim, kv_heads=8)
    dout = torch.randn_like(q)
    right = functools.partial(close, inputs=(q, k, v), dout=dout, causal=True)
    moved = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    if way == "layout":
        inputs = [tensor.requires_grad_() for tensor in moved]
        results = torch.autograd.grad(
            attend(*inputs, layout="bshd"), inputs, dout.transpose(1, 2).contiguous()
        )
        assert all(gradient.is_contiguous() for gradient in results)
        right([gradient.transpose(1, 2) for gradient in results])
    elif way == "views":
        views = [tensor.transpose(1, 2).requires_grad_() for tensor in moved]
        results = torch.autograd.grad(attend(*views), views, dout)
        assert [gradient.stride() for gradient in results] == [view.stride() for view in views]
        right(results)
    elif way == "of_one_tensor":
        joined = torch.stack(moved, 2).requires_grad_()
        out = attend(*joined.unbind(2), layout="bshd")
        (together,) = torch.autograd.grad(out, (joined,), dout.transpose(1, 2))
        right([gradient.transpose(1, 2) for gradient in together.unbind(2)])
    else:
        q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
        even = torch.full((), 0.5, dtype=q.dtype, device=DEVICE).expand(q.shape)
        close(gradients(q, k, v, even), (q, k, v), even, causal=True)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", [{}, {"window": (70, 0)}, {"dropout_p": DROPOUT}], ids=str)
def test_deterministic_gradients_are_bitwise_equal(options: dict[str, Any], head_dim: int) -> None:
    q, k, v = leaves(200, 260, head_dim=head_dim)
    dout = torch.randn_like(q)

    def once() -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        return gradients(q, k, v, dout, deterministic=True, **options)

    first = once()
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(REPEATS):
        for gradient, again in zip(first, once(), strict=True):
            differing += (gradient != again).sum()
    assert all(gradient.isfinite().all() for gradient in first)
    assert int(differing) == 0


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(2048, 2048), (700, 5000)])
def test_deterministic_gradients_of_many_programs_are_bitwise_equal(
    head_dim: int, causal: bool, lengths: tuple[int, int]
) -> None:
    """More programs than are resident, together with those of other heads and calls."""
    q, k, v = leaves(*lengths, head_dim=head_dim)
    dout = torch.randn_like(q)
    first, *others = (gradients(q, k, v, dout, causal=causal, deterministic=True) for _ in range(50))
    for other in others:
        assert all(torch.equal(gradient, again) for gradient, again in zip(first, other, strict=True))
    close(first, (q, k, v), dout, causal=causal)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(256, 256), (130, 301)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_dropout_against_float64(
    lengths: tuple[int, int], head_dim: int, causal: bool, deterministic: bool
) -> None:
    inputs = leaves(*lengths, head_dim=head_dim)
    torch.manual_seed(11)
    out = attend(*inputs, causal=causal, dropout_p=DROPOUT, deterministic=deterministic)
    dout = torch.randn_like(out)
    results = torch.autograd.grad(out, inputs, dout)
    torch.manual_seed(11)
    drawn = testing.attention_inputs(*inputs, causal=causal, dropout_p=DROPOUT).backward(dout)
    expected = testing.reference(drawn)
    for result, exact in zip((out, *results), (expected.out, *expected[2:5]), strict=True):
        assert exact is not None
        testing.close(result, exact)
