"""Loading of a decision's kernel, or of a fallback if it does not compile, load or pass its self-check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import msgspec

from flashtune.core.errors import KernelError, VerificationError
from flashtune.core.notices import search_command, warn_once
from flashtune.core.session import SESSION, keep
from flashtune.dispatch.decision import Backend
from flashtune.dispatch.lookup import default_selections, nearest_selection, proven_by
from flashtune.dispatch.nearest import is_far
from flashtune.launch.kernel_cache import binary_of, kernel_of
from flashtune.request.request import Prefer
from flashtune.runtime.self_check import passes_self_check, preloading

if TYPE_CHECKING:
    from flashtune.core.kernel import Kernel
    from flashtune.core.problem import Problem
    from flashtune.core.record import Selection
    from flashtune.core.target import Target
    from flashtune.dispatch.bound_request import KernelKey
    from flashtune.dispatch.decision import Decision
    from flashtune.launch.binding import Binary
    from flashtune.request.request import Request

Usable = TypeVar("Usable")

# Maximum number of cached kernels of calls with features, which are a few for each kind of model and batch.
CHOICES_LIMIT = 1024

_choices: dict[KernelKey, LoadedKernel] = SESSION.cache("kernels")


class LoadedKernel(NamedTuple):
    """A selected, loaded and verified kernel. All shapes of one problem share it."""

    kernel: Kernel
    target: Target
    binary: Binary


def known_choice(key: KernelKey) -> LoadedKernel | None:
    """Returns the cached kernel of a call with features. Numbers of packed tokens are often new."""
    return _choices.get(key) if key.problem.features else None


def remember_choice(key: KernelKey, choice: LoadedKernel) -> None:
    """Caches a kernel for later calls with the same key."""
    if key.problem.features:
        keep(_choices, key, choice, CHOICES_LIMIT)


def chosen(selection: Selection, target: Target, key: KernelKey) -> LoadedKernel:
    """Returns the loaded kernel of a selection, after a self-check unless a receipt covers it."""
    record = selection.record
    assert record.config is not None
    kernel = kernel_of(record, key.specialization)
    if proven_by(selection, kernel.digest):
        return LoadedKernel(kernel, target, binary_of(kernel, target, key.device))
    problem = msgspec.structs.replace(key.problem, causal=record.problem.causal)
    with preloading(kernel, problem, record.config, target, key.device):
        binary = binary_of(kernel, target, key.device)
    if not passes_self_check(kernel, problem, record.config, target, key.device, binary):
        raise VerificationError(
            f"the {record.family} kernel for {key.problem.key} failed its self-check on {target.name}"
        )
    return LoadedKernel(kernel, target, binary)


class Pass(NamedTuple, Generic[Usable]):
    """One pass of a request, with the functions that make its executors."""

    key: Callable[[], KernelKey]  # Returns the cache key of its kernel.
    # Returns the executor of a kernel, bound to the strides of the call.
    bind: Callable[[LoadedKernel], Usable]
    # Returns the executor of a decision for Triton's interpreter.
    interpret: Callable[[Decision], Usable]

    def known(self) -> Usable | None:
        """Returns the executor of the cached kernel, or None if there is none."""
        # Only kernels of calls with features are cached.
        choice = known_choice(self.key())
        return None if choice is None else self.bind(choice)


def prepared(decision: Decision, one: Pass[Usable]) -> Usable:
    """Returns the executor of a decision's generated kernel or of its fallback, in one pass."""
    if decision.backend is Backend.INTERPRETER:
        return one.interpret(decision)
    key = one.key()

    def attempt(selection: Selection, target: Target) -> Usable:
        choice = chosen(selection, target, key)
        executor = one.bind(choice)
        remember_choice(key, choice)
        return executor

    return first_usable(decision, key, attempt)


def prepared_or(
    make: Callable[[], Usable], request: Request, problem: Problem, name: str, instead: Callable[[], Usable]
) -> Usable:
    """Returns the result of `make`, or of `instead` with a warning if kernels fail.

    `name` is that of the fallback in the warning. If `prefer` is "generated", the error is passed on.
    """
    try:
        return make()
    except (KernelError, VerificationError) as failure:
        if request.prefer is Prefer.GENERATED:
            raise
        warn_of_failure(failure, name, problem)
        return instead()


def first_usable(
    decision: Decision, key: KernelKey, attempt: Callable[[Selection, Target], Usable]
) -> Usable:
    """Returns the result of `attempt` for the first selection with which it succeeds. Warns of fallbacks."""
    assert decision.selection is not None
    assert decision.target is not None
    failure: KernelError | VerificationError
    try:
        result = attempt(decision.selection, decision.target)
    except (KernelError, VerificationError) as error:
        failure = error
    else:
        _warn_of_fallback(decision.selection, key.problem)
        return result
    for other, name in _instead(decision.selection, decision.target, key):
        try:
            result = attempt(other, decision.target)
        except (KernelError, VerificationError):
            # Report the first failure only. Another kernel may still work.
            continue
        warn_of_failure(failure, name, key.problem)
        return result
    raise failure


def warn_of_failure(failure: Exception, instead: str, problem: Problem) -> None:
    """Warns that a fallback replaces the selection."""
    # The key is constant, because a program with ever new lengths would otherwise repeat the warning.
    warn_once("failed", f"{failure}, so {instead} serves: run {search_command(problem)}")


def _instead(selection: Selection, target: Target, key: KernelKey) -> Iterator[tuple[Selection, str]]:
    """Yields fallbacks for the kernel of a decision, each with a name for the warning."""
    tuned = nearest_selection(selection)
    if tuned is not None:
        yield tuned, "the config of the nearest tuned shape"
    if key.prefer is Prefer.GENERATED:
        for default in default_selections(key.problem, target, key.specialization):
            if default != selection:
                yield default, "a default config"


def _warn_of_fallback(selection: Selection, problem: Problem) -> None:
    near = selection.measured.problem
    if selection.source == "default":
        what = f"nothing like {problem.key} is tuned for this GPU, so a default config serves"
    elif (near.head_dim, near.value_head_dim) != (problem.head_dim, problem.value_head_dim):
        what = f"{problem.key} is not tuned here and its nearest, {near.key}, has other head dims"
    elif selection.source == "estimated" and is_far(near, problem):
        what = f"{problem.key} is not tuned here and its nearest, {near.key}, is far"
    else:
        return
    # Warn once for each pass.
    warn_once(f"untuned {problem.direction}", f"{what}: run {search_command(problem)}")
