"""Kernels of calls that do not wait: they are prepared for buckets of similar calls.

Kernels do not depend on lengths. So kernels are prepared for a bucket: a problem with its batch and lengths
rounded up to powers of two, unless exactly this problem is tuned. A call with a new length in a known bucket
only binds the loaded kernels.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from flashtune.core.canonical import rounded_extents
from flashtune.core.kernel import Specialization
from flashtune.core.mask_sharing import MaskSharing
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.dispatch.bound_request import BoundRequest, KernelKey
from flashtune.dispatch.decision import Decision, choose_over
from flashtune.dispatch.tables import Tables
from flashtune.launch.compiler_process import CompilerProcess
from flashtune.request.gradients import BackwardExecutor
from flashtune.request.request import Executor, Request
from flashtune.runtime.kernel_loader import KernelLoader, LoadedKernel
from flashtune.runtime.passes import Pass, joined, passes_of, prepared
from flashtune.runtime.value_checks import with_checks
from flashtune.templates.family import unsupported_reason
from flashtune.templates.registry import find_family

# A loaded kernel, or a decision for Triton's interpreter.
Choice = LoadedKernel | Decision


class Passes(NamedTuple):
    """The executors of one kind of call."""

    # The executor of the forward pass. With a backward pass it returns the log-sum-exp too.
    forward: Executor
    # The executor of the backward pass, or None if the call needs none.
    backward: BackwardExecutor | None
    # The executor of the call, which is differentiable if the call needs gradients.
    executor: Executor


class BucketKey(NamedTuple):
    """The properties of a call on which the kernels and their choice depend."""

    request: Request  # The request with rounded extents.
    properties: tuple[Specialization, ...]  # Properties that the kernel of each pass may assume.
    gradients: tuple[str, ...]  # Names of the side inputs that require grad.
    sharing: MaskSharing | None  # How the call's mask is shared.
    # Name of the replaced operator in records, or None if it has no measurements.
    usual: str | None

    @property
    def passes(self) -> tuple[KernelKey, ...]:
        """The passes of the request."""
        return _passes(self.request, self.properties)


def _passes(request: Request, properties: tuple[Specialization, ...]) -> tuple[KernelKey, ...]:
    problems = request.problem, request.backward
    return tuple(
        KernelKey(problem, assumed, request.prefer, request.device)
        for problem, assumed in zip(problems, properties, strict=False)
    )


class TunedDevice:
    """The tuned records of a device."""

    def __init__(self, target: Target, records: Tables) -> None:
        self.target = target
        self.records = records
        self._extents = frozenset(_extents(record.problem) for record in records.effective())

    def has(self, problem: Problem) -> bool:
        """Whether exactly this problem is tuned."""
        return _extents(problem) in self._extents and self.records.find(problem) is not None


def _extents(problem: Problem) -> tuple[int, ...]:
    return problem.batch, problem.seqlen_q, problem.seqlen_kv


class Bucket:
    """Kernels of calls with similar extents."""

    __slots__ = ("choices", "is_settled")

    def __init__(self) -> None:
        # Whether the preparation has ended.
        self.is_settled = False
        # The kernel or decision of each pass. None if the replaced operator serves.
        self.choices: tuple[Choice, ...] | None = None


class Entry:
    """The cache entry of one kind of call."""

    __slots__ = ("bucket", "count", "is_refused", "passes", "properties", "request")

    def __init__(
        self,
        request: Request | None,
        bucket: Bucket | None,
        properties: tuple[Specialization, ...] = (),
        count: Callable[[], None] | None = None,
    ) -> None:
        self.request = request
        self.bucket = bucket
        # Counts one call for recordings, or None without one.
        self.count = count
        # The bound executors. None before they are bound, and if the replaced operator serves.
        self.passes: Passes | None = None
        # Whether the replaced operator serves all calls of this kind.
        self.is_refused = bucket is None
        # The properties of tensors that kernels of each pass may assume.
        self.properties = properties

    @property
    def may_be_skipped(self) -> bool:
        """Whether later calls need no look-up: all are refused, and none is counted."""
        return self.is_refused and self.count is None

    @property
    def has_best_tensors(self) -> bool:
        """Whether kernels may assume the most of the tensors."""
        return all(assumed.is_best for assumed in self.properties)


# The entry of all calls that no kernel computes.
REFUSED = Entry(None, None)


def rounded(request: Request, device: TunedDevice | None) -> Request:
    """Returns a request with the extents of its bucket. Those of a tuned problem stay."""
    problem = request.problem
    if device is None or not device.has(problem):
        problem = rounded_extents(problem)
    return msgspec.structs.replace(request, problem=problem, tokens=problem.packed)


def choices_of(
    key: BucketKey, device: TunedDevice | None, loader: KernelLoader, compiler: CompilerProcess
) -> tuple[Choice, ...] | None:
    """Returns the kernel or the decision of each pass, or None if the replaced operator is faster."""
    request = key.request
    tuned = None if device is None else (device.target, device.records)
    decisions = choose_over(key.usual, key.passes, key.gradients, key.sharing, tuned, loader.bundles)
    if decisions is None or device is None:
        return decisions
    if request.problem.packed:
        # Calls that bind another clearer need no compilation then.
        loader.tail_clearer(request, request.problem.batch, device.target)
    kernels: list[Choice] = []
    for decision, kernel_key in zip(decisions, key.passes, strict=True):
        assert decision.selection is not None
        loader.compile_apart(compiler, decision.selection.record, kernel_key.specialization, device.target)
        pass_: Pass[Choice] = Pass(loader, kernel_key, lambda kernel: kernel, lambda decision: decision)
        kernels.append(prepared(decision, pass_))
    return tuple(kernels)


def bound_passes(
    bound: BoundRequest,
    properties: tuple[Specialization, ...],
    choices: tuple[Choice, ...],
    loader: KernelLoader,
) -> Passes | None:
    """Returns the executors of loaded kernels for a call's strides, or None if one cannot compute it."""
    request = bound.request
    # The properties are part of the key of the call, so they are not computed again.
    bound.passes = _passes(request, properties)
    executors = [_executor(*pair) for pair in zip(passes_of(bound, loader), choices, strict=True)]
    if None in executors:
        return None
    executor = with_checks(joined(executors, bound), request, bound.platform)
    return Passes(executors[0], executors[1] if request.needs_grad else None, executor)


def _executor(pass_: Pass[Any], choice: Choice) -> Any:
    if isinstance(choice, Decision):
        return pass_.interpret(choice)
    family, key = find_family(choice.kernel.family), pass_.key
    if unsupported_reason(family, key.problem, choice.target, key.specialization) is not None:
        return None
    return pass_.bind(choice)
