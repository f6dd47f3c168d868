"""Prepares both passes of a differentiable call together, so that they agree on dropout and layouts.

The backward kernel is compiled, loaded and checked when the forward pass is first called. A backward pass
therefore never uses a kernel that fails.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor

from flashtune.core.features.table import score_tensors
from flashtune.core.layouts import Layout
from flashtune.core.notices import warn_once
from flashtune.dispatch.bound_request import BoundRequest
from flashtune.dispatch.decision import Backend, Decision, baseline, choose
from flashtune.request.request import Executor, Prefer, Request, Result
from flashtune.request.side_inputs import side_views
from flashtune.runtime.autograd import Pair, ServeAll, differentiable, with_side
from flashtune.runtime.backward_executors import BoundBackward, interpreted_backward
from flashtune.runtime.executors import baseline_executor, copies_of, in_words, nothing, with_copies
from flashtune.runtime.gradients import BackwardExecutor, BackwardInputs, Gradients
from flashtune.runtime.kernel_fallback import LoadedKernel, Pass, prepared, prepared_or
from flashtune.runtime.prepare import forward_pass, masked_sdpa_executor


def prepare_pair(bound: BoundRequest) -> Executor:
    """Returns the executor of a request with gradients.

    Raises:
        ProblemError: No backend supports the call.
        KernelError: `prefer` is "generated" and no kernel compiles or loads.
        VerificationError: `prefer` is "generated" and the kernels are wrong on this GPU.
    """
    request, flags = bound.request, bound.copied
    if any(flags):
        # Autograd saves the copies. Most programs do not save the tensors that q, k and v are slices of.
        copies = BoundRequest(request, *copies_of(bound.tensors, flags), bound.side)
        return with_copies(prepare_pair(copies), flags)
    forward, backward = forward_pass(bound), backward_pass(bound)
    if request.problem.features and not request.is_empty:
        first, last = forward.known(), backward.known()
        if first is not None and last is not None:
            return paired(first, last, bound)
    decisions = choose(bound)
    if decisions[1].backend is Backend.SDPA and request.problem.features:
        executor = masked_sdpa_executor(bound)
        if executor is not None:
            return executor
        decisions = tuple(msgspec.structs.replace(one, backend=Backend.GENERATED) for one in decisions)
    if not decisions[1].generated:
        return baseline_of_pair(decisions[1], request)

    def make() -> Executor:
        return paired(prepared(decisions[0], forward), prepared(decisions[1], backward), bound)

    instead = baseline(request)
    name = f"{in_words(instead)} (in both passes)"
    return prepared_or(make, request, request.backward, name, lambda: baseline_executor(instead, request))


def paired(forward: Executor, backward: BackwardExecutor, bound: BoundRequest) -> Executor:
    """Returns the differentiable executor of two passes."""
    request = bound.request
    served: ServeAll = with_side(backward, request.layout, bound.gradients)
    if isinstance(backward, BoundBackward) and not request.problem.features and not request.return_lse:
        served = backward.plainly
    return differentiable(Pair(forward, served, request.return_lse))


def prepare_alone(bound: BoundRequest) -> BackwardExecutor:
    """Returns the executor of a backward operator. Its forward pass has run, so a baseline cannot serve.

    Raises:
        ProblemError: No family computes it.
        KernelError: `prefer` is "generated" and no kernel compiles or loads.
        VerificationError: `prefer` is "generated" and the kernels are wrong on this GPU.
    """
    request, one = bound.request, backward_pass(bound)
    known = None if request.is_empty else one.known()
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


def recomputed(request: Request) -> BackwardExecutor:
    """Returns an executor that computes the forward pass again, unfused, and differentiates it.

    As with kernels, the given output and log-sum-exp may be those over more keys than the call's.
    """
    standard = baseline_executor(Backend.UNFUSED, request.forward)
    names = score_tensors(request.problem)

    def run(inputs: BackwardInputs) -> Gradients:
        q, k, v, scale, side = *inputs[:3], inputs.scale, inputs.side
        if request.is_empty:
            return Gradients(*map(torch.zeros_like, (q, k, v)))
        views = side_views(request.problem, side, request.views(q, k, v)[1].shape[0])
        with _autograd_inside_operator():
            leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
            given = {name: getattr(views, name).detach() for name in names}
            # A boolean mask has no gradient.
            floats = {name: tensor for name, tensor in given.items() if tensor.is_floating_point()}
            extra = {name: tensor.clone().requires_grad_() for name, tensor in floats.items()}
            result = standard(*leaves, scale, side._replace(**extra))
            wanted = _of_given_softmax(request, result, inputs)
            found = torch.autograd.grad(result, (*leaves, *extra.values()), wanted)
        # Return the strides that the fake implementation declares to compilers.
        gradients = Gradients(*map(_with_layout_of, (q, k, v), found))
        return gradients._replace(**{f"d{name}": one for name, one in zip(extra, found[3:], strict=True)})

    return run


def _of_given_softmax(request: Request, result: Result, inputs: BackwardInputs) -> tuple[Tensor, Tensor]:
    """Returns the gradients of a call's own output and log-sum-exp, from those of a softmax over more keys.

    The weights of that softmax are a share of the own ones in each row.
    """
    out, lse, dout, dlse = inputs.out, inputs.lse, inputs.dout, inputs.dlse
    own_out, own_lse = (tensor.detach() for tensor in result)
    share = torch.exp(own_lse - lse).masked_fill(own_lse == -torch.inf, 0.0)
    by_row = share if request.layout in (Layout.BHSD, Layout.BHD) else share.transpose(-1, -2)
    own_dout = (dout * by_row.unsqueeze(-1)).to(dout.dtype)
    sums = (dout.to(lse.dtype) * (own_out - out).to(lse.dtype)).sum(-1)
    sums = sums if request.layout in (Layout.BHSD, Layout.BHD) else sums.transpose(-1, -2)
    return own_dout, share * (sums if dlse is None else sums + dlse)


def _with_layout_of(tensor: Tensor, values: Tensor) -> Tensor:
    return torch.empty_like(tensor).copy_(values)


@contextlib.contextmanager
def _autograd_inside_operator() -> Iterator[None]:
    """Enables autograd within an operator, where the dispatcher has excluded it."""
    included = torch._C._dispatch_tls_local_include_set()
    # Removing the key of one device enables autograd on all devices.
    recording = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.AutogradCPU)
    with torch._C._ForceDispatchKeyGuard(included, recording), torch.enable_grad():
        yield


def baseline_of_pair(decision: Decision, request: Request) -> Executor:
    """Returns the baseline's executor for both passes, and warns if no family computes them."""
    if decision.backend is Backend.NONE:
        return functools.partial(nothing, request)
    if decision.selection is None and not request.is_double:
        warn_once("gradients", f"{decision.reason}, so {in_words(decision.backend)} serves both passes")
    return baseline_executor(decision.backend, request)


def backward_pass(bound: BoundRequest) -> Pass[BackwardExecutor]:
    """Returns the backward pass of a request, whose kernels take a gradient with the output's strides."""
    request = bound.request

    def bound_kernel(choice: LoadedKernel) -> BackwardExecutor:
        executor = BoundBackward(choice, request)
        executor.bind_usual(bound)
        return executor

    return Pass(
        lambda: bound.passes[1],
        bound_kernel,
        lambda decision: functools.partial(interpreted_backward, decision, request),
    )
