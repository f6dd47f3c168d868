"""Serves calls of other libraries without waits: kernels are prepared on one worker thread.

The operator that a library called before serves a call until its kernels are compiled, loaded and checked.
Kernels do not depend on lengths. So kernels are prepared for a bucket: a problem with its batch and lengths
rounded up to powers of two, unless exactly this problem is tuned. A call with a new length in a known bucket
only binds the loaded kernels.
"""

from __future__ import annotations

import enum
import functools
import importlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from flashtune.core.arguments import MAX_FLOAT32
from flashtune.core.canonical import rounded_extents
from flashtune.core.errors import FlashtuneError, KernelError, ProblemError, VerificationError
from flashtune.core.notices import warn_once
from flashtune.core.session import SESSION, keep
from flashtune.core.target import device_target
from flashtune.dispatch.bound_request import BoundRequest, KernelKey
from flashtune.dispatch.decision import (
    BEST_TENSORS,
    INTERPRETED_TARGET,
    Decision,
    check_supported,
    choose_over,
)
from flashtune.dispatch.nearest import same_computation
from flashtune.dispatch.tables import tuned_records
from flashtune.dispatch.versions import current_versions
from flashtune.launch.compilation import interpreting
from flashtune.launch.compiler_process import CompilerProcess
from flashtune.recording.callers import note_caller
from flashtune.recording.recorder import counted, recording
from flashtune.runtime.background import Worker, beside_captures
from flashtune.runtime.call_cache import call_key, is_negated
from flashtune.runtime.kernel_fallback import LoadedKernel, Pass, prepared, warn_of_failure
from flashtune.runtime.passes import clearer_of, joined, passes_of
from flashtune.runtime.value_checks import is_capturing, with_checks
from flashtune.templates.family import unsupported_reason
from flashtune.templates.registry import families, find_family

if TYPE_CHECKING:
    from flashtune.core.kernel import Specialization
    from flashtune.core.mask_sharing import MaskSharing
    from flashtune.core.problem import Problem
    from flashtune.core.target import Target
    from flashtune.dispatch.tables import Tables
    from flashtune.request.call import Call
    from flashtune.request.request import Executor, Request
    from flashtune.runtime.gradients import BackwardExecutor

# Calls beyond this number of unprepared buckets do not add another one.
QUEUE_LIMIT = 64
# In warnings.
REPLACED = "the replaced operator"


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
        problems = self.request.problem, self.request.backward
        return tuple(
            KernelKey(problem, needed, self.request.prefer, self.request.device)
            for problem, needed in zip(problems, self.properties, strict=False)
        )


class Known(NamedTuple):
    """The tuned records of a device."""

    target: Target  # The device.
    records: Tables  # Its records.
    extents: frozenset[tuple[int, ...]]  # The batches and lengths of their problems.

    def has(self, problem: Problem) -> bool:
        """Whether exactly this problem is tuned."""
        return _extents(problem) in self.extents and any(
            self.records.find(one.key) for one in same_computation(problem)
        )


def _extents(problem: Problem) -> tuple[int, ...]:
    return problem.batch, problem.seqlen_q, problem.seqlen_kv


class Bucket:
    """Kernels of calls with similar extents.

    Attributes:
        is_settled: Whether the preparation has ended.
        choices: The kernel or decision of each pass. None if the replaced operator serves.
    """

    __slots__ = ("choices", "is_settled")

    def __init__(self) -> None:
        self.is_settled = False
        self.choices: tuple[Choice, ...] | None = None


# A loaded kernel, or a decision for Triton's interpreter.
Choice = LoadedKernel | Decision


class State(enum.Enum):
    """Whether the kernels of a kind of call are in preparation, bound, or refused."""

    PENDING = enum.auto()
    READY = enum.auto()
    REFUSED = enum.auto()


class Entry:
    """The cache entry of one kind of call.

    Attributes:
        passes: The bound executors. None before they are bound, and if the replaced operator serves.
        is_refused: Whether the replaced operator serves all calls of this kind.
        properties: The properties of tensors that kernels of each pass may assume.
        count: Counts one call for recordings, or None without one.
    """

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
        self.count = count
        self.passes: Passes | None = None
        self.is_refused = bucket is None
        self.properties = properties

    @property
    def state(self) -> State:
        """Whether kernels serve such calls."""
        if self.passes is not None:
            return State.READY
        return State.REFUSED if self.is_refused else State.PENDING

    @property
    def may_be_skipped(self) -> bool:
        """Whether later calls need no look-up: all are refused, and none is counted."""
        return self.state is State.REFUSED and self.count is None

    @property
    def has_best_tensors(self) -> bool:
        """Whether kernels may assume the most of the tensors."""
        assumed = (
            msgspec.structs.replace(one, lse=False, constant_bias=msgspec.UNSET) for one in self.properties
        )
        return all(one == BEST_TENSORS for one in assumed)


# The entry of all calls that no kernel computes.
REFUSED = Entry(None, None)

_entries: dict[tuple[object, ...], Entry] = SESSION.cache("entries")
_buckets: dict[BucketKey, Bucket] = SESSION.cache("buckets")
# The tuned records of each device, or None if they cannot be loaded, and the devices whose records are being
# loaded.
_tables: dict[torch.device, Known | None] = SESSION.cache("tuned records")
_loading: dict[torch.device, bool] = SESSION.cache("loading devices")
# Calls that came before these records were loaded, with their own extents.
_early: dict[BucketKey, bool] = SESSION.cache("early calls")
_compiler = CompilerProcess()
_worker = Worker("flashtune-prepare", _compiler.close, _compiler.kill)


def ready(call: Call, usual: str | None, caller: str = "") -> Executor | None:
    """Returns the executor of a call, or None if the replaced operator serves it. It never waits.

    The executor is called as (q, k, v, scale, side) and returns the output, or the output and the
    log-sum-exp. It is differentiable if an input requires grad. The arguments are those of `entry_of`.
    """
    entry = entry_of(call, usual, caller=caller)
    return None if entry is None or entry.passes is None else entry.passes.executor


def entry_of(call: Call, usual: str | None, needs_grad: bool | None = None, caller: str = "") -> Entry | None:
    """Returns the entry of a call. The preparation of its kernels is queued if its kind is new.

    Returns None if the kind cannot be cached now: a CUDA graph is being captured, or the queue is full. Also
    for tensors that have their sign in a flag.

    Args:
        call: The call.
        usual: Name of the replaced operator in records, such as `sdpa-cudnn`. None if there is no operator
            with measurements. The kernels then serve as soon as they are prepared.
        needs_grad: Whether the call has a backward pass. By default the tensors determine this.
        caller: Name of the calling module of `flashtune.integrations`, for explanations.
    """
    scale = call.scale
    if scale is not None and not (type(scale) is float and 0.0 <= scale <= MAX_FLOAT32):
        return None
    try:
        if is_negated(call):
            return None
        key: tuple[object, ...] = (usual, *call_key(call))
        if needs_grad is not None:
            # The tensors of operators below autograd do not show whether gradients are needed.
            key = (*key[:-1], needs_grad, needs_grad and torch.are_deterministic_algorithms_enabled())
        entry = _entries.get(key)
    except (AttributeError, RuntimeError, TypeError):
        # A tensor has no strides, or an argument has another type. The replaced operator reports it.
        return None
    if entry is None:
        entry = _added(key, call, usual, needs_grad)
        if entry is not None and entry.request is not None:
            note_caller(entry.request.problem, caller)
    if entry is not None:
        if entry.count is not None:
            entry.count()
        if entry.passes is None and not entry.is_refused:
            _bind_prepared(entry, call)
    return entry


def _bind_prepared(entry: Entry, call: Call) -> None:
    """Binds the kernels of a pending entry to a call's strides if they are prepared."""
    bucket, request = entry.bucket, entry.request
    if bucket is None or request is None or not bucket.is_settled:
        return
    if bucket.choices is None:
        entry.is_refused = True
    elif not is_capturing(call.q):
        try:
            bound = BoundRequest(request, call.q, call.k, call.v, call.side)
            entry.passes = _bound(bound, entry.properties, bucket.choices)
        except (FlashtuneError, RuntimeError) as failure:
            _warn(failure)
        entry.is_refused = entry.passes is None


def warm_up() -> None:
    """Does the slow parts of preparations ahead: imports, hashes of templates, tuned records and the stream.

    They hold Python's lock, for which calls would wait.
    """
    try:
        for name in ("flashtune.verification.check", "triton.experimental.gluon.language"):
            importlib.import_module(name)
        for family in families():
            current_versions(family.name)  # cached
        if not torch.cuda.is_initialized():
            # Imports the modules that read any records.
            tuned_records(INTERPRETED_TARGET)
            return
        device = torch.device("cuda", torch.cuda.current_device())
        with beside_captures(device):
            pass  # the stream exists now
        if device not in _tables:
            _load(device)
    except Exception as failure:  # noqa: BLE001 (the replaced operators serve)
        _warn(failure)


def wait(timeout: float | None = None) -> bool:
    """Waits until all queued kernels are prepared. Returns False if `timeout` (in s) ends first."""
    return _worker.wait(timeout)


def _added(key: tuple[object, ...], call: Call, usual: str | None, needs_grad: bool | None) -> Entry | None:
    """Returns a new kind of call, or None if it cannot be cached now. A new bucket is queued."""
    if is_capturing(call.q):
        return None
    with SESSION.adding:
        entry: Entry | None = REFUSED
        try:
            bound = BoundRequest.of(call, needs_grad)
            if not (bound.request.is_empty or bound.request.is_double):
                entry = _entry(bound, usual)
        except ProblemError:
            pass  # the replaced operator serves, or reports the error
        except (FlashtuneError, RuntimeError) as failure:
            _warn(failure)
        if entry is not None:
            keep(_entries, key, entry)
    return entry


def _entry(bound: BoundRequest, usual: str | None) -> Entry | None:
    request = bound.request
    check_supported(request)
    properties = tuple(one.specialization for one in bound.passes)
    key = BucketKey(request, properties, bound.gradients, bound.sharing, usual)
    known = _tables.get(request.device)
    if known is None and not interpreting():
        if request.device in _tables:
            return REFUSED
        # Extents are rounded, and kernels chosen, after the records are loaded.
        load, add = functools.partial(_load, request.device), functools.partial(_add_bucket, key)
        if request.device not in _loading and _worker.put(load, QUEUE_LIMIT):
            keep(_loading, request.device, True)
        if key not in _early and _worker.put(add, QUEUE_LIMIT):
            keep(_early, key, True)
        return None
    key = key._replace(request=_rounded(request, known))
    bucket = _buckets.get(key)
    if bucket is None:
        bucket = Bucket()
        if not _worker.put(functools.partial(_settle, key, bucket, known), QUEUE_LIMIT):
            return None
        keep(_buckets, key, bucket)
    return Entry(request, bucket, properties, _counter(bound))


def _add_bucket(key: BucketKey) -> None:
    """Prepares the kernels of calls that came before the tuned records were loaded."""
    known = _tables.get(key.request.device)
    if known is None:
        return
    key = key._replace(request=_rounded(key.request, known))
    with SESSION.adding:
        if key in _buckets:
            return
        bucket = Bucket()
        keep(_buckets, key, bucket)
    _settle(key, bucket, known)


def _rounded(request: Request, known: Known | None) -> Request:
    """Returns a request with the extents of its bucket. Those of a tuned problem stay."""
    problem = request.problem
    if known is None or not known.has(problem):
        problem = rounded_extents(problem)
    return msgspec.structs.replace(request, problem=problem, tokens=problem.packed)


def _load(device: torch.device) -> None:
    """Loads the tuned records of a device. The replaced operators serve if that fails."""
    try:
        target = device_target(torch.cuda.current_device() if device.index is None else device.index)
        records = tuned_records(target.name)
        extents = frozenset(_extents(record.problem) for record in records.effective())
        keep(_tables, device, Known(target, records, extents))
    except Exception as failure:  # noqa: BLE001 (a call must not fail because another operator was tried)
        keep(_tables, device, None)
        _warn(failure)


def _settle(key: BucketKey, bucket: Bucket, known: Known | None) -> None:
    """Prepares the kernels of a bucket, unless the replaced operator is faster or they fail."""
    failure: Exception | None = None
    try:
        with beside_captures(key.request.device):
            bucket.choices = _chosen(key, known)
    except ProblemError:
        pass  # no kernel computes it
    except Exception as error:  # noqa: BLE001 (a call must not fail because another operator was tried)
        failure = error
    bucket.is_settled = True
    if not threading.main_thread().is_alive():
        return  # the process ends, so that nothing can be prepared
    if isinstance(failure, KernelError | VerificationError):
        warn_of_failure(failure, REPLACED, key.request.problem)
    elif failure is not None:
        _warn(failure)


def _chosen(key: BucketKey, known: Known | None) -> tuple[Choice, ...] | None:
    """Returns the kernel or the decision of each pass, or None if the replaced operator is faster."""
    request = key.request
    given = None if known is None else (known.target, known.records)
    decisions = choose_over(key.usual, key.passes, key.gradients, key.sharing, given)
    if decisions is None or known is None:
        return decisions
    if request.problem.packed:
        # Calls that bind another clearer need no compilation then.
        clearer_of(request, request.problem.batch, known.target)
    return tuple(_loaded(*one) for one in zip(decisions, key.passes, strict=True))


def _loaded(decision: Decision, key: KernelKey) -> Choice:
    assert decision.selection is not None
    assert decision.target is not None
    _compiler.prepare(decision.selection.record, key.specialization, decision.target)
    one: Pass[Choice] = Pass(lambda: key, lambda choice: choice, lambda decision: decision)
    return prepared(decision, one)


def _bound(
    bound: BoundRequest, properties: tuple[Specialization, ...], choices: tuple[Choice, ...]
) -> Passes | None:
    """Returns the executors of loaded kernels for a call's strides, or None if one cannot compute it."""
    request = bound.request
    problems = request.problem, request.backward
    executors = [
        _executor(*of_pass) for of_pass in zip(passes_of(bound), problems, properties, choices, strict=False)
    ]
    if None in executors:
        return None
    executor = with_checks(joined(executors, bound), request)
    return Passes(executors[0], executors[1] if request.needs_grad else None, executor)


def _executor(one: Pass[Any], problem: Problem, needed: Specialization, choice: Choice) -> Any:
    if isinstance(choice, Decision):
        return one.interpret(choice)
    family = find_family(choice.kernel.family)
    if unsupported_reason(family, problem, choice.target, needed) is not None:
        return None
    return one.bind(choice)


def _counter(bound: BoundRequest) -> Callable[[], None] | None:
    """Returns a function that counts a call for all recordings, or None without one."""
    if not recording():
        return None
    count = _nothing
    for one in bound.passes:
        count = counted(count, one.problem, one.specialization)
    return count


def _nothing() -> None:
    pass


def _warn(failure: Exception) -> None:
    warn_once("deferred", f"{REPLACED} serves, because kernels could not be prepared: {failure!r}")
