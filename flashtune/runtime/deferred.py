"""Serves calls of other libraries without waits: kernels are prepared on one worker thread.

The operator that a library called before serves a call until its kernels are compiled, loaded and checked.
Kernels do not depend on lengths. So kernels are prepared for a bucket: a problem with its batch and lengths
rounded up to powers of two, unless exactly this problem is tuned. A call with a new length in a known bucket
only binds the loaded kernels.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import torch

from flashtune.core.arguments import MAX_FLOAT32
from flashtune.core.canonical import rounded_extents
from flashtune.core.errors import FlashtuneError, KernelError, ProblemError, VerificationError
from flashtune.core.notices import warn_once
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
from flashtune.recording.callers import forget_callers, note_caller
from flashtune.recording.recorder import counted, on_change, recording
from flashtune.runtime.background import Worker, beside_captures
from flashtune.runtime.call_cache import call_key, is_negated
from flashtune.runtime.kernel_fallback import LoadedKernel, Pass, prepared, warn_of_failure
from flashtune.runtime.prepare import clearer_of, forward_pass
from flashtune.runtime.prepare_training import backward_pass, paired
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

# The cache is cleared at this size. Kernels stay loaded.
MEMO_LIMIT = 4096
# Calls beyond this number of unprepared buckets do not add another one.
QUEUE_LIMIT = 64
# In warnings.
REPLACED = "the replaced operator"

AnyExecutor = TypeVar("AnyExecutor", bound=Callable[..., Any])


class Passes(NamedTuple):
    """The executors of one kind of call.

    Attributes:
        forward: The executor of the forward pass. With a backward pass it returns the log-sum-exp too.
        backward: The executor of the backward pass, or None if the call needs none.
        executor: The executor of the call, which is differentiable if the call needs gradients.
    """

    forward: Executor
    backward: BackwardExecutor | None
    executor: Executor


class BucketKey(NamedTuple):
    """The properties of a call on which the kernels and their choice depend.

    Attributes:
        request: The request with rounded extents.
        properties: Properties that the kernel of each pass may assume.
        gradients: Names of the side inputs that require grad.
        sharing: How the call's mask is shared.
        usual: Name of the replaced operator in records, or None if it has no measurements.
    """

    request: Request
    properties: tuple[Specialization, ...]
    gradients: tuple[str, ...]
    sharing: MaskSharing | None
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
    """The tuned records of a device.

    Attributes:
        target: The device.
        records: Its records.
        extents: The batches and lengths of their problems.
    """

    target: Target
    records: Tables
    extents: frozenset[tuple[int, ...]]

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


class Kind:
    """One kind of call.

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
    def is_usual(self) -> bool:
        """Whether kernels may assume the most of the tensors."""
        assumed = (
            msgspec.structs.replace(one, lse=False, constant_bias=msgspec.UNSET) for one in self.properties
        )
        return all(one == BEST_TENSORS for one in assumed)


# The kind of all calls that no kernel computes.
REFUSED = Kind(None, None)

_kinds: dict[tuple[object, ...], Kind] = {}
_buckets: dict[BucketKey, Bucket] = {}
# The tuned records of each device, or None if they cannot be loaded, and the devices whose records are being
# loaded.
_tables: dict[torch.device, Known | None] = {}
_loading: set[torch.device] = set()
# Calls that came before these records were loaded, with their own extents.
_early: set[BucketKey] = set()
_adding = threading.RLock()
_compiler = CompilerProcess()
_worker = Worker("flashtune-prepare", _compiler.close, _compiler.kill)


def ready(call: Call, usual: str | None, caller: str = "") -> Executor | None:
    """Returns the executor of a call, or None if the replaced operator serves it. It never waits.

    The executor is called as (q, k, v, scale, side) and returns the output, or the output and the
    log-sum-exp. It is differentiable if an input requires grad.

    Args:
        call: The call.
        usual: Name of the replaced operator in records, such as `sdpa-cudnn`. None if there is no operator
            with measurements. The kernels then serve as soon as they are prepared.
        caller: Name of the calling module of `flashtune.integrations`, for explanations.
    """
    kind = kind_of(call, usual, caller=caller)
    passes = None if kind is None else passes_of(kind, call)
    return None if passes is None else passes.executor


def kind_of(call: Call, usual: str | None, needs_grad: bool | None = None, caller: str = "") -> Kind | None:
    """Returns the kind of a call, and queues the preparation of its kernels if it is new.

    Returns None if the kind cannot be cached now: a CUDA graph is being captured, or the queue is full. Also
    for tensors that have their sign in a flag.

    Args:
        call: The call.
        usual: As in `ready`.
        needs_grad: Whether the call has a backward pass. By default the tensors determine this.
        caller: As in `ready`.
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
        kind = _kinds.get(key)
    except (AttributeError, RuntimeError, TypeError):
        # A tensor has no strides, or an argument has another type. The replaced operator reports it.
        return None
    if kind is None:
        kind = _added(key, call, usual, needs_grad)
        if kind is not None and kind.request is not None:
            note_caller(kind.request.problem, caller)
    if kind is not None and kind.count is not None:
        kind.count()
    return kind


def passes_of(kind: Kind, call: Call) -> Passes | None:
    """Returns the bound executors of a kind of call, or None if the replaced operator serves this call."""
    bucket, request = kind.bucket, kind.request
    if kind.passes is not None or bucket is None or request is None or not bucket.is_settled:
        return kind.passes
    if bucket.choices is None:
        kind.is_refused = True
    elif not kind.is_refused and not is_capturing(call.q):
        try:
            bound = BoundRequest(request, call.q, call.k, call.v, call.side)
            kind.passes = _bound(bound, kind.properties, bucket.choices)
        except (FlashtuneError, RuntimeError) as failure:
            _warn(failure)
        kind.is_refused = kind.passes is None
    return kind.passes


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


def forget() -> None:
    """Clears the caches. Kernels stay loaded."""
    with _adding:
        _kinds.clear()
        forget_callers()
        _buckets.clear()
        _tables.clear()
        _loading.clear()
        _early.clear()


on_change(forget)


def _added(key: tuple[object, ...], call: Call, usual: str | None, needs_grad: bool | None) -> Kind | None:
    """Returns a new kind of call, or None if it cannot be cached now. A new bucket is queued."""
    if is_capturing(call.q):
        return None
    with _adding:
        kind: Kind | None = REFUSED
        try:
            bound = BoundRequest.of(call, needs_grad)
            if not (bound.request.is_empty or bound.request.is_double):
                kind = _kind(bound, usual)
        except ProblemError:
            pass  # the replaced operator serves, or reports the error
        except (FlashtuneError, RuntimeError) as failure:
            _warn(failure)
        if kind is not None:
            if len(_kinds) >= MEMO_LIMIT:
                _kinds.clear()
            _kinds[key] = kind
    return kind


def _kind(bound: BoundRequest, usual: str | None) -> Kind | None:
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
            _loading.add(request.device)
        if key not in _early and _worker.put(add, QUEUE_LIMIT):
            _early.add(key)
        return None
    key = key._replace(request=_rounded(request, known))
    bucket = _buckets.get(key)
    if bucket is None:
        bucket = Bucket()
        if not _worker.put(functools.partial(_settle, key, bucket, known), QUEUE_LIMIT):
            return None
        _keep(key, bucket)
    return Kind(request, bucket, properties, _counter(bound))


def _keep(key: BucketKey, bucket: Bucket) -> None:
    if len(_buckets) >= MEMO_LIMIT:
        _buckets.clear()
    _buckets[key] = bucket


def _add_bucket(key: BucketKey) -> None:
    """Prepares the kernels of calls that came before the tuned records were loaded."""
    known = _tables.get(key.request.device)
    if known is None:
        return
    key = key._replace(request=_rounded(key.request, known))
    with _adding:
        if key in _buckets:
            return
        bucket = Bucket()
        _keep(key, bucket)
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
        _tables[device] = Known(target, records, extents)
    except Exception as failure:  # noqa: BLE001 (a call must not fail because another operator was tried)
        _tables[device] = None
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
    """Returns the kernel or the decision of each pass, or None if the replaced operator is faster.

    Raises:
        ProblemError: No kernel family computes the bucket.
        KernelError: No kernel compiles and loads.
        VerificationError: The kernels are wrong on this GPU.
    """
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
    first = _executor(forward_pass(bound), request.problem, properties[0], choices[0])
    if first is None or not request.needs_grad:
        return None if first is None else Passes(first, None, with_checks(first, request))
    last = _executor(backward_pass(bound), request.backward, properties[1], choices[1])
    return None if last is None else Passes(first, last, with_checks(paired(first, last, bound), request))


def _executor(
    one: Pass[AnyExecutor], problem: Problem, needed: Specialization, choice: Choice
) -> AnyExecutor | None:
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
