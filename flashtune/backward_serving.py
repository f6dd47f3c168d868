"""What computes the gradients of one kind of call: proven once, then bound to strides as they come."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from flashtune.backward_servers import BackwardServer, ServeBackward, interpreted_backward
from flashtune.choices import Asked, Choice, chosen, first_that_serves, remember_choice
from flashtune.decision import Decision, Server
from flashtune.pair_decision import backward_specialization
from flashtune.side import NO_SIDE, Side

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.record import Selection
    from flashtune.request import Request
    from flashtune.target import Target


def prepare_backward(
    decision: Decision, request: Request, q: Tensor, k: Tensor, v: Tensor, side: Side = NO_SIDE
) -> ServeBackward:
    """What computes the gradients of a request from now on: compiled, loaded and proven.

    Raises:
        KernelError: No kernel compiles and loads.
        VerificationError: They are wrong on this GPU.
    """
    if decision.server is Server.INTERPRETER:
        return functools.partial(interpreted_backward, decision, request)
    asked = asked_backward(request, q, k, v, side)

    def attempt(selection: Selection, target: Target) -> ServeBackward:
        choice = chosen(selection, target, asked)
        server = bound_backward(choice, request, q, k, v, side)
        remember_choice(asked, choice)
        return server

    return first_that_serves(decision, asked, attempt)


def asked_backward(request: Request, q: Tensor, k: Tensor, v: Tensor, side: Side = NO_SIDE) -> Asked:
    """What the choice of a backward kernel hangs on."""
    needed = backward_specialization(request, q, k, v, side)
    return Asked(request.backward, needed, request.prefer, request.device)


def bound_backward(
    choice: Choice, request: Request, q: Tensor, k: Tensor, v: Tensor, side: Side = NO_SIDE
) -> ServeBackward:
    """A chosen kernel, bound to a gradient that lies as the output does.

    Raises:
        KernelError: It does not load.
    """
    server = BackwardServer(choice, request)
    server.bind_usual(q, k, v, side)
    return server
