"""Attention by torch's SDPA, with flashtune's semantics of masks and empty rows."""

from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch import Tensor

from flashtune.core.problem import Causal, Problem
from flashtune.core.target import Target
from flashtune.dispatch.masked_sdpa import (
    ADDRESS_ALIGNMENT,
    SelectBackend,
    chosen_backend,
    is_unaligned,
    readable,
    scaled_dot_product_attention,
    shares_heads,
    start,
    unexpanded,
)
from flashtune.launch.launch import MIN_SCALE

# Time of the launch of a copy in ms, measured on an H200.
COPY_MS = 0.0025


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: Causal) -> Tensor:
    """Returns attention of [batch, heads, seqlen, head_dim] tensors by SDPA. It is differentiable.

    SDPA aligns `is_causal` top-left, and its backends differ if lengths differ. Some give NaN in rows without
    visible keys. Different lengths therefore get an explicit mask, and rows without keys are left out.
    """
    # With a scale of 0, outputs are averages. 0 times the mask's -inf would be NaN.
    scale = scale or MIN_SCALE
    seqlen_q, seqlen_kv = q.shape[2], k.shape[2]
    if causal is Causal.TOP_LEFT and seqlen_q < seqlen_kv:
        # No query sees later keys.
        k, v = k[:, :, :seqlen_q], v[:, :, :seqlen_q]
        seqlen_kv = seqlen_q
    blind = max(0, seqlen_q - seqlen_kv) if causal is Causal.BOTTOM_RIGHT else 0
    if blind == seqlen_q and blind:
        # No row sees a key. The product keeps the output in autograd's graph.
        return q.new_zeros(*q.shape[:3], v.shape[3]) * q.sum(-1, keepdim=True)
    seeing = q[:, :, blind:] if blind else q
    # In float32, all backends align `is_causal` top-left, also with more queries than keys.
    square = seqlen_q - blind == seqlen_kv or (causal is Causal.TOP_LEFT and q.dtype is torch.float32)
    mask = None
    if causal is not Causal.NONE and not square:
        diagonal = seqlen_kv - seqlen_q if causal is Causal.BOTTOM_RIGHT else 0
        mask = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool, device=q.device).tril(diagonal)
    is_causal = causal is not Causal.NONE and square
    gqa = shares_heads(seeing, k, v, mask)
    read = readable(seeing, k, v, gqa)
    out = scaled_dot_product_attention(*read, mask, 0.0, is_causal, scale=scale, enable_gqa=gqa)
    if not blind:
        return out
    return torch.cat([out.new_zeros(*out.shape[:2], blind, out.shape[3]), out], 2)


def copies_ms(tensors: Iterable[Tensor], target: Target) -> float:
    """Returns the time of the copies of unaligned tensors that SDPA gets, in ms."""
    odd = [tensor for tensor in tensors if is_unaligned(tensor)]
    return copy_ms(odd, target)


def copy_ms(tensors: Sequence[Tensor], target: Target) -> float:
    """Returns the time in which tensors are copied, in ms."""
    moved = 2 * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return len(tensors) * COPY_MS + moved / (target.hbm_bandwidth * 1e6)


def has_hidden_keys(problem: Problem) -> bool:
    """Whether no query of a problem without features sees the last keys."""
    return problem.causal is Causal.TOP_LEFT and problem.seqlen_q < problem.seqlen_kv


def default_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    bias: Tensor | None = None,
    select: SelectBackend = chosen_backend,
) -> str | None:
    """Returns the baseline that SDPA selects, or None if it was not measured in the way SDPA would use it.

    It was not measured for causal masks with different lengths. SDPA gets copies
    of tensors whose addresses or strides are not multiples of 16 bytes. Their time is added by `copies_ms`.
    Tensors are [batch, heads, seqlen, head_dim]. The bias is additive, or a boolean mask. `select` returns
    the backend, as `chosen_backend`.
    """
    if bias is None and has_hidden_keys(problem):
        # `sdpa_attention` leaves them out.
        seqlen = problem.seqlen_q
        problem = msgspec.structs.replace(problem, seqlen_kv=seqlen)
        k, v = k[:, :, :seqlen], v[:, :, :seqlen]
    causal = problem.causal is not Causal.NONE and bias is None
    if causal and problem.seqlen_q != problem.seqlen_kv:
        return None
    if bias is not None and bias.dtype is not torch.bool and start(bias) % ADDRESS_ALIGNMENT:
        return None
    return select(q, k, v, None if bias is None else unexpanded(bias), causal)
