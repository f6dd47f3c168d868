"""Keys of kinds of calls, and calls whose tensors have their sign in memory."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flashtune.core.arguments import MAX_FLOAT32
from flashtune.core.canonical import rounded_up
from flashtune.core.features.records import NO_EXTRA_INPUTS, TENSORS
from flashtune.dispatch.bound_request import side_gradients
from flashtune.request.call import Call, requires_grad
from flashtune.request.quantization import with_positive_scale
from flashtune.request.tensor_checks import allows_tf32

SEED = TENSORS.index("seed")
# Places in keys of whether q, k and v, and whether the bias, are aligned to 16 bytes.
ALIGNED, BIAS_ALIGNED = 6, 16 + len(TENSORS)
# Bound once, because each call uses them.
is_grad_enabled = torch.is_grad_enabled
float32 = torch.float32
is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms


def call_key(call: Call) -> tuple[object, ...]:
    """Returns the cache key of a call: all properties on which its executor depends.

    Values of tensors and numbers for kernels are not part of it. Of addresses, only the alignment to 16 bytes
    is. Of the lengths of packed sequences, the key contains only the longest, rounded up to a power of two.
    An invalid call may raise the errors that `flashtune.core.arguments.checked` handles.
    """
    q, k, v, _, options, side, *_ = call
    has_option = options.has_mask or options.batch_invariant or options.out_order
    if side is NO_EXTRA_INPUTS and not has_option:
        kind = options.causal, options.layout, options.return_lse, options.prefer
        return tensor_key(q, k, v, kind, options.deterministic)
    extra = [None if tensor is None else _kind(tensor) for tensor in side.optional_tensors]
    if options.max_seqlen_q or options.max_seqlen_k:
        options = options._replace(
            max_seqlen_q=rounded_up(options.max_seqlen_q), max_seqlen_k=rounded_up(options.max_seqlen_k)
        )
    if side.dropout is not None:
        # Seeds of all calls have the same properties, and plans are made before there is a seed.
        extra[SEED] = None
    return (
        *tensor_key(q, k, v, options, options.deterministic),
        *extra,
        side.bias is None or side.bias.data_ptr() & 15 == 0,
        *[number is None for number in side.numbers],
        requires_grad(call) and (_gradient_kind(options.deterministic), side_gradients(side)),
    )


def short_key(call: Call) -> tuple[object, ...] | None:
    """Returns the key of a call by its kind, or None if it has none, or a sign that kernels do not read."""
    q, k, v, scale, _, _, _, kind = call
    if kind is None or not (scale is None or (type(scale) is float and 0.0 <= scale <= MAX_FLOAT32)):
        return None
    if q.is_neg() or k.is_neg() or v.is_neg():
        return None
    return tensor_key(q, k, v, (kind,), deterministic=False)


def tensor_key(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[object, ...], deterministic: bool
) -> tuple[object, ...]:
    """Returns the cache key of a call without features."""
    dtype = q.dtype
    return (
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 == 0,
        dtype,
        dtype is float32 and allows_tf32(),
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        options,
        is_grad_enabled()
        and (q.requires_grad or k.requires_grad or v.requires_grad)
        and _gradient_kind(deterministic),
    )


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _gradient_kind(deterministic: bool) -> str:
    """Returns the part of a key that only calls with gradients have."""
    return "same bits" if deterministic or is_deterministic() else "gradients"


def keys_of_any_address(key: tuple[object, ...]) -> Iterator[tuple[object, ...]]:
    """Yields the keys of the same call for tensors that are aligned and that are not.

    A compiler that captures a graph copies tensors to other addresses than in the run before.
    """
    flags = [
        position for position in (ALIGNED, BIAS_ALIGNED) if position < len(key) and key[position] is True
    ]
    for values in itertools.product((True, False), repeat=len(flags)):
        other = list(key)
        for index, value in zip(flags, values, strict=True):
            other[index] = value
        yield tuple(other)


def is_negated(call: Call) -> bool:
    """Whether a tensor of a call has its sign in a flag, which kernels do not read."""
    if call.q.is_neg() or call.k.is_neg() or call.v.is_neg():
        return True
    side = call.side
    return side is not NO_EXTRA_INPUTS and any(
        tensor is not None and tensor.is_neg() for tensor in side.optional_tensors
    )


def signed(tensor: Tensor) -> Tensor:
    """Returns a tensor with its sign in memory, of the same strides if it is copied and not expanded."""
    if not tensor.is_neg():
        return tensor
    if 0 in tensor.stride():
        return tensor.resolve_neg()
    room = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return room.copy_(tensor)


def unsigned(call: Call) -> Call:
    """Returns a call with signs in memory, and with negated queries in place of a negative scale."""
    if is_negated(call):
        # `x.conj().imag` has its sign in a flag.
        named = zip(TENSORS, call.side.optional_tensors, strict=True)
        changes: dict[str, Any] = {name: signed(tensor) for name, tensor in named if tensor is not None}
        side = call.side._replace(**changes) if changes else call.side
        call = call._replace(q=signed(call.q), k=signed(call.k), v=signed(call.v), side=side)
    scale = call.scale
    if scale is None or (type(scale) is float and 0.0 <= scale <= MAX_FLOAT32):
        return call
    q, scale = with_positive_scale(call.q, scale)
    return call._replace(q=q, scale=scale)
