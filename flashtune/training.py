"""What serves a call that autograd goes through: both passes prepared at once, so that they always agree.

A backward pass then never meets a kernel that fails: whoever serves it was compiled, loaded and proven
when the forward pass of its kind was called first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import torch

from flashtune.backward_servers import BackwardServer, Gradients, ServeBackward
from flashtune.backward_serving import asked_backward, bound_backward, prepare_backward
from flashtune.choices import known_choice, tell_of_failure
from flashtune.decision import Server, baseline
from flashtune.errors import KernelError, VerificationError
from flashtune.features import Bias
from flashtune.gradients import Pair, differentiable, with_side
from flashtune.notices import tell_once
from flashtune.pair_decision import PairDecision, decide_pair, side_gradients
from flashtune.plain_gradients import Passes, plainly_differentiable
from flashtune.request import Prefer, Request
from flashtune.servers import Serve, baseline_server, in_words, nothing
from flashtune.serving import asked_forward, bound_forward, prepare_generated
from flashtune.side import NO_SIDE, Side
from flashtune.side_inputs import side_views

if TYPE_CHECKING:
    from torch import Tensor


def prepare_pair(request: Request, q: Tensor, k: Tensor, v: Tensor, side: Side = NO_SIDE) -> Serve:
    """What serves a request through which autograd goes back.

    Raises:
        ProblemError: Nobody can serve it.
        KernelError: Only generated kernels may serve, and none compiles or loads.
        VerificationError: Only generated kernels may serve, and they are wrong on this GPU.
    """
    if request.problem.features and not request.is_empty:
        known = _known_pair(request, q, k, v, side)
        if known is not None:
            return known
    decision = decide_pair(request, q, k, v, side)
    if not decision.generated:
        return baseline_of_pair(decision, request)
    try:
        forward = prepare_generated(decision.forward, request.forward, q, k, v, side)
        backward = prepare_backward(decision.backward, request, q, k, v, side)
    except (KernelError, VerificationError) as failure:
        if request.prefer is Prefer.GENERATED:
            raise
        instead = baseline(request)
        tell_of_failure(failure, f"{in_words(instead)} (in both passes)", request.backward)
        return baseline_server(instead, request)
    return _paired(forward, backward, request, side)


def _known_pair(request: Request, q: Tensor, k: Tensor, v: Tensor, side: Side) -> Serve | None:
    """Kernels that were chosen for such calls, bound to these lengths."""
    first = known_choice(asked_forward(request.forward, q, k, v, side))
    last = known_choice(asked_backward(request, q, k, v, side))
    if first is None or last is None:
        return None
    forward = bound_forward(first, request.forward, q, k, v, side)
    return _paired(forward, bound_backward(last, request, q, k, v, side), request, side)


def _paired(forward: Serve, backward: ServeBackward, request: Request, side: Side) -> Serve:
    if not request.problem.features and not request.return_lse:
        plainly = backward.plainly if isinstance(backward, BackwardServer) else backward
        return plainly_differentiable(Passes(forward, plainly))
    wanted = side_gradients(side)
    return differentiable(Pair(forward, with_side(backward, request.layout, wanted), request.return_lse))


def prepare_alone(request: Request, q: Tensor, k: Tensor, v: Tensor, side: Side = NO_SIDE) -> ServeBackward:
    """What computes gradients where the forward pass was an operator's, and so can no longer be a baseline.

    Raises:
        ProblemError: No family computes it.
        KernelError: Only generated kernels may serve, and none compiles or loads.
        VerificationError: Only generated kernels may serve, and they are wrong on this GPU.
    """
    known = None if request.is_empty else known_choice(asked_backward(request, q, k, v, side))
    if known is not None:
        return bound_backward(known, request, q, k, v, side)
    decision = decide_pair(msgspec.structs.replace(request, prefer=Prefer.GENERATED), q, k, v, side)
    if not decision.generated:
        return recomputed(request)
    try:
        return prepare_backward(decision.backward, request, q, k, v, side)
    except (KernelError, VerificationError) as failure:
        if request.prefer is Prefer.GENERATED:
            raise
        tell_of_failure(failure, "the unfused computation", request.backward)
        return recomputed(request)


def recomputed(request: Request) -> ServeBackward:
    """Gradients by computing the forward pass again, unfused."""
    standard = baseline_server(Server.STANDARD, request)
    written = {"bias": request.problem.bias is Bias.ADDITIVE, "slopes": request.problem.alibi}
    names = [name for name, given in written.items() if given]

    def serve(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        scale: float | None,
        side: Side = NO_SIDE,
    ) -> Gradients:
        del out, lse
        if request.is_empty:
            return Gradients(*map(torch.zeros_like, (q, k, v)))
        views = side_views(request.problem, side, request.views(q, k, v)[1].shape[0])
        with _autograd_inside_operator():
            inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
            beside = {name: getattr(views, name).detach().clone().requires_grad_() for name in names}
            result = standard(*inputs, scale, side._replace(**beside))
            found = torch.autograd.grad(
                result, (*inputs, *beside.values()), dout if dlse is None else (dout, dlse)
            )
        # In the strides that a compiler was promised.
        gradients = Gradients(*map(_laid_out_like, (q, k, v), found))
        return gradients._replace(**{f"d{name}": one for name, one in zip(names, found[3:], strict=True)})

    return serve


def _laid_out_like(tensor: Tensor, values: Tensor) -> Tensor:
    return torch.empty_like(tensor).copy_(values)


@contextlib.contextmanager
def _autograd_inside_operator() -> Iterator[None]:
    """Autograd records although the dispatcher is behind it, inside of an operator."""
    included = torch._C._dispatch_tls_local_include_set()
    # The key of any device stands for autograd on all of them.
    recording = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.AutogradCPU)
    with torch._C._ForceDispatchKeyGuard(included, recording), torch.enable_grad():
        yield


def baseline_of_pair(decision: PairDecision, request: Request) -> Serve:
    """The baseline that serves both passes; a warning says so where no family computes them."""
    server: Server = decision.backward.server
    if server is Server.NOBODY:
        return functools.partial(nothing, request)
    if decision.backward.selection is None and not request.is_double:
        tell_once("gradients", f"{decision.backward.reason}, so {in_words(server)} serves both passes")
    return baseline_server(server, request)
