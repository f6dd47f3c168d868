"""Tests of flash_attn 2.8's functions on dense and packed tensors, against loops in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune import ProblemError
from flashtune.integrations import flash_attn
from tests.support import flash_attn_reference
from tests.support.flash_attn_reference import Rule, one_sequence

pytestmark = pytest.mark.slow

# Tests pass lists as arguments, which have neither a number nor types for a type checker.
flash: Any = flash_attn
batch_of: Any = flash_attn_reference.batch_of
flash_attn_func = flash.flash_attn_func
flash_attn_varlen_func = flash.flash_attn_varlen_func
EXACT = 1e-12
LENGTHS_Q, LENGTHS_K = (3, 0, 5, 2), (4, 2, 3, 0)

CASES: list[tuple[dict[str, Any], Rule]] = [
    ({}, Rule()),
    ({"causal": True}, Rule(causal=True)),
    ({"window_size": (2, 1)}, Rule(left=2, right=1)),
    ({"window_size": [3, 0]}, Rule(left=3, right=0)),
    ({"window_size": torch.tensor([2, 3]), "causal": True}, Rule(causal=True, left=2)),
    ({"window_size": (-1, 0)}, Rule(right=0)),
    ({"window_size": (1, -1)}, Rule(left=1)),
    ({"softcap": 2.0, "softmax_scale": 0.7}, Rule(softcap=2.0, scale=0.7)),
    ({"softmax_scale": 0.0}, Rule(scale=0.0)),
    ({"softmax_scale": -0.3, "causal": True}, Rule(scale=-0.3, causal=True)),
]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def close(tensor: Tensor, other: Tensor, bound: float = EXACT) -> bool:
    return tensor.shape == other.shape and torch.allclose(tensor, other, rtol=0, atol=bound, equal_nan=False)


def with_infinity(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize(("options", "rule"), CASES)
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (2, 6), (6, 3)])
def test_dense_calls_and_gradients_equal_the_reference(
    options: dict[str, Any], rule: Rule, queries: int, keys: int
) -> None:
    inputs = [numbers(2, queries, 4, 8), numbers(2, keys, 2, 8), numbers(2, keys, 2, 8, seed=1)]
    own = [tensor.clone().requires_grad_() for tensor in inputs]
    out, lse, pattern = flash_attn_func(*own, **options, return_attn_probs=True)
    theirs = [tensor.clone().requires_grad_() for tensor in inputs]
    expected, expected_lse = batch_of(*theirs, rule)
    dout = numbers(*expected.shape, seed=2)
    assert close(out, expected)
    assert close(lse, with_infinity(expected_lse).detach())
    assert not lse.requires_grad
    assert pattern.numel() == 0
    gradients = torch.autograd.grad(out, own, dout)
    wanted = torch.autograd.grad(expected, theirs, dout)
    assert all(close(gradient, other) for gradient, other in zip(gradients, wanted, strict=True))
    assert close(flash_attn_func(*inputs, **options), expected)


def test_outputs_are_contiguous() -> None:
    qkv = numbers(2, 5, 3, 4, 16)
    out = flash_attn.flash_attn_qkvpacked_func(qkv)
    assert out.is_contiguous()
    assert out.view(2, 5, 64).shape == (2, 5, 64)


def test_alibi_slopes_of_heads_and_of_sequences() -> None:
    q, k = numbers(2, 3, 4, 8), numbers(2, 5, 4, 8)
    slopes = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
    expected, _ = batch_of(q, k, k, Rule(causal=True, slopes=slopes))
    assert close(flash_attn_func(q, k, k, causal=True, alibi_slopes=slopes), expected)
    expected, _ = batch_of(q, k, k, Rule(slopes=slopes[:1].expand(2, 4)))
    assert close(flash_attn_func(q, k, k, alibi_slopes=slopes[0]), expected)


def test_a_right_bound_of_all_keys_is_no_bound_as_in_flash_attn() -> None:
    q, k = numbers(1, 6, 1, 8), numbers(1, 3, 1, 8)
    assert torch.equal(flash_attn_func(q, k, k, window_size=(9, 3)), flash_attn_func(q, k, k))


def test_packed_tensors_equal_separate_ones_with_gradients() -> None:
    qkv = numbers(2, 5, 3, 2, 8).requires_grad_()
    q, k, v = (part.detach().clone().requires_grad_() for part in qkv.unbind(2))
    expected = flash_attn_func(q, k, v, causal=True)
    dout = numbers(*expected.shape)
    wanted = torch.stack(torch.autograd.grad(expected, (q, k, v), dout), 2)
    out = flash.flash_attn_qkvpacked_func(qkv, causal=True)
    assert torch.equal(out, expected)
    assert close(torch.autograd.grad(out, qkv, dout)[0], wanted)
    kv = torch.stack([k, v], 2)
    assert torch.equal(flash.flash_attn_kvpacked_func(q, kv, causal=True), expected)
    both = flash.flash_attn_kvpacked_func(q, kv, 0.0, None, True, (-1, -1), 0.0, None, False, True)
    assert torch.equal(both[0], expected)


@pytest.mark.parametrize(("options", "rule"), CASES)
def test_packed_sequences_and_gradients_equal_the_reference(options: dict[str, Any], rule: Rule) -> None:
    inputs = [
        numbers(sum(LENGTHS_Q), 4, 8),
        numbers(sum(LENGTHS_K), 2, 8),
        numbers(sum(LENGTHS_K), 2, 8, seed=1),
    ]
    lengths = starts(LENGTHS_Q), starts(LENGTHS_K), 5, 4
    own = [tensor.clone().requires_grad_() for tensor in inputs]
    out, lse, _ = flash_attn_varlen_func(*own, *lengths, **options, return_attn_probs=True)
    theirs = [tensor.clone().requires_grad_() for tensor in inputs]
    parts = [
        one_sequence(q, k, v, rule)
        for q, k, v in zip(
            theirs[0].split(LENGTHS_Q), theirs[1].split(LENGTHS_K), theirs[2].split(LENGTHS_K), strict=True
        )
    ]
    expected, expected_lse = torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)
    assert close(out, expected)
    assert close(lse, with_infinity(expected_lse).detach())
    dout = numbers(*expected.shape, seed=2)
    gradients = torch.autograd.grad(out, own, dout)
    wanted = torch.autograd.grad(expected, theirs, dout)
    assert all(close(gradient, other) for gradient, other in zip(gradients, wanted, strict=True))


def test_packed_sequences_in_one_tensor_equal_separate_ones() -> None:
    qkv, cu = numbers(sum(LENGTHS_Q), 3, 2, 8), starts(LENGTHS_Q)
    q, k, v = qkv.unbind(1)
    expected = flash_attn_varlen_func(q, k, v, cu, cu, 5, 5, causal=True)
    assert torch.equal(flash.flash_attn_varlen_qkvpacked_func(qkv, cu, 5, causal=True), expected)
    assert torch.equal(
        flash.flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], cu, cu, 5, 5, causal=True), expected
    )


@pytest.mark.parametrize("page", [1, 4, 16, 48, 64, 512])
def test_packed_queries_of_any_page_size(page: int) -> None:
    lengths_k, columns = (min(page + 3, 3 * page), 1, 2 * page, 0), 3
    k, v = numbers(4 * columns, page, 2, 8), numbers(4 * columns, page, 2, 8, seed=1)
    table = torch.randperm(4 * columns, generator=torch.Generator().manual_seed(0)).view(4, columns).int()
    q = numbers(sum(LENGTHS_Q), 4, 8).requires_grad_()
    lengths = starts(LENGTHS_Q), starts(lengths_k), 5, columns * page
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, *lengths, causal=True, block_table=table, return_attn_probs=True
    )
    rows = [pages.long() for pages in table]
    parts = [
        one_sequence(own, k[row].flatten(0, 1)[:count], v[row].flatten(0, 1)[:count], Rule(causal=True))
        for own, row, count in zip(q.detach().split(LENGTHS_Q), rows, lengths_k, strict=True)
    ]
    assert close(out.detach(), torch.cat([out for out, _ in parts]))
    assert close(lse, with_infinity(torch.cat([lse for _, lse in parts], 1)))
    with pytest.raises(NotImplementedError, match="no backward pass for block_table"):
        out.sum().backward()


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True, "window_size": (3, 0)}])
def test_the_dropout_pattern_is_that_of_the_output(is_packed: bool, options: dict[str, Any]) -> None:
    rule = Rule(causal=options.get("causal", False), left=3 if options else None)
    lengths_q, lengths_k = ((3, 5), (4, 6)) if is_packed else ((5, 5), (6, 6))
    q, k, v = (
        numbers(sum(lengths_q), 4, 8),
        numbers(sum(lengths_k), 2, 8),
        numbers(sum(lengths_k), 2, 8, seed=1),
    )
    torch.manual_seed(1)
    if is_packed:
        lengths = starts(lengths_q), starts(lengths_k), 5, 6
        out, _, pattern = flash_attn_varlen_func(q, k, v, *lengths, 0.375, **options, return_attn_probs=True)
    else:
        dense = [tensor.view(2, -1, *tensor.shape[1:]) for tensor in (q, k, v)]
        out, _, pattern = flash_attn_func(*dense, 0.375, **options, return_attn_probs=True)
        out = out.flatten(0, 1)
    assert pattern.shape == (2, 4, 128, 128)
    dropped = 0
    for b, parts in enumerate(zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)):
        own = pattern[b, :, : lengths_q[b], : lengths_k[b]]
        expected, _ = one_sequence(*parts, rule, own >= 0, 0.375)
        assert close(out.split(lengths_q)[b], expected, 1e-6)
        _, own_lse = one_sequence(*parts, rule)
        scores = torch.einsum("qhd,khd->hqk", parts[0], parts[1].repeat_interleave(2, 1)) / 8**0.5
        # One block of keys has all of them, so that the largest score is that of the row.
        weights = torch.exp(scores - own_lse[..., None])
        largest = own.abs().amax(-1, keepdim=True)
        kept = own.abs() > 0
        share = weights.masked_fill(~kept, 0.0)
        assert close((own.abs() * share.amax(-1, keepdim=True)) / largest, share, 1e-6)
        dropped += int((own < 0).sum())
    assert dropped > 0


def test_dropout_without_a_pattern_draws_from_the_generator() -> None:
    q = numbers(1, 8, 2, 8)
    torch.manual_seed(5)
    first = flash_attn_func(q, q, q, 0.5)
    torch.manual_seed(5)
    again, _, pattern = flash_attn_func(q, q, q, 0.5, return_attn_probs=True)
    assert torch.equal(first, again)
    assert not torch.equal(first, flash_attn_func(q, q, q, 0.5))
    assert (pattern < 0).any()


def test_invalid_arguments_raise_one_sentence() -> None:
    q = numbers(1, 2, 2, 8)
    with pytest.raises(ProblemError, match="head dim 300"):
        flash_attn_func(numbers(1, 2, 2, 300), numbers(1, 2, 2, 300), numbers(1, 2, 2, 300))
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(flash_attn.UnsupportedError, match="dropout_p"):
        flash_attn_varlen_func(
            q[0],
            numbers(1, 16, 2, 8),
            numbers(1, 16, 2, 8),
            *[starts((2,))] * 2,
            2,
            2,
            0.5,
            block_table=table,
        )
