"""Tests of tensors whose sign is a flag (`torch.Tensor.is_neg`), and of cache scales of zero."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashtune
from flashtune import ProblemError
from flashtune.integrations.flash_attn.attend import combined


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
