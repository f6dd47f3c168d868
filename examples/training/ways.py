"""Ways of attention that a model is trained with."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashtune
from examples.training.trainer import Way


def ours(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """By generated kernels, never by SDPA."""
    return flashtune.attention(q, k, v, causal=True, layout="bshd", dropout_p=dropout, prefer="generated")


def sdpas(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """By torch's SDPA."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout).transpose(1, 2)


def ways(device: torch.device) -> tuple[Way, Way, Way]:
    """SDPA as torch chooses its backend, flashtune, and SDPA by another backend.

    The last says how far two right ways drift apart: both round in another order, and drop other weights.
    """
    other = SDPBackend.EFFICIENT_ATTENTION if device.type == "cuda" else SDPBackend.MATH
    return (
        Way("torch SDPA", sdpas),
        Way("flashtune", ours),
        Way("another SDPA", sdpas, functools.partial(sdpa_kernel, other), dropout_seed=2),
    )
