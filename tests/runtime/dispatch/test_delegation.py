"""Tests of SDPA with flashtune's semantics of masks, empty rows, groups and scales."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.dlpack import from_dlpack

from flashtune.core.problem import Causal
from flashtune.dispatch import sdpa
from flashtune.dispatch.bound_request import BoundRequest
from flashtune.dispatch.sdpa import (
    chosen_backend,
    copy_ms,
    default_backend,
    is_unaligned,
    readable,
    scaled_dot_product_attention,
    sdpa_attention,
    shares_heads,
)
from flashtune.request.call import dense_call
from tests.runtime.dispatch.untuned import TARGET
from tests.support.attention_operators import by_definition
from tests.support.machine import Machine

LENGTHS = [(7, 7), (5, 9), (9, 5), (1, 6), (6, 1), (4, 0), (3, 40)]


Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tensors(seqlen_q: int, seqlen_kv: int, kv_heads: int = 2) -> Triple:
    torch.manual_seed(seqlen_q * 100 + seqlen_kv)
    q = torch.randn(2, 4, seqlen_q, 16, dtype=torch.float64)
    k = torch.randn(2, kv_heads, seqlen_kv, 16, dtype=torch.float64)
    v = torch.randn(2, kv_heads, seqlen_kv, 24, dtype=torch.float64)
    return q, k, v


def expected(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: Causal) -> Tensor:
    bottom_right = causal is Causal.BOTTOM_RIGHT
    is_causal = causal is not Causal.NONE
    return by_definition(q, k, v, causal=is_causal, scale=scale, bottom_right=bottom_right)[0]


def copies_ms(*tensors: Tensor) -> float:
    return copy_ms([tensor for tensor in tensors if is_unaligned(tensor)], TARGET)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("causal", list(Causal))
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("scale", [0.3, -0.7, 0.0])
def test_masks_groups_and_scales(
    lengths: tuple[int, int], causal: Causal, kv_heads: int, scale: float
) -> None:
    q, k, v = tensors(*lengths, kv_heads)
    torch.testing.assert_close(sdpa_attention(q, k, v, scale, causal), expected(q, k, v, scale, causal))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("causal", list(Causal))
def test_gradients_are_finite_and_correct(lengths: tuple[int, int], causal: Causal) -> None:
    q, k, v = leaves = tensors(*lengths)
    for leaf in leaves:
        leaf.requires_grad_()
    out = sdpa_attention(q, k, v, 0.25, causal)
    weights = torch.randn_like(out)
    gradients = torch.autograd.grad((out * weights).sum(), leaves, materialize_grads=True)
    right = expected(q, k, v, 0.25, causal)
    exact = torch.autograd.grad((right * weights).sum(), leaves, materialize_grads=True)
    torch.testing.assert_close(gradients, exact)


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_copies_of_unaligned_tensors_take_time_and_unaligned_biases_have_no_default_backend(
    index: int,
) -> None:
    def made(shape: tuple[int, ...], moved: bool) -> Tensor:
        count = math.prod(shape)
        return torch.randn(count + 1, dtype=torch.bfloat16)[moved : moved + count].view(shape)

    q, k, v, bias = (made((1, 2, 16, 16), position == index) for position in range(4))
    assert (default_backend(q, k, v, Causal.NONE, bias) is None) == (index == 3)
    aligned = default_backend(q.clone(), k.clone(), v.clone(), Causal.NONE)
    assert default_backend(q, k, v, Causal.NONE) == aligned
    assert (copies_ms(q, k, v) > 0) == (index < 3)


def test_unaligned_external_memory_is_copied() -> None:
    base = torch.randn(2 * 16 * 16 + 1, dtype=torch.bfloat16)
    q = from_dlpack(base[1:]).view(1, 2, 16, 16)
    k = q.clone()
    assert q.storage_offset() == 0
    assert copies_ms(q, k, k) > copies_ms(k, k, k) == 0


@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
def test_hidden_keys_are_not_copied_for_sdpa(causal: str) -> None:
    q = torch.randn(1, 2, 16, 16, dtype=torch.bfloat16)
    k = torch.randn(1, 2, 64, 17, dtype=torch.bfloat16)[..., :16]
    bound = BoundRequest.of(dense_call(q, k, k, causal=causal), platform=Machine())
    read = k[:, :, :16] if causal == "top_left" else k
    assert bound.sdpa_copies_ms == copies_ms(q, read, read)


def test_sdpa_gets_copies_of_unaligned_views_and_of_shared_heads_in_float32() -> None:
    def sliced(width: int, heads: int, dtype: torch.dtype) -> Tensor:
        rows = torch.randn(1, 16, width, dtype=dtype)[..., : 16 * heads]
        unpacked: Tensor = rows.unflatten(-1, (heads, 16))
        return unpacked.transpose(1, 2)

    for dtype, width, copied in (
        (torch.bfloat16, 68, True),
        (torch.bfloat16, 72, False),
        (torch.float32, 68, False),
    ):
        q, k = sliced(width, 4, dtype), sliced(32, 2, dtype)
        copies = readable(q, k, k, shares_heads(q, k, k, None))
        assert (copies[0].data_ptr() != q.data_ptr()) == copied
        assert [tensor.shape[1] for tensor in copies[1:]] == ([2, 2] if dtype is torch.bfloat16 else [4, 4])


@pytest.mark.parametrize(
    ("heads", "lengths", "head_dim", "batch", "needs_grad", "masked", "shared"),
    [
        ((4, 2), (64, 64), 64, 1, True, False, True),
        ((4, 2), (64, 64), 64, 1, True, True, True),
        ((4, 2), (4096, 4096), 64, 1, True, False, False),
        # Few programs of the memory-efficient backward pass. It was timed on an H100.
        ((4, 1), (147, 4647), 96, 27, True, False, True),
        # Many heads fill the GPU, and scores of more than 512 MiB are not kept.
        ((32, 8), (64, 2048), 64, 16, True, False, False),
        ((32, 8), (4096, 4096), 256, 2, True, False, False),
        # Many keys of few tiles, whose bias has rows that are not aligned.
        ((8, 2), (107, 18486), 32, 5, False, True, True),
        ((12, 3), (1683, 1683), 64, 3, False, True, False),
        # Sequences that are shorter than a tile.
        ((64, 16), (23, 23), 64, 32, False, False, True),
        ((32, 8), (46, 46), 128, 25, False, True, False),
        ((2, 1), (311, 311), 160, 3, False, False, True),
        ((2, 1), (1131, 1131), 72, 9, False, False, False),
    ],
)
def test_unfused_path_of_sdpa_serves_shared_heads_in_float32_where_it_was_faster(
    heads: tuple[int, int],
    lengths: tuple[int, int],
    head_dim: int,
    batch: int,
    needs_grad: bool,
    masked: bool,
    shared: bool,
) -> None:
    """The calls without gradients were timed on an H200."""
    with FakeTensorMode():
        q = torch.empty(batch, heads[0], lengths[0], head_dim, requires_grad=needs_grad)
        k = torch.empty(batch, heads[1], lengths[1], head_dim)
        mask = torch.empty(batch, heads[0], *lengths) if masked else None
        assert shares_heads(q, k, k, mask) == shared
        assert readable(q, k, k, shared)[1].shape[1] == heads[1 if shared else 0]


def test_float32_with_more_queries_than_keys_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (tensor.float() for tensor in tensors(9, 5))
    right = expected(q, k, v, 0.3, Causal.TOP_LEFT)

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *options: Any, **more: Any) -> Tensor:
        assert mask is None
        return scaled_dot_product_attention(q, k, v, mask, *options, **more)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", attention)
    torch.testing.assert_close(sdpa_attention(q, k, v, 0.3, Causal.TOP_LEFT), right)


@pytest.mark.filterwarnings("error")
def test_fake_tensors_are_supported() -> None:
    with FakeTensorMode():
        q = torch.randn(1, 2, 16, 16, dtype=torch.bfloat16)
        assert default_backend(q, q, q, Causal.NONE) == chosen_backend(q, q, q, None, False)


def test_default_backend_requires_a_call_without_mask() -> None:
    q = k = v = torch.randn(1, 2, 8, 16)
    causal = Causal.BOTTOM_RIGHT
    assert default_backend(q, k, v, causal) in {"sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-math"}
    assert default_backend(q, k[:, :, :5], v[:, :, :5], causal) is None
