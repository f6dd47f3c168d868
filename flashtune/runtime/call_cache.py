"""The per-process cache of executors: one entry for each kind of call, a few thousand at most.

A call of a known kind only computes its key and looks up its executor. Other calls take the slow path under
one lock, so that threads compile a kernel once. Each number of packed tokens is another kind of call. These
kinds share the selected kernel and its binary, which are slow to make (`flashtune.runtime.prepare`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from flashtune.core.arguments import MAX_FLOAT32
from flashtune.core.canonical import rounded_up
from flashtune.core.errors import KernelError
from flashtune.core.features.records import NO_EXTRA_INPUTS, TENSORS
from flashtune.core.session import SESSION, keep
from flashtune.dispatch.bound_request import BoundRequest, side_gradients
from flashtune.dispatch.decision import without_values
from flashtune.recording.callers import note_caller
from flashtune.recording.recorder import counted, recording
from flashtune.request.autocast import any_autocast, autocast_dtype
from flashtune.request.call import requires_grad
from flashtune.request.quantization import with_positive_scale
from flashtune.request.tensor_checks import allows_tf32
from flashtune.runtime.executors import write_output
from flashtune.runtime.prepare import prepare
from flashtune.runtime.torch_modes import runs_eagerly
from flashtune.runtime.value_checks import with_checks

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.request.call import Call
    from flashtune.request.request import Executor, Result

AnyExecutor = TypeVar("AnyExecutor", bound=Callable[..., Any])

SEED = TENSORS.index("seed")
# Places in keys of whether q, k and v, and whether the bias, are aligned to 16 bytes.
ALIGNED, BIAS_ALIGNED = 6, 16 + len(TENSORS)
# Bound once, because each call uses them.
is_grad_enabled = torch.is_grad_enabled
float32 = torch.float32
is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms

_executors: dict[tuple[object, ...], Any] = SESSION.cache("executors")


def known_executor(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: object,
    scale: float | None,
    layout: object,
    return_lse: object,
    prefer: object,
    deterministic: object,
) -> Executor | None:
    """Returns the executor of an eager call without features if the cache has it.

    Most calls of a program need no more than this. The arguments are not checked, but invalid ones are never
    found. A scale that is negative or not a float is not found either.
    """
    if scale is not None and not (type(scale) is float and 0.0 <= scale <= MAX_FLOAT32):
        return None
    # 1 and 0 are equal to the flags in keys.
    if type(return_lse) is not bool or type(deterministic) is not bool or not runs_eagerly(q, k, v):
        return None
    if q.is_neg() or k.is_neg() or v.is_neg():
        return None
    causal = "bottom_right" if causal is True else "none" if causal is False else causal
    try:
        if any_autocast():
            dtype = autocast_dtype(q.device)
            if dtype is not None and not (q.dtype is k.dtype is v.dtype is dtype):
                return None
        return _executors.get(_tensor_key(q, k, v, (causal, layout, return_lse, prefer), deterministic))
    except (RuntimeError, TypeError):
        # A tensor has no strides, or an option is not hashable.
        return None


def call_key(call: Call) -> tuple[object, ...]:
    """Returns the cache key of a call: all properties on which its executor depends.

    Values of tensors and numbers for kernels are not part of it. Of addresses, only the alignment to 16 bytes
    is. Of the lengths of packed sequences, the key contains only the longest, rounded up to a power of two.
    An invalid call may raise the errors that `flashtune.core.arguments.checked` handles.
    """
    q, k, v, _, options, side, _ = call
    if side is NO_EXTRA_INPUTS and not options.has_mask:
        kind = options.causal, options.layout, options.return_lse, options.prefer
        return _tensor_key(q, k, v, kind, options.deterministic)
    extra = [None if tensor is None else _kind(tensor) for tensor in side.optional_tensors]
    if options.max_seqlen_q or options.max_seqlen_k:
        options = options._replace(
            max_seqlen_q=rounded_up(options.max_seqlen_q), max_seqlen_k=rounded_up(options.max_seqlen_k)
        )
    if side.dropout is not None:
        # Seeds of all calls have the same properties, and plans are made before there is a seed.
        extra[SEED] = None
    return (
        *_tensor_key(q, k, v, options, options.deterministic),
        *extra,
        side.bias is None or side.bias.data_ptr() & 15 == 0,
        *[number is None for number in side.numbers],
        requires_grad(call) and (_gradient_kind(options.deterministic), side_gradients(side)),
    )


def _tensor_key(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[object, ...], deterministic: bool
) -> tuple[object, ...]:
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


def run_call(call: Call) -> Result:
    """Returns attention of tensors with memory, by the executor of their kind of call."""
    call = unsigned(call)
    return executor_of(call_key(call), call)(call.q, call.k, call.v, call.scale, call.side)


def write_call(out: Tensor, call: Call) -> None:
    """Writes the output of a call without a log-sum-exp to a tensor, which overlaps no input.

    Raises the errors of `run_call`.
    """
    call = unsigned(call)
    executor = executor_of(call_key(call), call)
    write_output(executor, out, call.q, call.k, call.v, call.scale, call.side)


def resolved(call: Call) -> Call:
    """Returns a call whose tensors have their sign in memory. `x.conj().imag` has not."""
    if not is_negated(call):
        return call
    named = zip(TENSORS, call.side.optional_tensors, strict=True)
    changes: dict[str, Any] = {name: signed(one) for name, one in named if one is not None}
    side = call.side._replace(**changes) if changes else call.side
    return call._replace(q=signed(call.q), k=signed(call.k), v=signed(call.v), side=side)


def is_negated(call: Call) -> bool:
    """Whether a tensor of a call has its sign in a flag, which kernels do not read."""
    if call.q.is_neg() or call.k.is_neg() or call.v.is_neg():
        return True
    side = call.side
    return side is not NO_EXTRA_INPUTS and any(
        one is not None and one.is_neg() for one in side.optional_tensors
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
    call = resolved(call)
    scale = call.scale
    if scale is None or (type(scale) is float and 0.0 <= scale <= MAX_FLOAT32):
        return call
    q, scale = with_positive_scale(call.q, scale)
    return call._replace(q=q, scale=scale)


def executor_of(key: tuple[object, ...], call: Call) -> Executor:
    """Returns the executor of a kind of call. It is prepared if the cache does not contain it."""

    def make(bound: BoundRequest) -> Executor:
        request = bound.request
        executor = with_checks(prepare(bound), request)
        if not recording() or request.is_double or without_values(request) is not None:
            return executor
        for one in bound.passes:
            executor = counted(executor, one.problem, one.specialization)
        return executor

    return remembered(key, call, make)


def remembered(
    key: tuple[object, ...],
    call: Call,
    make: Callable[[BoundRequest], AnyExecutor],
    needs_grad: bool | None = None,
) -> AnyExecutor:
    """Returns the cached entry of a key, or a new one: `make` of the call's bound request."""
    executor: AnyExecutor | None = _executors.get(key)
    if executor is not None:
        return executor
    with SESSION.preparing:
        executor = _executors.get(key)
        if executor is None:
            bound = BoundRequest.of(call, needs_grad)
            try:
                _refuse_capture(call.q)
            except KernelError:
                executor = _for_any_address(key)
                if executor is None:
                    raise
                return executor
            executor = make(bound)
            note_caller(bound.request.problem)
            keep(_executors, key, executor)
        return executor


def _for_any_address(key: tuple[object, ...]) -> Any:
    """Returns the executor of the same call for tensors that are not aligned, or None if there is none.

    A compiler that captures a graph copies tensors to other addresses than in the run before.
    """
    flags = [place for place in (ALIGNED, BIAS_ALIGNED) if place < len(key) and key[place] is True]
    for values in itertools.product((True, False), repeat=len(flags)):
        other = list(key)
        for place, value in zip(flags, values, strict=True):
            other[place] = value
        executor = _executors.get(tuple(other))
        if executor is not None:
            return executor
    return None


def _refuse_capture(q: Tensor) -> None:
    if not q.is_cuda:
        return
    with torch.cuda.device(q.device):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise KernelError(
            "a CUDA graph is being captured and this shape is new, so that its kernel cannot be compiled and "
            "loaded now: call flashtune.plan(...) with tensors of this shape before the capture"
        )
