"""Tests of values: scores as large as a finite mask value, signs in flags, and cache scales of zero."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashtune
from flashtune import ProblemError
from flashtune.integrations.flash_attn.attend import combined

LEAST = torch.finfo(torch.float32).min
OTHERS: dict[str, dict[str, Any]] = {
    "alone": {},
    "window": {"window": (20, 5)},
    "softcap, ALiBi": {"softcap": 5.0, "alibi_slopes": torch.full((2,), 0.1)},
    "sinks": {"sinks": torch.tensor([-1e9, 0.5])},
}


def weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Returns the softmax in float64 of scores that were rounded to float32."""
    rows = scores.float().double()
    if sinks is None:
        return rows.softmax(-1)
    sink = sinks.double()[None, :, None, None].expand(*rows.shape[:3], 1)
    return torch.cat((rows, sink), -1).softmax(-1)[..., :-1]


def scores_of(q: Tensor, k: Tensor, bias: Tensor, others: dict[str, Any]) -> Tensor:
    scores = (q.double() @ k.double().mT) * q.shape[-1] ** -0.5
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    if "softcap" in others:
        scores = 5.0 * (scores / 5.0).tanh() - 0.1 * distance.abs()
    scores = scores + bias.double()
    if "window" in others:
        scores = scores.masked_fill((distance > 20) | (distance < -5), -torch.inf)
    assert isinstance(scores, Tensor)
    return scores


@pytest.mark.sampled
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("value", [-1e4, -1e9, -1e30, LEAST, 1e9])
def test_keys_of_a_finite_mask_value_have_equal_weights(name: str, deterministic: bool, value: float) -> None:
    torch.manual_seed(0)
    others = OTHERS[name]
    leaves = [torch.randn(1, 2, 40, 32, requires_grad=True) for _ in range(3)]
    q, k, v = leaves
    bias = torch.zeros(1, 1, 40, 40)
    bias[:, :, 5:9] = value
    bias[..., :3] = -1e9
    out = flashtune.attention(
        q, k, v, attn_bias=bias, deterministic=deterministic, prefer="generated", **others
    )
    expected = weights(scores_of(q, k, bias, others), others.get("sinks")) @ v.double()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-3)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, dout)
    for gradient, other in zip(gradients, torch.autograd.grad(expected, leaves, dout.double()), strict=True):
        torch.testing.assert_close(gradient, other, rtol=0, atol=2e-2)


def test_rows_hidden_by_infinity_are_zero() -> None:
    q, k, v = (torch.randn(1, 2, 40, 32, requires_grad=True) for _ in range(3))
    bias = torch.zeros(1, 1, 40, 40)
    bias[:, :, 5:9] = -torch.inf
    bias[:, :, 9:12] = LEAST
    out, lse = flashtune.attention(q, k, v, attn_bias=bias, return_lse=True, prefer="generated")
    assert not out[:, :, 5:9].any()
    assert (lse[:, :, 5:9] == -torch.inf).all()
    assert (lse[:, :, 9:12] == LEAST).all()
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert not dq[:, :, 5:9].any()
    assert dq.isfinite().all()


@pytest.mark.parametrize("queries", [3, 40])
@pytest.mark.parametrize("size", [1e9, 1e12, 1e30])
def test_large_products_in_float32_do_not_overflow(queries: int, size: float) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, queries, 32), torch.randn(1, 2, 40, 32), torch.randn(1, 2, 40, 16)
    out, lse = flashtune.attention(q * size, k, v, return_lse=True, prefer="generated")
    scores = (q.double() * size) @ k.double().mT * 32**-0.5
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ v.double())
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "split"])
def test_log_sum_exps_are_read_with_the_documented_error(deterministic: bool) -> None:
    torch.manual_seed(0)
    q, k, v = leaves = [torch.randn(1, 2, 40, 32, requires_grad=True) for _ in range(3)]
    # All scores are near 10^4, and differ by ordinary numbers.
    far = torch.zeros(32)
    far[0] = 240.0
    out, lse = flashtune.attention(
        q + far, k + far, v, deterministic=deterministic, return_lse=True, prefer="generated"
    )
    wide = [tensor.double() + far for tensor in (q, k)]
    expected = (wide[0] @ wide[1].mT * 32**-0.5).softmax(-1) @ v.double()
    assert lse.min() > 5e3
    gradients = torch.autograd.grad(out.sum(), leaves)
    right = torch.autograd.grad(expected.sum(), leaves)
    for result, exact in zip((out, gradients[2]), (expected, right[2]), strict=True):
        torch.testing.assert_close(result.double(), exact.double(), rtol=1e-2, atol=1e-2)
    half = [
        flashtune.attention(q + far, k[:, :, part] + far, v[:, :, part], return_lse=True)
        for part in (slice(0, 7), slice(7, 40))
    ]
    merged = flashtune.merge_attention(*half[0], *half[1])[0]
    torch.testing.assert_close(merged.double(), expected, rtol=1e-2, atol=1e-2)


def negated(tensor: Tensor) -> Tensor:
    """Returns an equal tensor with the other sign in memory."""
    return torch._neg_view(-tensor)


def test_negated_views_are_read_with_their_sign() -> None:
    q, k, v = leaves = [torch.randn(1, 2, 12, 16, requires_grad=True) for _ in range(3)]
    bias = torch.randn(1, 1, 12, 12)
    assert negated(q).is_neg()
    right = scaled_dot_product_attention(q, k, v, attn_mask=bias)
    views = [negated(leaf) for leaf in leaves]
    with torch.no_grad():
        planned = flashtune.plan(q, k, v)(*views)
        torch.testing.assert_close(planned, scaled_dot_product_attention(q, k, v))
    out = flashtune.attention(*views, attn_bias=negated(bias))
    torch.testing.assert_close(out, right)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(torch._neg_view(out), leaves, -dout)
    torch.testing.assert_close(gradients, torch.autograd.grad(right, leaves, dout))


def test_merges_of_empty_rows_and_of_large_log_sum_exps() -> None:
    q, k, v = (torch.randn(1, 2, 12, 16) for _ in range(3))
    out, lse = flashtune.attention(q, k, v, return_lse=True)
    empty = torch.full_like(lse, torch.inf)
    merged = flashtune.merge_attention(out, lse, torch.zeros_like(out), empty)
    torch.testing.assert_close(merged, (out, lse))
    nothing = flashtune.merge_attention(out * 0, empty, out * 0, empty)
    assert not nothing[0].any()
    assert (nothing[1] == -torch.inf).all()
    large = torch.full_like(lse, -1e9)
    torch.testing.assert_close(flashtune.merge_attention(out, large, out * 3, large)[0], out * 2)
    parts = combined(torch.stack([out, out * 3]), torch.stack([large, large]))
    torch.testing.assert_close(parts[0], out * 2)


@pytest.mark.parametrize("queries", [3, 40])
def test_a_cache_scale_of_zero_gives_the_mean(queries: int) -> None:
    q, keys = torch.randn(1, 2, queries, 16), torch.randint(-127, 128, (1, 2, 40, 16), dtype=torch.int8)
    scales = torch.tensor([0.0, 0.5])
    out = flashtune.attention(q, keys, keys, k_scale=scales, v_scale=torch.ones(2))
    mean = keys[:, :1].float().mean(2, keepdim=True)
    torch.testing.assert_close(out[:, :1], mean.expand_as(out[:, :1]), rtol=1e-4, atol=1e-3)
    assert out.isfinite().all()
    for wrong in (-1.0, torch.nan, torch.inf):
        with pytest.raises(ProblemError, match=r"k_scale.* is .*: pass finite scales from 0"):
            flashtune.attention(q, keys, keys, k_scale=torch.tensor([wrong, 0.5]), v_scale=torch.ones(2))
