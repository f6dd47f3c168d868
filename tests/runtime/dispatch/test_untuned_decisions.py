"""Decisions for calls on an H200 whose shapes, masks or strides are not in its table."""

from typing import Any

import pytest
import torch

from flashtune.core.target import Target
from flashtune.dispatch.bound_request import BoundRequest
from flashtune.dispatch.decision import choose
from flashtune.dispatch.platform import Platform
from flashtune.dispatch.sdpa import shares_heads
from flashtune.request.call import dense_call
from tests.support.untuned import TARGET

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CUDNN, EFFICIENT, MATH = "sdpa-cudnn", "sdpa-efficient", "sdpa-math"


class OnH200(Platform):
    """An H200, and SDPA's backends there."""

    def target(self, device: torch.device) -> Target:
        return TARGET

    def has_kernels(self, device: torch.device) -> bool:
        return True

    def sdpa_backend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        shared: bool | None = None,
    ) -> str | None:
        if q.dtype is not FP32:
            return CUDNN
        return MATH if shares_heads(q, k, v, mask) else EFFICIENT


def server(
    dtype: torch.dtype,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    head_dim: int,
    *,
    batch: int,
    shifted: bool = False,
    needs_grad: bool = False,
    **options: Any,
) -> str:
    """Returns the backend of a call, or the family that serves. `shifted` tensors start 1 element later."""

    def made(count: int, length: int) -> torch.Tensor:
        shape = (batch, count, length, head_dim)
        size = batch * count * length * head_dim
        tensor = torch.empty(size + shifted, dtype=dtype)[int(shifted) :].view(shape)
        return tensor.requires_grad_(needs_grad)

    q, k, v = made(heads[0], lengths[0]), made(heads[1], lengths[1]), made(heads[1], lengths[1])
    masks = {name: value(q, k) if callable(value) else value for name, value in options.items()}
    selected = choose(BoundRequest.of(dense_call(q, k, v, **masks), platform=OnH200()))[0]
    assert selected.selection is not None
    return selected.selection.record.family if selected.generated else str(selected.backend)


def shared_bias(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.empty(1, q.shape[1], q.shape[2], k.shape[2], dtype=q.dtype)


def bias(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.empty(*q.shape[:3], k.shape[2], dtype=q.dtype)


def padding(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.empty(q.shape[0], 1, 1, k.shape[2], dtype=torch.bool)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [((440, 440), "sdpa"), ((264, 24), "forward_masked")],
    ids=["many keys", "one block of keys"],
)
def test_sdpa_with_copies_serves_biases_of_more_than_one_block(
    lengths: tuple[int, int], expected: str
) -> None:
    backend = server(BF16, (2, 2), lengths, 16, batch=2, shifted=True, attn_bias=shared_bias)
    assert backend == expected


def test_copies_count_for_sdpa() -> None:
    assert server(BF16, (64, 32), (123, 123), 128, batch=2, shifted=True) == "forward_q_outer"


@pytest.mark.parametrize(
    ("heads", "lengths", "head_dim", "batch", "options", "expected"),
    [
        ((1, 1), (120, 1214), 32, 1, {"attn_mask": padding}, "sdpa"),
        ((32, 4), (21, 4661), 40, 4, {"attn_bias": shared_bias}, "sdpa"),
        ((1, 1), (1255, 1255), 80, 3, {"attn_mask": padding}, "decode_split_kv"),
        ((2, 2), (159, 32728), 256, 2, {"attn_bias": shared_bias}, "decode_split_kv"),
        ((8, 1), (15, 347), 160, 2, {"attn_bias": shared_bias}, "decode_split_kv"),
    ],
)
def test_split_keys_with_masks_serve_wide_heads_or_few_queries(
    heads: tuple[int, int],
    lengths: tuple[int, int],
    head_dim: int,
    batch: int,
    options: dict[str, Any],
    expected: str,
) -> None:
    assert server(BF16, heads, lengths, head_dim, batch=batch, **options) == expected


def test_sdpa_serves_gradients_that_are_not_timed() -> None:
    assert server(BF16, (64, 64), (2, 681), 80, batch=5, needs_grad=True) == "sdpa"
    assert server(BF16, (64, 64), (2, 681), 80, batch=5) == "decode_split_kv"
    for causal, by_sdpa in (("top_left", True), ("bottom_right", False)):
        backend = server(BF16, (64, 64), (3, 1530), 160, batch=7, needs_grad=True, causal=causal)
        # Bottom-right, SDPA needs a mask, with which its gradients may be NaN.
        assert (backend == "sdpa") == by_sdpa


def test_sdpa_serves_masked_gradients_of_shared_heads_in_float32() -> None:
    backend = server(FP32, (4, 1), (33, 492), 40, batch=4, needs_grad=True, attn_mask=padding)
    assert backend == "sdpa"


@pytest.mark.parametrize(
    ("dtype", "heads", "lengths", "head_dim", "batch", "options"),
    [
        # Padded to 256 columns, of which SDPA computes 192.
        (BF16, (4, 1), (1260, 1260), 160, 9, {"needs_grad": True, "causal": "top_left"}),
        # No query sees most of the keys.
        (BF16, (2, 1), (1765, 4320), 160, 23, {"needs_grad": True, "causal": "top_left"}),
        (FP16, (4, 4), (80, 80), 128, 12, {"attn_bias": shared_bias}),
        (BF16, (1, 1), (20, 20), 96, 13, {"needs_grad": True, "causal": "top_left", "shifted": True}),
    ],
    ids=["padded heads", "hidden keys", "bias", "short"],
)
def test_sdpa_serves_uncertain_estimates(
    dtype: torch.dtype,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    head_dim: int,
    batch: int,
    options: dict[str, Any],
) -> None:
    """Kernels took 1.02 to 1.5 times as long as SDPA on an H200 or an H100."""
    assert server(dtype, heads, lengths, head_dim, batch=batch, **options) == "sdpa"


def test_unfused_gradients_of_few_scores_replace_slow_kernels() -> None:
    backend = server(BF16, (16, 2), (475, 25), 128, batch=2, needs_grad=True, shifted=True, attn_bias=bias)
    assert backend == "unfused"
    backend = server(BF16, (4, 4), (25, 25), 128, batch=26, needs_grad=True, attn_bias=shared_bias)
    assert backend == "forward_masked"


@pytest.mark.parametrize(
    ("heads", "lengths", "batch", "expected"),
    [
        ((16, 16), (3000, 3000), 2, "forward_q_outer"),
        ((16, 16), (64, 64), 2, "sdpa"),
        ((2, 2), (443, 443), 3, "sdpa"),
    ],
    ids=["near a timed shape", "short", "far"],
)
def test_float32_kernels_serve_near_timed_shapes(
    heads: tuple[int, int], lengths: tuple[int, int], batch: int, expected: str
) -> None:
    assert server(FP32, heads, lengths, 128, batch=batch) == expected
