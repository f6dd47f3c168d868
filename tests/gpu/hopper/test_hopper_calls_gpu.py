"""Tests of calls on a Hopper GPU: families and results by memory layout, streams and many addresses."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flashtune
from flashtune.core.errors import ProblemError
from flashtune.launch.tma_descriptors import MAX_ADDRESSES
from flashtune.request.quantization import quantize
from tests.gpu.hopper.hopper_calls import (
    BATCH,
    HEADS,
    NATIVE,
    PORTABLE,
    Triple,
    assert_right,
    attention,
    tensors,
)
from tests.gpu.marks import ON_HOPPER, SERVED

pytestmark = [
    *SERVED,
    # Nothing interrupts a thread that waits for the GPU: a hang ends the whole run, and says where it was.
    pytest.mark.timeout(300, method="thread"),
    ON_HOPPER,
]


def family_of(*inputs: Tensor) -> tuple[str, str]:
    """The family that serves a call, and the reason."""
    told = flashtune.explain(*inputs, causal=True, prefer="generated")
    assert told.selection is not None
    return told.selection.record.family, told.reason


def check(*inputs: Tensor) -> None:
    """Compares a call with SDPA, and a plan with the call."""
    out = attention(*inputs)
    assert_right(out, *inputs)
    assert torch.equal(flashtune.plan(*inputs, causal=True, prefer="generated")(*inputs), out)


def off_border(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def odd_rows(tensor: Tensor) -> Tensor:
    return tensor.new_empty(*tensor.shape[:3], tensor.shape[3] + 3)[..., : tensor.shape[3]].copy_(tensor)


def one_row(tensor: Tensor) -> Tensor:
    return tensor[:, :, :1].expand(-1, -1, tensor.shape[2], -1)


@pytest.mark.parametrize("view", [off_border, odd_rows, one_row])
@pytest.mark.parametrize("position", range(3), ids="qkv")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_tensor_without_tma_support_is_copied_or_selects_the_portable_family(
    view: Callable[[Tensor], Tensor], position: int, head_dim: int
) -> None:
    inputs = list(tensors(head_dim))
    assert family_of(*inputs)[0] == NATIVE
    inputs[position] = view(inputs[position])
    family, reason = family_of(*inputs)
    reasons = {NATIVE: "are copied first", PORTABLE: f"{NATIVE} would serve but cannot address"}
    assert reasons[family] in reason
    check(*inputs)


def of_a_fused_projection(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """Rows of one matrix that hold the heads of all three side by side."""
    heads = [tensor.shape[1] for tensor in (q, k, v)]
    fused = torch.cat([tensor.transpose(1, 2) for tensor in (q, k, v)], dim=2).contiguous()
    own_q, own_k, own_v = (part.transpose(1, 2) for part in fused.split(heads, dim=2))
    return own_q, own_k, own_v


def positions_first(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    own_q, own_k, own_v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v))
    return own_q, own_k, own_v


def wide_rows(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """Rows of 16 more bytes, which TMA can address."""
    own_q, own_k, own_v = (
        torch.nn.functional.pad(tensor.transpose(1, 2), (0, 8))[..., :-8].transpose(1, 2)
        for tensor in (q, k, v)
    )
    return own_q, own_k, own_v


def every_other_head(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    own_q, own_k, own_v = (tensor.repeat_interleave(2, 1)[:, ::2] for tensor in (q, k, v))
    return own_q, own_k, own_v


def shared_over_the_batch(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    return q, k[:1].expand(BATCH, -1, -1, -1), v[:1].expand(BATCH, -1, -1, -1)


def queries_alike(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    return q[:, :1].expand(-1, HEADS, -1, -1), k, v


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(
    "view",
    [
        of_a_fused_projection,
        positions_first,
        wide_rows,
        every_other_head,
        shared_over_the_batch,
        queries_alike,
    ],
)
def test_strided_tensors_are_correct(view: Callable[..., Triple], head_dim: int) -> None:
    inputs = view(*tensors(head_dim))
    check(*inputs)
    if all(all(tensor.stride()) for tensor in inputs):
        assert family_of(*inputs)[0] == NATIVE


@pytest.mark.parametrize("shown", [2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_expanded_key_head_is_correct(head_dim: int, shown: int) -> None:
    """Keys and values expanded over their heads, with a stride of zero, whoever serves them."""
    q, k, v = tensors(head_dim, kv_heads=1)
    expanded = q, k.expand(-1, shown, -1, -1), v.expand(-1, shown, -1, -1)
    assert expanded[1].stride(1) == 0
    assert_right(attention(*expanded), q, k, v)
    planned = flashtune.plan(*expanded, causal=True, prefer="generated")
    assert_right(planned(*expanded), q, k, v)


def test_quantised_tensors_may_be_expanded_but_must_be_aligned() -> None:
    q, k, v = tensors(kv_heads=1)
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (quantize(tensor) for tensor in (q, k, v))

    def scaled(k: Tensor, v: Tensor, heads: int) -> Tensor:
        of_k, of_v = k_scale.expand(-1, heads), v_scale.expand(-1, heads)
        return flashtune.attention(q8, k, v, causal=True, q_scale=q_scale, k_scale=of_k, v_scale=of_v)

    plain = scaled(k8, v8, 1)
    shown = scaled(k8.expand(-1, 4, -1, -1), v8.expand(-1, 4, -1, -1), 4)
    assert torch.equal(plain, shown)
    # The copy engine's strides are multiples of 16 bytes; eight elements of one byte are half of that.
    half = torch.empty(*k8.shape[:3], 136, dtype=k8.dtype, device="cuda")[..., :128].copy_(k8)
    with pytest.raises(ProblemError, match="cannot address"):
        scaled(half, v8, 1)


def test_alternating_streams() -> None:
    inputs = [tensors(seed=seed) for seed in range(2)]
    expected = [attention(*each) for each in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    outs: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for stream, each, kept in zip(streams, inputs, outs, strict=True):
            with torch.cuda.stream(stream):
                kept.append(attention(*each))
    torch.cuda.synchronize()
    for kept, right in zip(outs, expected, strict=True):
        assert all(torch.equal(out, right) for out in kept)


def test_more_addresses_than_the_descriptor_cache_holds() -> None:
    q, k, v = tensors(64, length=64)
    expected = attention(q, k, v)
    room = torch.empty(MAX_ADDRESSES + 40, *q.shape, dtype=q.dtype, device="cuda").copy_(q)
    outs = [attention(each, k, v) for each in room]
    assert all(torch.equal(out, expected) for out in outs)
    assert torch.equal(attention(q, k, v), expected)
