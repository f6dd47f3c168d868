"""Preparation of executors. An executor is prepared once and then computes all calls of its kind."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec
import torch

from flashtune.core.notices import warn_once
from flashtune.dispatch.decision import Backend, baseline, choose
from flashtune.dispatch.masked_sdpa import refusal, sdpa_allowed
from flashtune.dispatch.sdpa import default_backend
from flashtune.launch.binding import bind
from flashtune.request.request import Executor, Request
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
from flashtune.runtime.kernel_fallback import LoadedKernel, Pass, prepared, prepared_or

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashtune.core.target import Target
    from flashtune.dispatch.bound_request import BoundRequest


def prepare(bound: BoundRequest) -> Executor:
    """Returns the executor of a request without gradients. Its kernel is compiled, loaded and verified.

    Raises:
        ProblemError: No backend supports the call.
        KernelError: `prefer` is "generated" and no kernel compiles or loads.
        VerificationError: `prefer` is "generated" and the kernels are wrong on this GPU.
    """
    request, one = bound.request, forward_pass(bound)
    if request.problem.features and not (request.is_empty or sdpa_allowed(request)):
        executor = one.known()
        if executor is not None:
            return executor
    # Whether SDPA supports a mask also depends on strides, which are not part of the key of a kernel.
    (decision,) = choose(bound)
    if decision.backend is Backend.SDPA and request.problem.features:
        masked = masked_sdpa_executor(bound)
        if masked is not None:
            return masked
        (decision,) = choose(bound)
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


def masked_sdpa_executor(bound: BoundRequest) -> Executor | None:
    """Returns an executor by SDPA with a mask, or warns and returns None if a trial of SDPA fails."""
    request, views, bias = bound.request, bound.views, bound.side.bias
    assert bias is not None
    with types_as_given(views[0]):
        # Not the backend that was chosen before, because gradients may be disabled here.
        backend = default_backend(*views, request.problem, bias)
        unsupported_reason = refusal(request, backend, *views, bias)
    if unsupported_reason is None:
        return masked_executor(request, backend)
    warn_once(
        "masked SDPA", f"torch's SDPA {unsupported_reason}, so another kernel serves {request.problem.key}"
    )
    return None


def forward_pass(bound: BoundRequest) -> Pass[Executor]:
    """Returns the forward pass of a request. Its kernels are bound to the strides of the tensors."""
    request = bound.request.forward if bound.request.needs_grad else bound.request

    def bound_kernel(choice: LoadedKernel) -> Executor:
        q, packed = bound.tensors[0], bound.side.cu_seqlens_q
        kernel, target, binary = choice
        launch = bind(kernel, target, bound.forward_tensors(q.device), bound.extra, compiled=binary)
        clear = None if packed is None else clearer_of(request, packed.numel() - 1, target)
        return with_copies(launcher(launch, request, q, clear), bound.copied)

    return Pass(
        lambda: bound.passes[0],
        bound_kernel,
        lambda decision: functools.partial(interpreted, decision, request),
    )


def clearer_of(request: Request, sequences: int, target: Target) -> Callable[..., None]:
    """Returns the function that clears rows after the last packed sequence. Its kernel is then loaded."""
    if request.device.type == "cpu":
        return clear_tail_on_cpu
    from flashtune.launch.packed_tail import tail_clearer

    out = torch.empty(request.out_shape, dtype=request.out_dtype, device="meta")
    return tail_clearer(out, request.return_lse, sequences, target, request.device)
