"""Preparation of executors. An executor is prepared once and then computes all calls of its kind.

Both passes of a differentiable call are prepared together, so that they agree on dropout and layouts. The
backward kernel is compiled, loaded and checked when the forward pass is first called. A backward pass
therefore never uses a kernel that fails.
"""

import functools

import msgspec

from flashtune.core.errors import KernelError, VerificationError
from flashtune.core.notices import warn_once
from flashtune.dispatch.bound_request import BoundRequest
from flashtune.dispatch.decision import Backend, Decision, baseline, choose
from flashtune.dispatch.masked_sdpa import sdpa_allowed
from flashtune.request.gradients import BackwardExecutor
from flashtune.request.request import Executor, Prefer, Request
from flashtune.runtime.backward_executors import recomputed
from flashtune.runtime.executors import (
    baseline_executor,
    copies_of,
    in_words,
    masked_executor,
    nothing,
    types_as_given,
    with_copies,
)
from flashtune.runtime.kernel_loader import KernelLoader
from flashtune.runtime.passes import backward_pass, joined, passes_of, prepared, start, warn_of_failure


def prepare(bound: BoundRequest, loader: KernelLoader) -> Executor:
    """Returns the executor of a request. Its kernels are compiled, loaded and verified."""
    request = bound.request
    if request.needs_grad and any(bound.copied):
        # Autograd saves the copies. Most programs do not save the tensors that q, k and v are slices of.
        copies = bound.replaced(request, copies_of(bound.tensors, bound.copied))
        return with_copies(prepare(copies, loader), bound.copied)
    features = request.problem.features
    # The problem of float64 tensors has fp32, and so has the key of a kernel, which cannot read them.
    if features and not (request.is_empty or request.is_double or sdpa_allowed(request)):
        executor = _known(bound, loader)
        if executor is not None:
            return executor
    # Whether SDPA supports a mask also depends on strides, which are not part of the key of a kernel.
    decisions = choose(bound)
    if decisions[0].backend is Backend.SDPA and features:
        executor = masked_sdpa_executor(bound)
        if executor is not None:
            return executor
        decisions = tuple(map(_without_sdpa, choose(bound)))
    if not decisions[0].generated:
        return baseline_of(decisions[0], request)
    # Cached kernels serve here too, where SDPA was allowed and is slower.
    executor = _known(bound, loader) if features else None
    if executor is not None:
        return executor
    try:
        passes = [*zip(decisions, passes_of(bound, loader), strict=True)]
        if len(passes) > 1:
            # Compile the kernels of both passes at the same time.
            for pair in passes:
                start(*pair)
        return joined([prepared(*pair) for pair in passes], bound)
    except (KernelError, VerificationError) as failure:
        if request.prefer is Prefer.GENERATED:
            raise
        instead = baseline(request)
        words = f"{in_words(instead)}{' (in both passes)' if request.needs_grad else ''}"
        warn_of_failure(failure, words, bound.passes[-1].problem)
        return baseline_executor(instead, request)


def _known(bound: BoundRequest, loader: KernelLoader) -> Executor | None:
    """Returns the executor of cached kernels, or None if one pass has none."""
    executors = [pass_.known() for pass_ in passes_of(bound, loader)]
    return None if None in executors else joined(executors, bound)


def masked_sdpa_executor(bound: BoundRequest) -> Executor | None:
    """Returns an executor by SDPA with a mask, or warns and returns None if a trial of SDPA fails."""
    request, views, bias = bound.request, bound.views, bound.side.bias
    assert bias is not None
    with types_as_given(views[0]):
        # Not the backend that was chosen before, because autocast may have been enabled there.
        backend = bound.sdpa_backend
        unsupported_reason = bound.platform.mask_trials.refusal(request, backend, *views, bias)
    if unsupported_reason is None:
        return masked_executor(request, backend, bound.platform.sdpa_backend)
    warn_once(
        "masked SDPA", f"torch's SDPA {unsupported_reason}, so another kernel serves {request.problem.key}"
    )
    return None


def _without_sdpa(decision: Decision) -> Decision:
    """Returns a decision for kernels in place of SDPA, whose trial may have run out of memory."""
    is_sdpa = decision.backend is Backend.SDPA
    return msgspec.structs.replace(decision, backend=Backend.GENERATED) if is_sdpa else decision


def baseline_of(decision: Decision, request: Request) -> Executor:
    """Returns the executor of a decision for a baseline. Warns if no family computes the gradients."""
    if decision.backend is Backend.NONE:
        return functools.partial(nothing, request)
    if request.needs_grad and decision.selection is None and not request.is_double:
        warn_once("gradients", f"{decision.reason}, so {in_words(decision.backend)} serves both passes")
    return baseline_executor(decision.backend, request)


def prepare_alone(bound: BoundRequest, loader: KernelLoader) -> BackwardExecutor:
    """Returns the executor of a backward operator. Its forward pass has run, so a baseline cannot serve."""
    request = bound.request
    if request.is_empty or request.is_double:
        return recomputed(request)
    pass_ = backward_pass(bound, loader)
    executor = pass_.known()
    if executor is not None:
        return executor
    generated = msgspec.structs.replace(request, prefer=Prefer.GENERATED)
    _, decision = choose(bound.replaced(generated))
    if not decision.generated:
        return recomputed(request)
    try:
        return prepared(decision, pass_)
    except (KernelError, VerificationError) as failure:
        if request.prefer is Prefer.GENERATED:
            raise
        warn_of_failure(failure, "the unfused computation", request.backward)
        return recomputed(request)
