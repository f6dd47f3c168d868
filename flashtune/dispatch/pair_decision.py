"""Who serves both passes of a call that autograd goes through: one choice, so that they always agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from flashtune.core.errors import ProblemError
from flashtune.core.extra_inputs import NO_SIDE, TENSORS, Side
from flashtune.core.kernel import Specialization, specialization_of
from flashtune.core.target import device_target, find_target
from flashtune.dispatch.decision import (
    DOUBLE,
    INTERPRETED_TARGET,
    Decision,
    Server,
    baseline,
    check_device,
    needed_specialization,
    where_found,
    why_a_peer_serves,
)
from flashtune.dispatch.faster_peers import STANDARD, faster_peer_of_pair
from flashtune.dispatch.lookup import default_selection, select
from flashtune.dispatch.sdpa import usual_backend
from flashtune.dispatch.tables import tuned_records
from flashtune.launch.backward import BackwardTensors
from flashtune.launch.compilation import interpreting
from flashtune.request.request import Prefer, Request
from flashtune.request.side_inputs import CALLED, side_views

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.core.record import Selection

# Whose gradients are worked out from what the kernels leave, beside those of q, k and v.
DIFFERENTIABLE_SIDE = ("slopes", "bias", "sinks")


class PairDecision(NamedTuple):
    """Who serves each pass and why; a baseline serves both or none."""

    forward: Decision
    backward: Decision

    @property
    def generated(self) -> bool:
        """Whether generated kernels serve, on a GPU or under the interpreter."""
        return self.backward.server in (Server.GENERATED, Server.INTERPRETER)


class Assumptions(NamedTuple):
    """What is known of a call's tensors beside their shapes.

    Attributes:
        forward: What a forward kernel may assume.
        backward: What a backward kernel may assume.
        gradients: Names of the side inputs that require grad.
        usual: Tells the backend that SDPA picks by itself, None where that is not known or has no name.
    """

    forward: Specialization
    backward: Specialization
    gradients: tuple[str, ...] = ()
    usual: Callable[[], str | None] = lambda: None


def decide_pair(request: Request, q: Tensor, k: Tensor, v: Tensor, side: Side = NO_SIDE) -> PairDecision:
    """Who serves both passes of a request for these tensors.

    Raises:
        ProblemError: Nobody can, or only generated kernels may serve and no family computes it.
    """
    ungenerated = _ungenerated(request)
    if ungenerated is not None:
        return ungenerated
    forward = request.forward
    assumed = Assumptions(
        needed_specialization(forward, q, k, v, side),
        backward_specialization(request, q, k, v, side),
        side_gradients(side),
        lambda: usual_backend(*request.views(q, k, v), request.problem),
    )
    return decide_assumed(request, assumed)


def decide_assumed(request: Request, assumed: Assumptions) -> PairDecision:
    """Who serves both passes of a request of which so much is known: no tensor is looked at.

    Raises:
        ProblemError: As `decide_pair`.
    """
    ungenerated = _ungenerated(request)
    if ungenerated is not None:
        return ungenerated
    try:
        return _generated(request, assumed)
    except ProblemError as error:
        if request.prefer is Prefer.GENERATED:
            raise
        return _both(Decision(baseline(request), str(error)))


def check_differentiable(request: Request) -> None:
    """Refuses calls through which there is no way back.

    Raises:
        ProblemError: 8-bit inputs or pages, or the tensors are on a device where nobody serves.
    """
    check_device(request)
    problem = request.problem
    if problem.dtype.is_quantized:
        raise ProblemError(
            f"attention of {problem.dtype} inputs has no backward pass and an input or a scale "
            "requires grad: call under torch.no_grad(), or pass 16-bit inputs"
        )
    if problem.page_size:
        raise ProblemError(
            "attention of sequences in pages has no backward pass and an input requires grad: call under "
            "torch.no_grad(), or pass dense tensors to flashtune.attention"
        )


def side_gradients(side: Side) -> tuple[str, ...]:
    """Names of the side inputs whose gradients are asked for."""
    if side is NO_SIDE:
        return ()
    named = zip(TENSORS, side.optional_tensors, strict=True)
    return tuple(name for name, tensor in named if tensor is not None and tensor.requires_grad)


def backward_specialization(
    request: Request, q: Tensor, k: Tensor, v: Tensor, side: Side = NO_SIDE
) -> Specialization:
    """What a backward kernel may assume where the gradient of the output lies as the output does."""
    out = torch.empty(request.out_shape, dtype=request.out_dtype, device="meta")
    return specialization_of_pass(request, backward_tensors(request, q, k, v, out, out, out), side)


def specialization_of_pass(
    request: Request, tensors: BackwardTensors, side: Side = NO_SIDE
) -> Specialization:
    """What a backward kernel may assume of tensors as it sees them."""
    bias = None
    if side.bias is not None:
        bias = side_views(request.problem, side, tensors.k.shape[0]).bias
    return specialization_of(tensors.planned, request.return_lse, bias)


def backward_tensors(
    request: Request, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
) -> BackwardTensors:
    """Tensors of a call as kernels see them, with gradients that have no memory but the right strides."""
    gradients = [torch.empty_like(tensor, device="meta") for tensor in (q, k, v)]
    views, heads_first = request.views, request.layout.heads_first
    return BackwardTensors(*views(q, k, v), heads_first(out), lse, heads_first(dout), *views(*gradients))


def _generated(request: Request, assumed: Assumptions) -> PairDecision:
    """As `decide_assumed`, where some family computes the backward pass."""
    blocked = [CALLED.get(name, name) for name in assumed.gradients if name not in DIFFERENTIABLE_SIDE]
    if blocked:
        raise ProblemError(
            f"no kernel family computes the gradient of {' and '.join(blocked)}, which requires grad: "
            "detach it, or pass prefer='fastest' to let the unfused computation serve"
        )
    if interpreting():
        target = find_target(INTERPRETED_TARGET)
        reason = "TRITON_INTERPRET=1 runs kernels on the CPU"
        forward = default_selection(request.problem, target, assumed.forward)
        backward = default_selection(request.backward, target, assumed.backward)
        return PairDecision(
            Decision(Server.INTERPRETER, reason, target, forward),
            Decision(Server.INTERPRETER, reason, target, backward),
        )
    target = device_target(
        torch.cuda.current_device() if request.device.index is None else request.device.index
    )
    tables = tuned_records(target.name)
    forward = select(request.problem, target, tables, assumed.forward, generated=True)
    backward = select(request.backward, target, tables, assumed.backward, generated=True)
    peer = _faster_peer(request, forward, backward, assumed.usual)
    if peer is not None:
        server = Server.STANDARD if peer == STANDARD else Server.SDPA
        reason = why_a_peer_serves(peer, forward, backward)
        return PairDecision(
            Decision(server, reason, target, forward), Decision(server, reason, target, backward)
        )
    return PairDecision(
        Decision(Server.GENERATED, where_found(forward), target, forward),
        Decision(Server.GENERATED, where_found(backward), target, backward),
    )


def _faster_peer(
    request: Request, forward: Selection, backward: Selection, usual: Callable[[], str | None]
) -> str | None:
    """The baseline that was measured as faster over both passes and may serve in their place, or None."""
    problem = request.problem
    ragged = problem.packed or problem.lengths
    if request.prefer is Prefer.GENERATED or request.return_lse or request.deterministic or ragged:
        return None
    # With a mask the gradients of some of SDPA's backends may be NaN.
    return faster_peer_of_pair(forward, backward, problem, None if problem.features else usual())


def _ungenerated(request: Request) -> PairDecision | None:
    """Who serves what no kernel is asked for."""
    check_differentiable(request)
    if request.is_empty:
        return _both(Decision(Server.NOBODY, "there is nothing to attend to"))
    return _both(Decision(baseline(request), DOUBLE)) if request.is_double else None


def _both(decision: Decision) -> PairDecision:
    return PairDecision(decision, decision)
