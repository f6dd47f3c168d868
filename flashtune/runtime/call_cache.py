"""The per-process cache of executors: one entry for each kind of call, a few thousand at most.

A call of a known kind only computes its key and looks up its executor. Other calls take the slow path under
one lock, so that threads compile a kernel once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from flashtune.core.arguments import MAX_FLOAT32, read_scale
from flashtune.core.errors import KernelError
from flashtune.core.extra_inputs import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.dispatch.decision import required_specialization
from flashtune.dispatch.pair_decision import backward_specialization
from flashtune.recording.recorder import counted, on_change, recording
from flashtune.request.quantization import with_positive_scale
from flashtune.request.request import Executor, Request, Result, read_request, requires_grad
from flashtune.runtime.kernel_fallback import forget_choices
from flashtune.runtime.prepare import prepare
from flashtune.runtime.prepare_training import prepare_pair
from flashtune.runtime.value_checks import with_checks

# The cache is cleared at this size. Kernels stay loaded.
MEMO_LIMIT = 4096

AnyExecutor = TypeVar("AnyExecutor", bound=Callable[..., Any])

_executors: dict[tuple[object, ...], Any] = {}
_preparing = threading.RLock()


def check_arguments(
    q: Tensor, k: Tensor, v: Tensor, causal: bool | str, scale: float | None, *options: Any
) -> None:
    """Checks the arguments of `serve`.

    Raises:
        ProblemError: The call is invalid.
    """
    read_scale(scale)
    read_request(q, k, v, causal, *options)


def call_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str,
    layout: str,
    return_lse: bool,
    prefer: str,
    scales: ExtraInputs = NO_EXTRA_INPUTS,
    deterministic: bool = False,
) -> tuple[object, ...]:
    """Returns the cache key of a call: all properties on which its executor depends.

    Values of tensors and scales are not part of it. Of addresses, only the alignment to 16 bytes is.
    """
    return (
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 == 0,
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        causal,
        layout,
        return_lse,
        prefer,
        scales is not NO_EXTRA_INPUTS and (scales.presence, requires_grad(q, k, v, scales)),
        torch.is_grad_enabled()
        and (q.requires_grad or k.requires_grad or v.requires_grad)
        and gradient_key(deterministic),
    )


def gradient_key(deterministic: bool) -> str:
    """Returns the kind of gradients of a call, the part of a key that only calls with gradients have."""
    return "same bits" if deterministic or torch.are_deterministic_algorithms_enabled() else "gradients"


def serve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str,
    scale: float | None,
    layout: str,
    return_lse: bool,
    prefer: str,
    scales: ExtraInputs = NO_EXTRA_INPUTS,
    deterministic: bool = False,
) -> Result:
    """Returns attention of tensors with memory, by the executor of their kind of call.

    Raises:
        ProblemError: The call is invalid, or no backend supports it.
        KernelError: The call is new, and a CUDA graph is being captured or no kernel can be loaded.
        VerificationError: The call is new, `prefer` is "generated" and the kernels are wrong on this GPU.
    """
    if scale is not None and not (type(scale) is float and 0.0 <= scale <= MAX_FLOAT32):
        q, scale = with_positive_scale(q, scale)
    key = call_key(q, k, v, causal, layout, return_lse, prefer, scales, deterministic)
    executor = _executors.get(key)
    if executor is None:
        executor = executor_of(key, q, k, v, causal, layout, return_lse, prefer, scales, deterministic)
    return executor(q, k, v, scale) if scales is NO_EXTRA_INPUTS else executor(q, k, v, scale, scales)


def executor_of(
    key: tuple[object, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str,
    layout: str,
    return_lse: bool,
    prefer: str,
    scales: ExtraInputs = NO_EXTRA_INPUTS,
    deterministic: bool = False,
) -> Executor:
    """Returns the executor of a kind of call. It is prepared if the cache does not contain it.

    Raises:
        ProblemError: The call is invalid, or no backend supports it.
        KernelError: A CUDA graph is being captured, or `prefer` is "generated" and no kernel loads.
        VerificationError: `prefer` is "generated" and the kernels are wrong on this GPU.
    """

    def read() -> Request:
        needs_grad = requires_grad(q, k, v, scales)
        return read_request(q, k, v, causal, layout, return_lse, prefer, scales, deterministic, needs_grad)

    return prepared(key, q, k, v, scales, read)


def prepared(
    key: tuple[object, ...], q: Tensor, k: Tensor, v: Tensor, side: ExtraInputs, read: Callable[[], Request]
) -> Executor:
    """Returns the cached executor of a key, or a new one for the request that `read` returns.

    Raises:
        ProblemError: The call is invalid, or no backend supports it.
        KernelError: A CUDA graph is being captured, or `prefer` is "generated" and no kernel loads.
        VerificationError: `prefer` is "generated" and the kernels are wrong on this GPU.
    """

    def make(request: Request) -> Executor:
        executor = (prepare_pair if request.needs_grad else prepare)(request, q, k, v, side)
        executor = with_checks(executor, request)
        if not recording() or request.is_empty or request.is_double:
            return executor
        if request.needs_grad:
            # Such a call also has a backward pass.
            executor = counted(executor, request.backward, backward_specialization(request, q, k, v, side))
            request = request.forward
        return counted(executor, request.problem, required_specialization(request, q, k, v, side))

    return remembered(key, q, read, make)


def remembered(
    key: tuple[object, ...], q: Tensor, read: Callable[[], Request], make: Callable[[Request], AnyExecutor]
) -> AnyExecutor:
    """Returns the cached entry of a key, or a new one: `make` of the request that `read` returns.

    Raises:
        KernelError: A CUDA graph is being captured. Errors of `read` and `make` are passed on.
    """
    with _preparing:
        executor: AnyExecutor | None = _executors.get(key)
        if executor is None:
            request = read()
            _refuse_capture(q)
            executor = make(request)
            if len(_executors) >= MEMO_LIMIT:
                _executors.clear()
            _executors[key] = executor
        return executor


def known_executor(key: tuple[object, ...]) -> Any:
    """Returns the cached executor of a key, or None."""
    return _executors.get(key)


def forget_executors() -> None:
    """Clears the cache."""
    with _preparing:
        _executors.clear()
        forget_choices()


on_change(forget_executors)


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
