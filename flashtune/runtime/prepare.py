"""Preparation of executors. An executor is prepared once and then computes all calls of its kind.

Both passes of a differentiable call are prepared together, so that they agree on dropout and layouts. The
backward kernel is compiled, loaded and checked when the forward pass is first called. A backward pass
therefore never uses a kernel that fails.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec

from flashtune.core.notices import warn_once
from flashtune.dispatch.bound_request import BoundRequest
from flashtune.dispatch.decision import Backend, Decision, baseline, choose
from flashtune.dispatch.masked_sdpa import refusal, sdpa_allowed
from flashtune.dispatch.sdpa import default_backend
from flashtune.request.request import Executor, Prefer, Request
from flashtune.runtime.executors import (
    baseline_executor,
    copies_of,
    in_words,
    masked_executor,
    nothing,
    types_as_given,
    with_copies,
)
from flashtune.runtime.kernel_fallback import Pass, prepared, prepared_or
from flashtune.runtime.passes import backward_pass, joined, passes_of
from flashtune.runtime.recomputation import recomputed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashtune.runtime.gradients import BackwardExecutor


def prepare(bound: BoundRequest) -> Executor:
    """Returns the executor of a request. Its kernels are compiled, loaded and verified."""
    request = bound.request
    if request.needs_grad and any(bound.copied):
        # Autograd saves the copies. Most programs do not save the tensors that q, k and v are slices of.
        copies = BoundRequest(request, *copies_of(bound.tensors, bound.copied), bound.side)
        return with_copies(prepare(copies), bound.copied)
    passes, features = passes_of(bound), request.problem.features
    # The problem of float64 tensors has fp32, and so has the key of a kernel, which cannot read them.
    if features and not (request.is_empty or request.is_double or sdpa_allowed(request)):
        executor = _known(passes, bound)
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
    executor = _known(passes, bound)
    if executor is not None:
        return executor
    instead = baseline(request)
    return prepared_or(
        lambda: joined([prepared(*pair) for pair in zip(decisions, passes, strict=True)], bound),
        request,
        bound.passes[-1].problem,
        f"{in_words(instead)}{' (in both passes)' if request.needs_grad else ''}",
        lambda: baseline_executor(instead, request),
    )


def _known(passes: Sequence[Pass[Any]], bound: BoundRequest) -> Executor | None:
    """Returns the executor of cached kernels, or None if one pass has none."""
    executors = [one.known() for one in passes]
    return None if None in executors else joined(executors, bound)


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


def masked_sdpa_executor(bound: BoundRequest) -> Executor | None:
    """Returns an executor by SDPA with a mask, or warns and returns None if a trial of SDPA fails."""
    request, views, bias = bound.request, bound.views, bound.side.bias
    assert bias is not None
    with types_as_given(views[0]):
        # Not the backend that was chosen before, because autocast may have been enabled there.
        backend = default_backend(*views, request.problem, bias)
        unsupported_reason = refusal(request, backend, *views, bias)
    if unsupported_reason is None:
        return masked_executor(request, backend)
    warn_once(
        "masked SDPA", f"torch's SDPA {unsupported_reason}, so another kernel serves {request.problem.key}"
    )
    return None


def prepare_alone(bound: BoundRequest) -> BackwardExecutor:
    """Returns the executor of a backward operator. Its forward pass has run, so a baseline cannot serve."""
    request, one = bound.request, backward_pass(bound)
    known = None if request.is_empty or request.is_double else one.known()
    if known is not None:
        return known
    generated = msgspec.structs.replace(request, prefer=Prefer.GENERATED)
    _, decision = choose(BoundRequest(generated, *bound.tensors, bound.side))
    if not decision.generated:
        return recomputed(request)
    return prepared_or(
        lambda: prepared(decision, one),
        request,
        request.backward,
        "the unfused computation",
        lambda: recomputed(request),
    )
