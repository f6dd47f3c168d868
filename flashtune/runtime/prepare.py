"""Preparation of executors. An executor is prepared once and then computes all calls of its kind."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec

from flashtune.core.errors import KernelError, VerificationError
from flashtune.core.extra_inputs import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.notices import warn_once
from flashtune.dispatch.decision import Backend, baseline, decide, output_like, required_specialization
from flashtune.dispatch.masked_sdpa import refusal, sdpa_allowed
from flashtune.dispatch.sdpa import default_backend
from flashtune.launch.binding import bind
from flashtune.launch.tensors import ForwardTensors
from flashtune.request.request import Executor, Prefer, Request
from flashtune.request.side_inputs import side_views
from flashtune.runtime.executors import (
    baseline_executor,
    in_words,
    interpreted,
    launcher,
    masked_executor,
    nothing,
    types_as_given,
)
from flashtune.runtime.kernel_fallback import (
    KernelKey,
    LoadedKernel,
    chosen,
    first_usable,
    known_choice,
    remember_choice,
    warn_of_failure,
)

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.core.record import Selection
    from flashtune.core.target import Target
    from flashtune.dispatch.decision import Decision


def prepare(
    request: Request, q: Tensor, k: Tensor, v: Tensor, side: ExtraInputs = NO_EXTRA_INPUTS
) -> Executor:
    """Returns the executor of a request without gradients. Its kernel is compiled, loaded and verified.

    Raises:
        ProblemError: No backend supports the call.
        KernelError: `prefer` is "generated" and no kernel compiles or loads.
        VerificationError: `prefer` is "generated" and the kernels are wrong on this GPU.
    """
    choice = None
    if request.problem.features and not request.is_empty:
        choice = known_choice(forward_kernel_key(request, q, k, v, side))
    if choice is not None and not sdpa_allowed(request):
        return bound_forward(choice, request, q, k, v, side)
    # Whether SDPA supports a mask also depends on strides, which are not part of the key of a kernel.
    decision = decide(request, q, k, v, side)
    if decision.backend is Backend.SDPA and request.problem.features:
        executor = _masked(request, q, k, v, side)
        if executor is not None:
            return executor
        decision = decide(request, q, k, v, side)
        if decision.backend is Backend.SDPA:
            # A trial of SDPA that ran out of memory is not cached.
            decision = msgspec.structs.replace(decision, backend=Backend.GENERATED)
    if choice is not None and decision.backend is Backend.GENERATED:
        return bound_forward(choice, request, q, k, v, side)
    if decision.backend in (Backend.GENERATED, Backend.INTERPRETER):
        return _generated_or_baseline(decision, request, q, k, v, side)
    if decision.backend is Backend.NONE:
        return functools.partial(nothing, request)
    return baseline_executor(decision.backend, request)


def _masked(request: Request, q: Tensor, k: Tensor, v: Tensor, side: ExtraInputs) -> Executor | None:
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


def prepare_generated(
    decision: Decision, request: Request, q: Tensor, k: Tensor, v: Tensor, side: ExtraInputs = NO_EXTRA_INPUTS
) -> Executor:
    """Returns an executor of a decision's generated kernel or of its fallback.

    Raises:
        KernelError: No kernel compiles or loads.
        VerificationError: The kernels are wrong on this GPU.
    """
    if decision.backend is Backend.INTERPRETER:
        return functools.partial(interpreted, decision, request)
    key = forward_kernel_key(request, q, k, v, side)

    def attempt(selection: Selection, target: Target) -> Executor:
        choice = chosen(selection, target, key)
        executor = bound_forward(choice, request, q, k, v, side)
        remember_choice(key, choice)
        return executor

    return first_usable(decision, key, attempt)


def forward_kernel_key(
    request: Request, q: Tensor, k: Tensor, v: Tensor, side: ExtraInputs = NO_EXTRA_INPUTS
) -> KernelKey:
    """Returns the cache key of a request's forward kernel."""
    needed = required_specialization(request, q, k, v, side)
    return KernelKey(request.problem, needed, request.prefer, request.device)


def _generated_or_baseline(
    decision: Decision, request: Request, q: Tensor, k: Tensor, v: Tensor, side: ExtraInputs = NO_EXTRA_INPUTS
) -> Executor:
    try:
        return prepare_generated(decision, request, q, k, v, side)
    except (KernelError, VerificationError) as failure:
        if request.prefer is Prefer.GENERATED:
            raise
        instead = baseline(request)
        warn_of_failure(failure, in_words(instead), request.problem)
        return baseline_executor(instead, request)


def bound_forward(
    choice: LoadedKernel,
    request: Request,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side: ExtraInputs = NO_EXTRA_INPUTS,
) -> Executor:
    """Returns an executor of a kernel that is bound to the strides of these tensors.

    Raises:
        KernelError: The kernel does not load.
    """
    tensors = ForwardTensors(*request.views(q, k, v), output_like(request))
    extra = side_views(request.problem, side, tensors.k.shape[0]) if request.problem.features else side
    kernel, target, binary = choice
    return launcher(bind(kernel, target, tensors, extra, compiled=binary), request, q)
