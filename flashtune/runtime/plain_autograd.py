"""How autograd goes through what most training asks for: the output of q, k and v, and nothing beside them.

`flashtune.runtime.autograd` does the same for all calls. Here is less to hand over, to keep and to look at: a
GPU may wait for this, and autograd runs the backward pass in a thread whose caches know little of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flashtune.core.extra_inputs import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.runtime.autograd import only_once
from flashtune.runtime.torch_modes import refuse_batches

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd import Function

    from flashtune.request.request import Executor, Result
else:
    # As in `flashtune.runtime.autograd`.
    from torch.autograd.function import _SingleLevelFunction as Function

# Bound once: it is asked in every call.
is_grad_enabled = torch.is_grad_enabled


class Passes(NamedTuple):
    """Both passes of one kind of call.

    Attributes:
        forward: Gives the output and the log-sum-exp.
        backward: As `flashtune.runtime.backward_executors.BackwardExecutor` without side inputs; of what
            it gives the first three are taken.
    """

    forward: Executor
    backward: Callable[..., tuple[Tensor | None, ...]]


def plainly_differentiable(passes: Passes) -> Executor:
    """A server through which autograd goes back."""
    apply = PlainAttend.apply

    def serve(
        q: Tensor, k: Tensor, v: Tensor, scale: float | None, _: ExtraInputs = NO_EXTRA_INPUTS
    ) -> Result:
        result: Result = apply(q, k, v, passes, scale)  # type: ignore[no-untyped-call]
        return result

    return serve


class PlainAttend(Function):
    """Attention as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, passes: Passes, scale: float | None) -> Tensor:
        """Runs the forward pass and keeps what the backward pass reads."""
        out, lse = passes.forward(q, k, v, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = passes, scale
        return out

    @staticmethod
    def backward(ctx: Any, *results: Tensor) -> tuple[Tensor | None, ...]:
        """Runs the backward pass, for the gradient of the output.

        Raises:
            ProblemError: It stands for a batch of gradients.
        """
        passes, scale = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        try:
            if is_grad_enabled():
                found = only_once(passes.backward, q, k, v, out, lse, results[0], None, scale)
            else:
                found = passes.backward(q, k, v, out, lse, results[0], None, scale)
        except RuntimeError:
            refuse_batches(results)
            raise
        return found[0], found[1], found[2], None, None
