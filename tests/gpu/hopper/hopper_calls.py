"""Causal calls that Hopper kernels serve, and their references."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashtune

NATIVE, PORTABLE = "forward_hopper", "forward_q_outer"
TOLERANCE = 1.6e-2
BATCH, HEADS, KV_HEADS, LENGTH = 2, 8, 2, 333
Triple = tuple[Tensor, Tensor, Tensor]


def tensors(head_dim: int = 128, seed: int = 0, length: int = LENGTH, kv_heads: int = KV_HEADS) -> Triple:
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (
        torch.randn(BATCH, heads, length, head_dim, dtype=torch.bfloat16, device="cuda", generator=generator)
        for heads in (HEADS, kv_heads, kv_heads)
    )
    return q, k, v


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flashtune.attention(q, k, v, causal=True, prefer="generated")


def assert_right(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    wide = q.double(), k.double(), v.double()
    expected = scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE, rtol=TOLERANCE)
