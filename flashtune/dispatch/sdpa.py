"""Attention by torch's SDPA, with flashtune's semantics of masks and empty rows."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashtune.core.problem import Bias, Causal, Dtype, Problem
from flashtune.core.target import Target, find_target
from flashtune.dispatch.sdpa_times import MATH, unfused_leads, unfused_pair_leads
from flashtune.launch.launch import MIN_SCALE
from flashtune.request.tensor_checks import dtype_of

SelectBackend = Callable[..., str | None]
# Programs replace the name in `torch.nn.functional` by functions that call flashtune.
scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention
# Names of SDPA's backends in records, by their numbers in `torch._fused_sdp_choice`.
PEERS = {0: MATH, 1: "sdpa-flash", 2: "sdpa-efficient", 3: "sdpa-cudnn"}
# Backends load this many bytes at once.
ADDRESS_ALIGNMENT = 16
# The GPU for which times of SDPA's backends in float32 are compared.
MEASURED_TARGET = "nvidia-h200"
# Time of the launch of a copy in ms, measured on an H200.
COPY_MS = 0.0025


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: Causal) -> Tensor:
    """Returns attention of [batch, heads, seqlen, head_dim] tensors by SDPA. It is differentiable.

    SDPA aligns `is_causal` top-left, and its backends differ if lengths differ. Some give NaN in rows without
    visible keys. Different lengths therefore get an explicit mask, and rows without keys are left out.
    """
    # With a scale of 0, outputs are averages. 0 times the mask's -inf would be NaN.
    scale = scale or MIN_SCALE
    k, v = seen_keys(q, k, v, causal)
    seqlen_q, seqlen_kv = q.shape[2], k.shape[2]
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
    gqa = shares_heads(seeing, k, v, mask, is_causal)
    read = readable(seeing, k, v, gqa)
    out = scaled_dot_product_attention(*read, mask, 0.0, is_causal, scale=scale, enable_gqa=gqa)
    if not blind:
        return out
    return torch.cat([out.new_zeros(*out.shape[:2], blind, out.shape[3]), out], 2)


def seen_keys(q: Tensor, k: Tensor, v: Tensor, causal: Causal) -> tuple[Tensor, Tensor]:
    """Returns the keys and values without those after the last query of a top-left mask, which hides them."""
    seqlen_q = q.shape[2]
    if causal is Causal.TOP_LEFT and seqlen_q < k.shape[2]:
        return k[:, :, :seqlen_q], v[:, :, :seqlen_q]
    return k, v


def shares_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> bool:
    """Whether SDPA gets fewer heads of keys than of queries. The mask is additive or boolean.

    In float32 no fused backend takes them. The unfused path may still be faster than copies of heads and a
    fused backend.
    """
    if q.shape[1] == k.shape[1]:
        return False
    if q.dtype is not torch.float32:
        return True
    if not torch.backends.cuda.math_sdp_enabled():
        return False
    # A compiled program must not be limited to the sizes that it was traced with.
    if any(isinstance(size, torch.SymInt) for size in (*q.shape, *k.shape)):
        return False
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    problem = Problem(
        dtype=dtype_of(q) if needs_grad else Dtype.FP32,
        head_dim=q.shape[3],
        value_head_dim=q.shape[3],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        batch=q.shape[0],
        seqlen_q=q.shape[2],
        seqlen_kv=k.shape[2],
        causal=Causal.TOP_LEFT if causal and needs_grad else Causal.NONE,
        bias=Bias.NONE if mask is None else Bias.ADDITIVE,
    )
    return _unfused_leads(problem, 0 if mask is None or needs_grad else _padded_bytes(mask), needs_grad)


@functools.lru_cache(maxsize=8192)
def _unfused_leads(problem: Problem, padded_bytes: int, needs_grad: bool) -> bool:
    if needs_grad:
        return unfused_pair_leads(problem)
    return unfused_leads(problem, padded_bytes, find_target(MEASURED_TARGET))


def _padded_bytes(mask: Tensor) -> int:
    """Returns the bytes of an additive mask that SDPA's memory-efficient backend copies to align its rows."""
    if mask.dtype is torch.bool or mask.shape[-1] * mask.element_size() % ADDRESS_ALIGNMENT == 0:
        return 0
    whole = unexpanded(mask)
    return whole.numel() * whole.element_size()


def readable(q: Tensor, k: Tensor, v: Tensor, shared: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tensors that SDPA's backends can read: copies if unaligned, and of heads unless shared."""
    if q.shape[1] != k.shape[1] and not shared:
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    q, k, v = (
        tensor.clone(memory_format=torch.contiguous_format) if is_unaligned(tensor) else tensor
        for tensor in (q, k, v)
    )
    return q, k, v


def is_unaligned(tensor: Tensor) -> bool:
    """Whether the address or a stride of [batch, heads, seqlen, head_dim] is no multiple of 16 bytes.

    Some backends need such addresses and strides and do not check them. With other strides, the outputs of
    the cuDNN backend were wrong.
    """
    size = tensor.element_size()
    if start(tensor) % ADDRESS_ALIGNMENT:
        return True
    steps = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return any(extent > 1 and step * size % ADDRESS_ALIGNMENT for extent, step in steps)


def start(tensor: Tensor) -> int:
    """Returns the address of a tensor, or the offset of a tensor subclass, which may have no address."""
    if type(tensor) is Tensor:
        # Memory of other libraries may start at any address with an offset of 0.
        return tensor.data_ptr()
    # torch allocates at multiples of 256 bytes.
    return int(tensor.storage_offset()) * tensor.element_size()


def unexpanded(bias: Tensor) -> Tensor:
    """Returns a bias in four dimensions. Expanded dimensions have size 1."""
    bias = bias[(None,) * (4 - bias.dim())]
    for dimension in range(3):
        if bias.stride(dimension) == 0 and bias.shape[dimension] > 1:
            bias = bias.narrow(dimension, 0, 1)
    return bias


def copy_ms(tensors: Sequence[Tensor], target: Target) -> float:
    """Returns the time in which tensors are copied, in ms."""
    moved = 2 * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return len(tensors) * COPY_MS + moved / (target.hbm_bandwidth * 1e6)


def chosen_backend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, shared: bool | None = None
) -> str | None:
    """Returns the name of the backend that SDPA selects for a call, or None if it has none.

    `shared` is the result of `shares_heads`, by default for this call.
    """
    if q.shape[1] != k.shape[1] and not (shares_heads(q, k, v, mask, causal) if shared is None else shared):
        k, v = (tensor[:, :1].expand(-1, q.shape[1], -1, -1) for tensor in (k, v))
    # torch has no public function for this.
    choice = torch._fused_sdp_choice(  # pyright: ignore[reportPrivateImportUsage]
        q, k, v, mask, 0.0, causal, scale=None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return PEERS.get(int(choice))


def default_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: Causal,
    bias: Tensor | None = None,
    select: SelectBackend = chosen_backend,
) -> str | None:
    """Returns the baseline that SDPA selects, or None if it was not measured in the way SDPA would use it.

    It was not measured for causal masks with different lengths. SDPA gets copies of tensors with addresses or
    strides that are not multiples of 16 bytes. The time of these copies is not included. Tensors are [batch,
    heads, seqlen, head_dim], without keys that no query sees. The bias is additive, or a boolean mask.
    `select` returns the backend, as `chosen_backend`.
    """
    is_causal = causal is not Causal.NONE and bias is None
    if is_causal and q.shape[2] != k.shape[2]:
        return None
    if bias is not None and bias.dtype is not torch.bool and start(bias) % ADDRESS_ALIGNMENT:
        return None
    return select(q, k, v, None if bias is None else unexpanded(bias), is_causal)
