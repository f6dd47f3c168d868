"""Tests of the functions below flash_attn's public ones: blocks of ring attention, buffers and seeds."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune.integrations.flash_attn import flash_attn_3, flash_attn_4, low_level_2
from tests.integrations.test_flash_attn_2 import (
    close,
    flash_attn_func,
    flash_attn_varlen_func,
    numbers,
    starts,
)

pytestmark = pytest.mark.slow

version_3: Any = flash_attn_3
version_4: Any = flash_attn_4
low_level: Any = low_level_2
SCALE = 1 / 8**0.5


def inputs(queries: int = 5, keys: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        numbers(2, queries, 4, 8),
        numbers(2, keys, 2, 8),
        numbers(2, keys, 2, 8, seed=1),
        numbers(2, queries, 4, 8, seed=2),
    )


def gradients_of(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> tuple[Tensor, ...]:
    own = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    return torch.autograd.grad(flash_attn_func(*own, **options), own, dout)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_blocks_of_keys_with_the_whole_log_sum_exp_add_up_as_in_ring_attention(softcap: float) -> None:
    q, k, v, dout = inputs()
    out, lse, pattern = flash_attn_func(q, k, v, softcap=softcap, return_attn_probs=True)
    assert pattern.numel() == 0
    wanted = gradients_of(q, k, v, dout, softcap=softcap)
    dq_sum, parts = torch.zeros_like(q), []
    for block in (slice(0, 2), slice(2, 6)):
        buffers = torch.empty_like(q), torch.empty_like(k[:, block]), torch.empty_like(v[:, block])
        tensors = dout, q, k[:, block], v[:, block], out, lse, *buffers
        sums = low_level._flash_attn_backward(*tensors, 0.0, SCALE, False, -1, -1, softcap, None, False)
        assert sums.shape == (2, 4, 128)
        assert close(sums[..., :5].double(), (dout * out).sum(-1).transpose(1, 2), 1e-5)
        dq_sum += buffers[0]
        parts.append(buffers[1:])
    assert close(dq_sum, wanted[0])
    assert close(torch.cat([part[0] for part in parts], 1), wanted[1])
    assert close(torch.cat([part[1] for part in parts], 1), wanted[2])


def test_rows_without_keys_have_infinity_and_no_gradient() -> None:
    q, k, v, dout = inputs(6, 3)
    out, lse, _, _ = low_level._flash_attn_forward(q, k, v, 0.0, SCALE, True, -1, -1, 0.0, None, False)
    assert torch.isposinf(lse[:, :, :3]).all()
    assert not out[:, :3].any()
    gradients = low_level.Extension.bwd(
        dout, q, k, v, out, lse, None, None, None, None, 0.0, SCALE, True, -1, -1, 0.0, False
    )
    wanted = gradients_of(q, k, v, dout, causal=True)
    assert all(close(gradient, other) for gradient, other in zip(gradients[:3], wanted, strict=True))


@pytest.mark.parametrize("has_pattern", [False, True])
def test_the_state_of_random_numbers_repeats_the_forward_pass(has_pattern: bool) -> None:
    q, k, v, dout = inputs()
    torch.manual_seed(3)
    out, lse, pattern, state = low_level._flash_attn_forward(
        q, k, v, 0.5, SCALE, False, -1, -1, 0.0, None, has_pattern
    )
    assert pattern.numel() == (2 * 4 * 128 * 128 if has_pattern else 0)
    torch.manual_seed(3)
    own = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    again = flash_attn_func(*own, 0.5)
    assert isinstance(again, Tensor)
    assert torch.equal(out, again)
    buffers = [torch.empty_like(tensor) for tensor in (q, k, v)]
    low_level._flash_attn_backward(
        dout, q, k, v, out, lse, *buffers, 0.5, SCALE, False, -1, -1, 0.0, None, False, rng_state=state
    )
    wanted = torch.autograd.grad(again, own, dout)
    assert all(close(gradient, other, 1e-6) for gradient, other in zip(buffers, wanted, strict=True))
    with pytest.raises(NotImplementedError, match="rng_state is None"):
        low_level._flash_attn_backward(
            dout, q, k, v, out, lse, *buffers, 0.5, SCALE, False, -1, -1, 0.0, None, False
        )


def test_packed_sequences_forward_and_backward() -> None:
    cu_q, cu_k = starts((3, 2)), starts((4, 1))
    q, k, dout = numbers(5, 4, 8), numbers(5, 2, 8), numbers(5, 4, 8, seed=2)
    lengths = cu_q, cu_k, 3, 4
    out, lse, _, state = low_level._flash_attn_varlen_forward(q, k, k, *lengths, 0.0, SCALE, True)
    own = [tensor.clone().requires_grad_() for tensor in (q, k, k)]
    expected, expected_lse, _ = flash_attn_varlen_func(*own, *lengths, causal=True, return_attn_probs=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert not state.any()
    buffers = [torch.empty_like(tensor) for tensor in (q, k, k)]
    low_level._flash_attn_varlen_backward(
        dout, q, k, k, out, lse, *buffers, *lengths, 0.0, SCALE, True, -1, -1, 0.0, None, True
    )
    wanted = torch.autograd.grad(expected, own, dout)
    assert all(close(gradient, other) for gradient, other in zip(buffers, wanted, strict=True))
    tensors = dout, q, k, k, out, lse, None, None, None, cu_q, cu_k, None
    results = low_level.Extension.varlen_bwd(*tensors, 3, 4, 0.0, SCALE, False, True, -1, -1, 0.0, True)
    assert all(torch.equal(result, other) for result, other in zip(results, buffers, strict=False))


def test_skipped_and_unused_keys_of_packed_sequences() -> None:
    q, k = numbers(3, 2, 8), numbers(9, 2, 8)
    skipped, used = torch.tensor([1, 0]).int(), torch.tensor([4, 3]).int()
    out = low_level._flash_attn_varlen_forward(
        q, k, k, starts((1, 2)), starts((5, 4)), 2, 5, 0.0, SCALE, True, leftpad_k=skipped, seqused_k=used
    )[0]
    kept = torch.cat([k[1:4], k[5:8]])
    expected = flash_attn_varlen_func(q, kept, kept, starts((1, 2)), starts((3, 3)), 2, 3, causal=True)
    assert isinstance(expected, Tensor)
    assert close(out, expected)


def test_pages_reject_splits_as_flash_attn_does() -> None:
    q, k = numbers(1, 2, 8), numbers(1, 16, 2, 8)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), (starts((1,)), starts((9,)), 1, 9)
    results = [
        low_level._flash_attn_varlen_forward(
            q, k, k, *lengths, 0.0, SCALE, False, block_table=table, num_splits=splits
        )
        for splits in (0, 1)
    ]
    assert torch.equal(results[0][0], results[1][0])
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported"):
        low_level._flash_attn_varlen_forward(
            q, k, k, *lengths, 0.0, SCALE, False, block_table=table, num_splits=2
        )


def test_the_functions_of_the_extension_write_to_given_tensors_and_take_no_generator() -> None:
    q, k, v, _ = inputs()
    out = torch.empty_like(q)
    results = low_level.Extension.fwd(q, k, v, out, None, 0.0, SCALE, True, -1, -1, 0.0, False)
    assert results[0] is out
    assert torch.equal(out, flash_attn_func(q, k, v, causal=True))
    cu = starts((5, 5))
    rows = low_level.Extension.varlen_fwd(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), None, cu, starts((6, 6)), None, None, None, None,
        5, 6, 0.0, SCALE, False, True, -1, -1, 0.0, False,
    )  # fmt: skip
    assert close(rows[0].view_as(out), out)
    cached, lse = low_level.Extension.fwd_kvcache(
        q, k, v, None, None, None, None, None, None, None, None, None, None, SCALE, True, -1, -1, 0.0, True, 0
    )
    assert close(cached, out)
    assert close(lse, results[1])
    with pytest.raises(RuntimeError, match="generator` argument is no longer supported"):
        low_level.Extension.fwd(q, k, v, None, None, 0.0, SCALE, True, -1, -1, 0.0, False, torch.Generator())
    with pytest.raises(TypeError, match="11 arguments were passed: pass q, k, v, out"):
        low_level.Extension.fwd(q, k, v, None, None, 0.0, SCALE, True, -1, -1, 0.0)


def test_blocks_of_keys_are_those_of_flash_attn() -> None:
    sizes = [low_level._get_block_size_n("cpu", width, is_dropout, False) for width in (32, 64, 96, 128, 256)
             for is_dropout in (False, True)]  # fmt: skip
    assert sizes == [128, 128, 128, 64, 64, 64, 64, 32, 64, 64]


@pytest.mark.parametrize("has_used", [False, True])
def test_passes_of_version_3(has_used: bool) -> None:
    q, k, v, dout = inputs()
    used: dict[str, Tensor] = {}
    if has_used:
        used = {"seqused_q": torch.tensor([3, 5]).int(), "seqused_k": torch.tensor([6, 2]).int()}
    out, lse, *_ = version_3._flash_attn_forward(q, k, v, causal=True, **used)
    own = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    expected, expected_lse = version_3.flash_attn_varlen_func(
        *own, None, None, 5, 6, causal=True, return_attn_probs=True, **used
    )
    assert close(out, expected)
    assert torch.equal(lse, expected_lse)
    buffers = [torch.empty_like(tensor) for tensor in (q, k, v)]
    lengths = used.get("seqused_q"), used.get("seqused_k")
    version_3._flash_attn_backward(
        dout, q, k, v, out, lse, None, None, *lengths, 5, 6, *buffers, is_causal=True
    )
    wanted = torch.autograd.grad(expected, own, dout)
    assert all(close(gradient, other) for gradient, other in zip(buffers, wanted, strict=True))


def test_the_forward_pass_of_version_3_appends_to_a_cache() -> None:
    q, k = numbers(2, 1, 4, 8), numbers(2, 1, 2, 8)
    cache = numbers(2, 8, 2, 8)
    expected = version_3.flash_attn_with_kvcache(q, cache.clone(), cache.clone(), k, k, cache_seqlens=3)
    out = torch.empty_like(q)
    own, values = cache.clone(), cache.clone()
    lengths = torch.tensor([3, 3], dtype=torch.int32)
    results = version_3._flash_attn_forward(q, own, values, k, k, out_=out, seqused_k=lengths)
    assert results[0] is out
    assert torch.equal(out, expected)
    assert torch.equal(own[:, 3], k[:, 0])


def test_passes_of_version_4_write_to_given_tensors() -> None:
    q, k, v, dout = inputs()
    out, lse, *_ = version_4._flash_attn_fwd(q, k, v, causal=True, return_lse=True)
    assert lse is not None
    wanted = gradients_of(q, k, v, dout, causal=True)
    dq = torch.empty_like(q)
    gradients = version_4._flash_attn_bwd(q, k, v, out, dout, lse, causal=True, dq=dq)
    assert gradients[0] is dq
    assert all(close(gradient, other) for gradient, other in zip(gradients, wanted, strict=True))
