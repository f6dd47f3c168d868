"""Preparation of executors. An executor is prepared once and then computes all calls of its kind."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec
import torch

from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.notices import warn_once
from flashtune.dispatch.decision import (
    Backend,
    as_read,
    baseline,
    copied,
    decide,
    output_like,
    required_specialization,
)
from flashtune.dispatch.masked_sdpa import refusal, sdpa_allowed
from flashtune.dispatch.sdpa import default_backend
from flashtune.launch.binding import bind
from flashtune.launch.tensors import ForwardTensors
from flashtune.request.request import Executor, Request
from flashtune.request.side_inputs import side_views
from flashtune.runtime.executors import (
    baseline_executor,
    clear_tail_on_cpu,
    in_words,
    interpreted,
    launcher,
    masked_executor,
    nothing,
    types_as_given,
    with_copies,
)
from flashtune.runtime.kernel_fallback import KernelKey, LoadedKernel, Pass, prepared, prepared_or

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from flashtune.core.target import Target


def prepare(
    request: Request, q: Tensor, k: Tensor, v: Tensor, side: ExtraInputs = NO_EXTRA_INPUTS
) -> Executor:
    """Returns the executor of a request without gradients. Its kernel is compiled, loaded and verified.

    Raises:
        ProblemError: No backend supports the call.
        KernelError: `prefer` is "generated" and no kernel compiles or loads.
        VerificationError: `prefer` is "generated" and the kernels are wrong on this GPU.
    """
    one = forward_pass(request, q, k, v, side)
    if request.problem.features and not (request.is_empty or sdpa_allowed(request)):
        executor = one.known()
        if executor is not None:
            return executor
    # Whether SDPA supports a mask also depends on strides, which are not part of the key of a kernel.
    decision = decide(request, q, k, v, side)
    if decision.backend is Backend.SDPA and request.problem.features:
        masked = masked_sdpa_executor(request, q, k, v, side)
        if masked is not None:
            return masked
        decision = decide(request, q, k, v, side)
        if decision.backend is Backend.SDPA:
            # A trial of SDPA that ran out of memory is not cached.
            decision = msgspec.structs.replace(decision, backend=Backend.GENERATED)
    if decision.generated:
        executor = one.known()
        if executor is not None:
            return executor
        instead = baseline(request)
        return prepared_or(
            lambda: prepared(decision, one),
            request,
            request.problem,
            in_words(instead),
            lambda: baseline_executor(instead, request),
        )
    if decision.backend is Backend.NONE:
        return functools.partial(nothing, request)
    return baseline_executor(decision.backend, request)


def masked_sdpa_executor(
    request: Request, q: Tensor, k: Tensor, v: Tensor, side: ExtraInputs
) -> Executor | None:
    """Returns an executor by SDPA with a mask, or warns and returns None if a trial of SDPA fails."""
    assert side.bias is not None
    views = request.views(q, k, v)
    with types_as_given(q):
        backend = default_backend(*views, request.problem, side.bias)
        unsupported_reason = refusal(request, backend, *views, side.bias)
    if unsupported_reason is None:
        return masked_executor(request, backend)
    warn_once(
        "masked SDPA", f"torch's SDPA {unsupported_reason}, so another kernel serves {request.problem.key}"
    )
    return None


def forward_pass(
    request: Request, q: Tensor, k: Tensor, v: Tensor, side: ExtraInputs = NO_EXTRA_INPUTS
) -> Pass[Executor]:
    """Returns the forward pass of a request without gradients. Its kernels are bound to these strides."""

    def key() -> KernelKey:
        needed = required_specialization(request, q, k, v, side)
        return KernelKey(request.problem, needed, request.prefer, request.device)

    def bound(choice: LoadedKernel) -> Executor:
        read = as_read(request, q, k, v, q.device)
        tensors = ForwardTensors(*request.views(*read), output_like(request))
        extra = side_views(request.problem, side, tensors.k.shape[0]) if request.problem.features else side
        kernel, target, binary = choice
        launch = bind(kernel, target, tensors, extra, compiled=binary)
        packed = side.cu_seqlens_q
        clear = None if packed is None else clearer_of(request, packed.numel() - 1, target)
        run = launcher(launch, request, q, clear)
        return with_copies(run, copied(request, q, k, v))

    return Pass(key, bound, lambda decision: functools.partial(interpreted, decision, request))


def clearer_of(request: Request, sequences: int, target: Target) -> Callable[..., None]:
    """Returns the function that clears rows after the last packed sequence. Its kernel is then loaded."""
    if request.device.type == "cpu":
        return clear_tail_on_cpu
    from flashtune.launch.packed_tail import tail_clearer

    out = torch.empty(request.out_shape, dtype=request.out_dtype, device="meta")
    return tail_clearer(out, request.return_lse, sequences, target, request.device)
