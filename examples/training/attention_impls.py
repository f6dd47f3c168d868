"""The attention implementations to train with."""

import functools

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashtune
from examples.training.trainer import Way


def ours(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Computes attention with generated kernels only."""
    return flashtune.attention(q, k, v, causal=True, layout="bshd", dropout_p=dropout, prefer="generated")


def sdpas(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Computes attention with torch's SDPA."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout).transpose(1, 2)


def ways(device: torch.device) -> tuple[Way, Way, Way]:
    """Returns SDPA with its default backend, flashtune, and SDPA with another backend.

    The last one measures the difference between two correct implementations. Both round in different orders,
    and drop different weights.
    """
    other = SDPBackend.EFFICIENT_ATTENTION if device.type == "cuda" else SDPBackend.MATH
    return (
        Way("torch SDPA", sdpas),
        Way("flashtune", ours),
        Way("another SDPA", sdpas, functools.partial(sdpa_kernel, other), dropout_seed=2),
    )
