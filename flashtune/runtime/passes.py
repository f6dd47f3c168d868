"""The passes of a request: how their kernels are prepared and bound to its tensors.

A pass uses the kernel of its decision, or a fallback if that kernel fails. The executors of both passes
become one.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from flashtune.core.errors import KernelError, VerificationError
from flashtune.core.notices import search_command, warn_once
from flashtune.core.problem import Problem
from flashtune.core.record import Selection
from flashtune.core.target import Target
from flashtune.dispatch.bound_request import BoundRequest, KernelKey
from flashtune.dispatch.decision import Backend, Decision
from flashtune.dispatch.lookup import default_selections, nearest_selection
from flashtune.dispatch.nearest import is_far
from flashtune.request.gradients import BackwardExecutor
from flashtune.request.request import Executor, Prefer
from flashtune.runtime.autograd import Pair, ServeAll, differentiable, with_side
from flashtune.runtime.backward_executors import BoundBackward, interpreted_backward
from flashtune.runtime.executors import interpreted, launcher, with_copies
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
        launch = loader.bind(kernel, target, bound.forward_tensors(q.device), bound.extra, binary)
        clear = None if packed is None else loader.tail_clearer(request, packed.numel() - 1, target)
        return with_copies(launcher(launch, request, q, clear), bound.copied)

    return Pass(
        loader,
        bound.passes[0],
        bound_kernel,
        lambda decision: functools.partial(interpreted, decision, request),
    )


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


def start(decision: Decision, pass_: Pass[Any]) -> None:
    """Starts a thread that compiles the kernel of a decision. `prepared` waits for it."""
    if decision.backend is Backend.GENERATED:
        assert decision.selection is not None
        assert decision.target is not None
        pass_.loader.start(decision.selection, decision.target, pass_.key)


def prepared(decision: Decision, pass_: Pass[Usable]) -> Usable:
    """Returns the executor of a decision's generated kernel or of its fallback, in one pass.

    Warns of fallbacks. If no kernel is usable, the first error is raised.
    """
    if decision.backend is Backend.INTERPRETER:
        return pass_.interpret(decision)
    key, target = pass_.key, decision.target
    assert decision.selection is not None
    assert target is not None
    failure: KernelError | VerificationError | None = None
    chosen = (decision.selection, "the selected config")
    for selection, name in itertools.chain((chosen,), _fallbacks(decision.selection, target, key)):
        try:
            kernel = pass_.loader.load(selection, target, key)
            executor = pass_.bind(kernel)
        except (KernelError, VerificationError) as error:
            # Report the first failure only. Another kernel may still work.
            failure = failure or error
            continue
        if key.problem.features:
            pass_.loader.remember(key, kernel)
        if failure is not None:
            warn_of_failure(failure, name, key.problem)
        elif not selection.is_tuned:
            _warn_of_untuned(selection, key.problem)
        return executor
    assert failure is not None
    raise failure


def _fallbacks(selection: Selection, target: Target, key: KernelKey) -> Iterator[tuple[Selection, str]]:
    """Yields the selections to try if that of a decision fails, each with a name for the warning."""
    tuned = nearest_selection(selection)
    if tuned is not None:
        yield tuned, "the config of the nearest tuned shape"
    if key.prefer is Prefer.GENERATED:
        for default in default_selections(key.problem, target, key.specialization):
            if default != selection:
                yield default, "a default config"


def _warn_of_untuned(selection: Selection, problem: Problem) -> None:
    """Warns if a selection for an untuned shape may be slow."""
    near = selection.measured.problem
    if selection.source == "default":
        what = f"nothing like {problem.key} is tuned for this GPU, so a default config serves"
    elif (near.head_dim, near.value_head_dim) != (problem.head_dim, problem.value_head_dim):
        what = f"{problem.key} is not tuned here and its nearest, {near.key}, has other head dims"
    elif is_far(near, problem):
        what = f"{problem.key} is not tuned here and its nearest, {near.key}, is far"
    else:
        return
    # Warn once for each pass.
    warn_once(f"untuned {problem.direction}", f"{what}: run {search_command(problem)}")


def warn_of_failure(failure: Exception, instead: str, problem: Problem) -> None:
    """Warns that a fallback replaces the selection."""
    # The key is constant, because a program with ever new lengths would otherwise repeat the warning.
    warn_once("failed", f"{failure}, so {instead} serves: run {search_command(problem)}")
