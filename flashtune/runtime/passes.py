"""The passes of a request: how their kernels are bound to its tensors, and how both become one executor."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from flashtune.core.target import Target
from flashtune.dispatch.bound_request import BoundRequest, KernelKey
from flashtune.dispatch.decision import Decision
from flashtune.request.request import Executor, Request
from flashtune.runtime.autograd import Pair, ServeAll, differentiable, with_side
from flashtune.runtime.backward_executors import BoundBackward, interpreted_backward
from flashtune.runtime.executors import clear_tail_on_cpu, interpreted, launcher, with_copies
from flashtune.runtime.gradients import BackwardExecutor
from flashtune.runtime.kernel_loader import KernelLoader, LoadedKernel

Usable = TypeVar("Usable")


class Pass(NamedTuple, Generic[Usable]):
    """One pass of a request, with the functions that make its executors."""

    loader: KernelLoader
    key: KernelKey
    # Returns the executor of a kernel, bound to the strides of the call.
    bind: Callable[[LoadedKernel], Usable]
    # Returns the executor of a decision for Triton's interpreter.
    interpret: Callable[[Decision], Usable]

    def known(self) -> Usable | None:
        """Returns the executor of the cached kernel, or None if there is none."""
        kernel = self.loader.loaded.get(self.key)
        return None if kernel is None else self.bind(kernel)


def passes_of(bound: BoundRequest, loader: KernelLoader) -> tuple[Pass[Any], ...]:
    """Returns the passes of a request: forward and, if it needs gradients, backward."""
    forward = forward_pass(bound, loader)
    return (forward, backward_pass(bound, loader)) if bound.request.needs_grad else (forward,)


def joined(executors: Sequence[Any], bound: BoundRequest) -> Executor:
    """Returns the executor of all passes. With a backward pass it is differentiable."""
    if len(executors) == 1:
        return executors[0]  # type: ignore[no-any-return]
    forward, backward = executors
    request = bound.request
    served: ServeAll = with_side(backward, request.layout, bound.gradients)
    if isinstance(backward, BoundBackward) and not request.problem.features and not request.return_lse:
        served = backward.plainly
    return differentiable(Pair(forward, served, request.return_lse))


def forward_pass(bound: BoundRequest, loader: KernelLoader) -> Pass[Executor]:
    """Returns the forward pass of a request. Its kernels are bound to the strides of the tensors."""
    request = bound.request.forward if bound.request.needs_grad else bound.request

    def bound_kernel(choice: LoadedKernel) -> Executor:
        q, packed = bound.tensors[0], bound.side.cu_seqlens_q
        kernel, target, binary = choice
        launch = loader.bind(kernel, target, bound.forward_tensors(q.device), bound.extra, compiled=binary)
        clear = None if packed is None else clearer_of(request, packed.numel() - 1, target)
        return with_copies(launcher(launch, request, q, clear), bound.copied)

    return Pass(
        loader,
        bound.passes[0],
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


def backward_pass(bound: BoundRequest, loader: KernelLoader) -> Pass[BackwardExecutor]:
    """Returns the backward pass of a request, whose kernels take a gradient with the output's strides."""
    request = bound.request

    def bound_kernel(choice: LoadedKernel) -> BackwardExecutor:
        executor = BoundBackward(choice, request, bound.platform, loader.bind)
        executor.bind_usual(bound)
        return executor

    return Pass(
        loader,
        bound.passes[1],
        bound_kernel,
        lambda decision: functools.partial(interpreted_backward, decision, request),
    )
