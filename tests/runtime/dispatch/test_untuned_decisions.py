"""Decisions for calls on an H200 whose shapes, masks or strides are not in its table."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune.core.target import Target
from flashtune.dispatch.bound_request import BoundRequest
from flashtune.dispatch.decision import choose
from flashtune.dispatch.platform import Platform
from flashtune.dispatch.sdpa import shares_heads
from flashtune.request.call import dense_call
from tests.runtime.dispatch.untuned import TARGET

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CUDNN, EFFICIENT, MATH = "sdpa-cudnn", "sdpa-efficient", "sdpa-math"


class OnH200(Platform):
    """An H200, and SDPA's backends there."""

    def target(self, device: torch.device) -> Target:
        return TARGET

    def has_kernels(self, device: torch.device) -> bool:
        return True

    def sdpa_backend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, shared: bool | None = None
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

    def made(count: int, length: int) -> Tensor:
        shape = (batch, count, length, head_dim)
        size = batch * count * length * head_dim
        tensor = torch.empty(size + shifted, dtype=dtype)[int(shifted) :].view(shape)
        return tensor.requires_grad_(needs_grad)

    q, k, v = made(heads[0], lengths[0]), made(heads[1], lengths[1]), made(heads[1], lengths[1])
    masks = {name: value(q, k) if callable(value) else value for name, value in options.items()}
    selected = choose(BoundRequest.of(dense_call(q, k, v, **masks), platform=OnH200()))[0]
    assert selected.selection is not None
    return selected.selection.record.family if selected.generated else str(selected.backend)


def shared_bias(q: Tensor, k: Tensor) -> Tensor:
    return torch.empty(1, q.shape[1], q.shape[2], k.shape[2], dtype=q.dtype)


def bias(q: Tensor, k: Tensor) -> Tensor:
    return torch.empty(*q.shape[:3], k.shape[2], dtype=q.dtype)


def padding(q: Tensor, k: Tensor) -> Tensor:
    return torch.empty(q.shape[0], 1, 1, k.shape[2], dtype=torch.bool)


BIASED: dict[str, Any] = {"attn_bias": shared_bias}
PADDED: dict[str, Any] = {"attn_mask": padding}
TRAINED: dict[str, Any] = {"needs_grad": True, "causal": "top_left"}
# Calls, and the backend or the family that serves each.
CALLS: dict[str, tuple[Callable[[], str], str]] = {
    # SDPA copies unaligned tensors, which takes time.
    "copies": (partial(server, BF16, (64, 32), (123, 123), 128, batch=2, shifted=True), "forward_q_outer"),
    # Biases of more than one block are served by SDPA all the same.
    "copies, bias": (partial(server, BF16, (2, 2), (440, 440), 16, batch=2, shifted=True, **BIASED), "sdpa"),
    "copies, bias of one block": (
        partial(server, BF16, (2, 2), (264, 24), 16, batch=2, shifted=True, **BIASED),
        "forward_masked",
    ),
    # Split keys serve masks of wide heads or of few queries.
    "mask": (partial(server, BF16, (1, 1), (120, 1214), 32, batch=1, **PADDED), "sdpa"),
    "bias": (partial(server, BF16, (32, 4), (21, 4661), 40, batch=4, **BIASED), "sdpa"),
    "mask, d80": (partial(server, BF16, (1, 1), (1255, 1255), 80, batch=3, **PADDED), "decode_split_kv"),
    "bias, d256": (partial(server, BF16, (2, 2), (159, 32728), 256, batch=2, **BIASED), "decode_split_kv"),
    "bias, few queries": (
        partial(server, BF16, (8, 1), (15, 347), 160, batch=2, **BIASED),
        "decode_split_kv",
    ),
    # SDPA serves gradients that are not timed.
    "gradient": (partial(server, BF16, (64, 64), (2, 681), 80, batch=5, needs_grad=True), "sdpa"),
    "no gradient": (partial(server, BF16, (64, 64), (2, 681), 80, batch=5), "decode_split_kv"),
    "causal gradient": (partial(server, BF16, (64, 64), (3, 1530), 160, batch=7, **TRAINED), "sdpa"),
    "masked gradient of shared heads": (
        partial(server, FP32, (4, 1), (33, 492), 40, batch=4, needs_grad=True, **PADDED),
        "sdpa",
    ),
    # Kernels took 1.02 to 1.5 times as long as SDPA on an H200 or an H100. Heads are padded to 256 columns,
    # of which SDPA computes 192, or no query sees most of the keys.
    "padded heads": (partial(server, BF16, (4, 1), (1260, 1260), 160, batch=9, **TRAINED), "sdpa"),
    "hidden keys": (partial(server, BF16, (2, 1), (1765, 4320), 160, batch=23, **TRAINED), "sdpa"),
    # Kernels write zeros for keys that no query sees, and take the configs of shapes without these keys.
    "many hidden keys": (partial(server, BF16, (2, 2), (97, 2772), 256, batch=23, **TRAINED), "sdpa"),
    "few hidden keys": (partial(server, BF16, (8, 8), (255, 475), 64, batch=2, **TRAINED), "forward_hopper"),
    "unaligned gradients": (
        partial(server, FP16, (32, 32), (94, 94), 160, batch=3, shifted=True, **TRAINED),
        "sdpa",
    ),
    "fp16 bias": (partial(server, FP16, (4, 4), (80, 80), 128, batch=12, **BIASED), "sdpa"),
    # Unaligned tensors of split head dims take the config of another head dim, with a lower estimate.
    "short": (
        partial(server, BF16, (1, 1), (20, 20), 96, batch=13, shifted=True, **TRAINED),
        "forward_q_outer",
    ),
    # Unfused gradients of few scores replace slow kernels.
    "few scores": (
        partial(
            server, BF16, (16, 2), (475, 25), 128, batch=2, needs_grad=True, shifted=True, attn_bias=bias
        ),
        "unfused",
    ),
    "fewer scores": (
        partial(server, BF16, (4, 4), (25, 25), 128, batch=26, needs_grad=True, **BIASED),
        "forward_masked",
    ),
    # Kernels serve float32 near timed shapes.
    "float32, near": (partial(server, FP32, (16, 16), (3000, 3000), 128, batch=2), "forward_q_outer"),
    "float32, short": (partial(server, FP32, (16, 16), (64, 64), 128, batch=2), "sdpa"),
    "float32, far": (partial(server, FP32, (2, 2), (443, 443), 128, batch=3), "sdpa"),
}


@pytest.mark.parametrize("name", CALLS)
def test_untuned_calls_are_served_by_the_fastest(name: str) -> None:
    call, expected = CALLS[name]
    assert call() == expected


def test_sdpa_does_not_serve_gradients_that_may_be_nan() -> None:
    """Bottom-right, SDPA needs a mask, with which its gradients may be NaN."""
    options: dict[str, Any] = {"needs_grad": True, "causal": "bottom_right"}
    assert server(BF16, (64, 64), (3, 1530), 160, batch=7, **options) != "sdpa"
