"""`Session`: the executors of kinds of calls, and all that prepares them.

A call of a known kind only computes its key and looks up its executor. Calls of `flashtune.attention` wait
until the executor of a new kind is prepared, under one lock, so that threads compile a kernel once. Calls of
other libraries do not wait: the operator that a library called before serves them until the worker thread
has compiled, loaded and checked the kernels.

Each number of packed tokens is another kind of call. These kinds share the selected kernel and its binary,
which are slow to make (`flashtune.runtime.prepare`).
"""

import contextlib
import functools
import importlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flashtune.core.arguments import MAX_FLOAT32
from flashtune.core.caches import keep
from flashtune.core.errors import FlashtuneError, KernelError, ProblemError, VerificationError
from flashtune.core.locks import ModuleLock
from flashtune.core.notices import warn_once
from flashtune.core.problem import Problem
from flashtune.dispatch.bound_request import BoundRequest
from flashtune.dispatch.decision import INTERPRETED_TARGET
from flashtune.dispatch.platform import PLATFORM, Platform
from flashtune.dispatch.tables import tuned_records
from flashtune.dispatch.versions import current_versions
from flashtune.launch.bundles import bundle_paths
from flashtune.launch.compilation import interpreting
from flashtune.launch.compiler_process import CompilerProcess
from flashtune.recording.callers import present_caller
from flashtune.recording.recorder import Recording, counted, recordings_of_process
from flashtune.request.call import Call
from flashtune.request.request import Executor
from flashtune.runtime.background import Worker
from flashtune.runtime.buckets import (
    REFUSED,
    Bucket,
    BucketKey,
    Entry,
    TunedDevice,
    bound_passes,
    choices_of,
    rounded,
)
from flashtune.runtime.call_key import call_key, is_negated, keys_of_any_address
from flashtune.runtime.kernel_loader import KernelLoader
from flashtune.runtime.passes import warn_of_failure
from flashtune.runtime.prepare import prepare
from flashtune.runtime.value_checks import with_checks
from flashtune.templates.registry import families

# The properties of a kind of call.
Key = tuple[object, ...]

# Calls beyond this number of unprepared buckets do not add another one.
QUEUE_LIMIT = 64
# The number of removed sets of overrides that stay in memory with their kernels.
KEPT_KERNELS = 192
# The architecture for which bundles ship.
HOPPER = 90
# In warnings.
REPLACED = "the replaced operator"


class Session:
    """The state of the runtime of a process. Compiled kernels stay loaded beyond it.

    Its caches are dictionaries, which callers may keep, so that a look-up is as fast as possible.
    """

    def __init__(
        self,
        platform: Platform | None = None,
        loader: KernelLoader | None = None,
        compiler: CompilerProcess | None = None,
        queue_limit: int = QUEUE_LIMIT,
    ) -> None:
        # The GPUs, their tuned records and SDPA's backends.
        self.platform = platform or PLATFORM
        self.loader = loader or KernelLoader()
        # Compiles kernels of calls that do not wait, which the worker prepares.
        self.compiler = compiler or CompilerProcess()
        self.worker = Worker("flashtune-prepare", self.compiler.close, self.compiler.kill)
        self.queue_limit = queue_limit
        # The present recordings of calls.
        self.recordings: list[Recording] = []
        # Held while a call that waits is prepared, so that threads compile its kernels once.
        self.preparing = ModuleLock()
        # Held for moments, to add kinds of calls that do not wait.
        self.adding = ModuleLock()
        # Held while functions of other libraries are replaced or restored.
        self.changing = ModuleLock()
        # The executors of calls that wait.
        self.executors: dict[Key, Callable[..., Any]] = {}
        # The executors of calls with a `kind`, by shorter keys.
        self.repeated: dict[Key, Callable[..., Any]] = {}
        # The kinds of calls that do not wait, and their kernels.
        self.entries: dict[Key, Entry] = {}
        self.buckets: dict[BucketKey, Bucket] = {}
        # The tuned records of each device, or None if they cannot be loaded.
        self.devices: dict[torch.device, TunedDevice | None] = {}
        # The devices whose records are being loaded.
        self.loading: dict[torch.device, bool] = {}
        # Calls that came before these records were loaded, with their own extents.
        self.early: dict[BucketKey, bool] = {}
        # The module of `flashtune.integrations` that last prepared calls of a problem.
        self.callers: dict[Problem, str] = {}
        # For each of torch's operators, calls that are passed on at once, and calls that are served.
        self.operators: dict[str, tuple[dict[Key, bool], dict[Key, Any]]] = {}
        # Properties of layers of transformers that are not served.
        self.refused_jobs: dict[Key, bool] = {}
        # The kernels of removed overrides. Another thread may have looked one up and wait for Python's lock
        # before it calls it. torch would have freed the kernel by then.
        self.removed_kernels: deque[list[Any]] = deque(maxlen=KEPT_KERNELS)
        # The modules of flash_attn in `sys.modules` before flashtune replaced them, or None.
        self.replaced_modules: dict[str, ModuleType] | None = None

    def forget(self) -> None:
        """Clears the caches of kinds of calls, which are then prepared again."""
        with self.preparing, self.adding:
            for cache in (
                self.executors,
                self.repeated,
                self.entries,
                self.buckets,
                self.devices,
                self.loading,
                self.early,
                self.callers,
                self.refused_jobs,
                self.loader.loaded,
            ):
                cache.clear()
            self.forget_operators()

    def forget_operators(self) -> None:
        """Forgets the calls of torch's operators. Does not wait for calls in preparation."""
        # Another thread may add an operator.
        for refused, served in tuple(self.operators.values()):
            refused.clear()
            served.clear()

    def executor(self, call: Call) -> Executor:
        """Returns the executor of a call with signs in memory. A new kind of call is prepared first."""
        key = call_key(call)
        executor: Executor | None = self.executors.get(key)
        return self.prepared(key, call, self._executor) if executor is None else executor

    def prepared(
        self,
        key: Key,
        call: Call,
        make: Callable[[BoundRequest], Callable[..., Any]],
        needs_grad: bool | None = None,
    ) -> Callable[..., Any]:
        """Returns the cached executor of a key, or a new one: `make` of the call's bound request."""
        cached = self.executors.get(key)
        if cached is not None:
            return cached
        with self.preparing:
            cached = self.executors.get(key)
            if cached is not None:
                return cached
            bound = BoundRequest.of(call, needs_grad, self.platform)
            if self.platform.is_capturing(call.q.device):
                for other in keys_of_any_address(key):
                    cached = self.executors.get(other)
                    if cached is not None:
                        return cached
                raise KernelError(
                    "a CUDA graph is being captured and this shape is new, so that its kernel cannot be "
                    "compiled and loaded now: call flashtune.plan(...) with tensors of this shape before the "
                    "capture"
                )
            executor = make(bound)
            self._note_caller(bound)
            keep(self.executors, key, executor)
            return executor

    def _executor(self, bound: BoundRequest) -> Executor:
        request = bound.request
        executor = with_checks(prepare(bound, self.loader), request, self.platform)
        if request.is_double or not request.has_values:
            return executor
        return self.counted(executor, bound)

    def counted(self, executor: Callable[..., Any], bound: BoundRequest) -> Callable[..., Any]:
        """Returns an executor that counts a call in each pass for all recordings, if there are any."""
        if self.recordings:
            for pass_ in bound.passes:
                executor = counted(executor, self.recordings, pass_.problem, pass_.specialization)
        return executor

    def _note_caller(self, bound: BoundRequest, name: str = "") -> None:
        """Stores the caller of a problem: `name`, or else the module that this thread calls for, if any."""
        name = name or present_caller()
        if name:
            keep(self.callers, bound.request.problem, name)

    def entry(
        self, call: Call, usual: str | None, needs_grad: bool | None = None, caller: str = ""
    ) -> Entry | None:
        """Returns the entry of a call. The preparation of its kernels is queued if its kind is new.

        It never waits. Returns None if the kind cannot be cached now: a CUDA graph is being captured, or the
        queue is full. Also for tensors that have their sign in a flag.

        Args:
            call: The call.
            usual: Name of the replaced operator in records, such as `sdpa-cudnn`. None if there is no
                operator with measurements. The kernels then serve as soon as they are prepared.
            needs_grad: Whether the call has a backward pass. By default the tensors determine this.
            caller: Name of the calling module of `flashtune.integrations`, for explanations.
        """
        scale = call.scale
        if scale is not None and not (type(scale) is float and 0.0 <= scale <= MAX_FLOAT32):
            return None
        try:
            if is_negated(call):
                return None
            key: Key = (usual, *call_key(call))
            if needs_grad is not None:
                # The tensors of operators below autograd do not show whether gradients are needed.
                key = (*key[:-1], needs_grad, needs_grad and torch.are_deterministic_algorithms_enabled())
            entry = self.entries.get(key)
        except (AttributeError, RuntimeError, TypeError):
            # A tensor has no strides, or an argument has another type. The replaced operator reports it.
            return None
        if entry is None:
            entry = self._added(key, call, usual, needs_grad, caller)
        if entry is not None:
            if entry.count is not None:
                entry.count()
            if entry.passes is None and not entry.is_refused:
                self._bind_prepared(entry, call)
        return entry

    def _bind_prepared(self, entry: Entry, call: Call) -> None:
        """Binds the kernels of a pending entry to a call's strides if they are prepared."""
        bucket, request = entry.bucket, entry.request
        if bucket is None or request is None or not bucket.is_settled:
            return
        if bucket.choices is None:
            entry.is_refused = True
        elif not self.platform.is_capturing(call.q.device):
            try:
                bound = BoundRequest(request, call.q, call.k, call.v, call.side, self.platform)
                entry.passes = bound_passes(bound, entry.properties, bucket.choices, self.loader)
            except (FlashtuneError, RuntimeError) as failure:
                _warn(failure)
            entry.is_refused = entry.passes is None

    def _added(
        self, key: Key, call: Call, usual: str | None, needs_grad: bool | None, caller: str
    ) -> Entry | None:
        """Returns a new kind of call, or None if it cannot be cached now. A new bucket is queued."""
        if self.platform.is_capturing(call.q.device):
            return None
        with self.adding:
            entry: Entry | None = REFUSED
            try:
                bound = BoundRequest.of(call, needs_grad, self.platform)
                if not (bound.request.is_empty or bound.request.is_double):
                    entry = self._entry(bound, usual)
                    if entry is not None and entry.request is not None:
                        self._note_caller(bound, caller)
            except ProblemError:
                pass  # the replaced operator serves, or reports the error
            except (FlashtuneError, RuntimeError) as failure:
                _warn(failure)
            if entry is not None:
                keep(self.entries, key, entry)
        return entry

    def _entry(self, bound: BoundRequest, usual: str | None) -> Entry | None:
        request = bound.request
        properties = tuple(pass_.specialization for pass_ in bound.passes)
        key = BucketKey(request, properties, bound.gradients, bound.sharing, usual)
        device = self.devices.get(request.device)
        if device is None and not interpreting():
            if request.device in self.devices:
                return REFUSED
            # Extents are rounded, and kernels chosen, after the records are loaded.
            load = functools.partial(self._load, request.device)
            add = functools.partial(self._add_bucket, key)
            if request.device not in self.loading and self.worker.put(load, self.queue_limit):
                keep(self.loading, request.device, True)
            if key not in self.early and self.worker.put(add, self.queue_limit):
                keep(self.early, key, True)
            return None
        key = key._replace(request=rounded(request, device))
        bucket = self.buckets.get(key)
        if bucket is None:
            bucket = Bucket()
            if not self.worker.put(functools.partial(self._settle, key, bucket, device), self.queue_limit):
                return None
            keep(self.buckets, key, bucket)
        count = self.counted(_nothing, bound) if self.recordings else None
        return Entry(request, bucket, properties, count)

    def _add_bucket(self, key: BucketKey) -> None:
        """Prepares the kernels of calls that came before the tuned records were loaded."""
        device = self.devices.get(key.request.device)
        if device is None:
            return
        key = key._replace(request=rounded(key.request, device))
        with self.adding:
            if key in self.buckets:
                return
            bucket = Bucket()
            keep(self.buckets, key, bucket)
        self._settle(key, bucket, device)

    def _load(self, device: torch.device) -> None:
        """Loads the tuned records of a device. The replaced operators serve if that fails."""
        try:
            target = self.platform.target(device)
            keep(self.devices, device, TunedDevice(target, self.platform.records(target.name)))
        except Exception as failure:  # noqa: BLE001 (a call must not fail because another operator was tried)
            keep(self.devices, device, None)
            _warn(failure)

    def _settle(self, key: BucketKey, bucket: Bucket, device: TunedDevice | None) -> None:
        """Prepares the kernels of a bucket, unless the replaced operator is faster or they fail."""
        failure: Exception | None = None
        try:
            with self.worker.beside_captures(key.request.device):
                bucket.choices = choices_of(key, device, self.loader, self.compiler)
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

    def warm_up(self) -> None:
        """Does the slow parts of preparations ahead: imports, hashes of templates, records and the stream.

        They hold Python's lock, for which calls would wait.
        """
        try:
            if not self._has_bundle():
                for name in ("flashtune.verification.check", "triton.experimental.gluon.language"):
                    importlib.import_module(name)
            for family in families():
                current_versions(family.name)  # the hash of the template is cached
            if not torch.cuda.is_initialized():
                # Imports the modules that read any records.
                tuned_records(INTERPRETED_TARGET)
                return
            device = torch.device("cuda", torch.cuda.current_device())
            with self.worker.beside_captures(device):
                pass  # the stream exists now
            if device not in self.devices:
                self._load(device)
        except Exception as failure:  # noqa: BLE001 (the replaced operators serve)
            _warn(failure)

    def _has_bundle(self) -> bool:
        """Whether there is a bundle for the current GPU, or before CUDA is initialised for Hopper GPUs."""
        if not torch.cuda.is_initialized():
            return bool(bundle_paths(HOPPER, None))
        target = self.platform.target(torch.device("cuda", torch.cuda.current_device()))
        return bool(self.loader.bundles.of(target))

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until all queued kernels are prepared. Returns False if `timeout` (in s) ends first."""
        return self.worker.wait(timeout)


def _nothing() -> None:
    pass


def _warn(failure: Exception) -> None:
    warn_once("deferred", f"{REPLACED} serves, because kernels could not be prepared: {failure!r}")


SESSION = Session()
SESSION.recordings += recordings_of_process()


@contextlib.contextmanager
def record_calls(path: str | os.PathLike[str]) -> Iterator[None]:
    """Counts this process's calls of attention in the context, and merges the counts into a file.

    The file has problems (shapes, types and features), alignment and counts, and no tensor data. Many
    processes may use the same file. Shapes are prepared again after a recording starts or ends, so do not
    start or end one during the capture of a CUDA graph.

    Args:
        path: A file of JSON lines for `flashtune search --from`. A missing file is created.

    Raises:
        UsageError: The file has other content, or cannot be written.
    """
    recording = Recording(Path(path))
    SESSION.recordings.append(recording)
    SESSION.forget()
    try:
        yield
    finally:
        # An interrupted program's calls count too.
        SESSION.recordings.remove(recording)
        SESSION.forget()
        recording.write()
