"""The autograd function of plain training calls, which have only q, k and v and return only the output.

`flashtune.runtime.autograd` does the same for all calls. This module has less host overhead, because the GPU
may be idle during it. Autograd runs the backward pass in another thread, whose CPU caches are cold.
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

# Bound once, because each call uses it.
is_grad_enabled = torch.is_grad_enabled


class Passes(NamedTuple):
    """Both passes of one kind of call.

    Attributes:
        forward: Returns the output and the log-sum-exp.
        backward: Like `flashtune.runtime.backward_executors.BackwardExecutor` without side inputs. Only the
            first three results are used.
    """

    forward: Executor
    backward: Callable[..., tuple[Tensor | None, ...]]


def plainly_differentiable(passes: Passes) -> Executor:
    """Returns a differentiable executor."""
    apply = PlainAttend.apply

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float | None, _: ExtraInputs = NO_EXTRA_INPUTS) -> Result:
        result: Result = apply(q, k, v, passes, scale)  # type: ignore[no-untyped-call]
        return result

    return run


class PlainAttend(Function):
    """Attention as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, passes: Passes, scale: float | None) -> Tensor:
        """Runs the forward pass and saves the tensors for the backward pass."""
        out, lse = passes.forward(q, k, v, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = passes, scale
        return out

    @staticmethod
    def backward(ctx: Any, *results: Tensor) -> tuple[Tensor | None, ...]:
        """Runs the backward pass for the gradient of the output.

        Raises:
            ProblemError: The gradient is a batch of gradients.
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
