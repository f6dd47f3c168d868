"""Compilers and GPUs of a Ray cluster.

Each node compiles with a `CompilePool`, and each GPU has a `GpuWorker`, in processes of Ray. A kernel that
crashes or hangs is therefore handled on its node as in a local search. Compiled kernels travel to the node of
the GPU as files of Triton's cache.
"""

import asyncio
import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from flashtune.core.errors import MachineError
from flashtune.core.machine import triton_folder
from flashtune.core.record import Measurement, Outcome, Provenance, Versions
from flashtune.core.target import Target, device_target, device_uuid
from flashtune.dispatch.versions import current_versions
from flashtune.templates.registry import family_names, find_family
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution.compile_pool import Compiled, CompilePool
from flashtune.tuner.execution.compiled_files import pack_files, unpack_files
from flashtune.tuner.execution.evaluation import DeviceLostError, Evaluation, MachineCode
from flashtune.tuner.execution.gpu_worker import GpuWorker
from flashtune.tuner.execution.processes import NOTHING_LOST
from flashtune.verification.schedule_fuzzing import delayed

# A lost process imports torch before it is back.
RESTART_SECONDS = 60.0
RETRY_SECONDS = 0.5
# At most so many kernels have files kept for GPUs. The node of a GPU compiles a kernel without files.
MAX_KEPT = 1000


class Identity(msgspec.Struct, frozen=True):
    """The GPU and the installed versions of a node."""

    target: Target | None  # None without a GPU.
    versions: dict[str, Versions]  # By family.
    gpu_uuid: str | None = None


def identity(device: int | None) -> Identity:
    """Returns the identity of this machine, and of one of its GPUs."""
    versions = {name: current_versions(name) for name in family_names()}
    if device is None:
        return Identity(None, versions)
    return Identity(device_target(device), versions, device_uuid(device))


class CompileNode:
    """Compiles candidates in several processes of a node. A class of Ray's actors."""

    def __init__(self, width: int) -> None:
        self._pool = CompilePool(width)
        self._pool.start()

    def identity(self) -> Identity:
        """Returns the versions of this node."""
        return identity(None)

    async def compile(self, task: SearchTask, candidate: Candidate) -> tuple[Compiled, bytes]:
        """Returns the result of a compilation, and the files of the kernel."""
        compiled = await asyncio.wrap_future(self._pool.submit(task, candidate))
        if compiled.outcome is not Outcome.OK:
            return compiled, b""
        return compiled, await asyncio.to_thread(_files_of, task, candidate)

    async def compile_delayed(self, task: SearchTask, candidate: Candidate) -> bytes:
        """Returns the files of a kernel with random delays, or nothing if there is none."""
        if not await asyncio.wrap_future(self._pool.compile_delayed(task, candidate)):
            return b""
        return await asyncio.to_thread(_files_of, task, candidate, late=True)


def _files_of(task: SearchTask, candidate: Candidate, *, late: bool = False) -> bytes:
    """Returns the files of a compiled candidate, with `late` those of its kernel with random delays."""
    kernel = render(find_family(candidate.family), task.problem, candidate.config, task.specialization)
    chosen = delayed(kernel) if late else kernel
    return b"" if chosen is None else pack_files(chosen, task.target)


class GpuNode:
    """Verifies and times candidates on one GPU. A class of Ray's actors."""

    def __init__(self) -> None:
        # Ray makes one GPU visible to the process.
        self._worker = GpuWorker(0)

    def identity(self) -> Identity:
        """Returns the GPU and the versions of this node."""
        return identity(0)

    def warm_up(self, task: SearchTask, candidate: Candidate) -> None:
        """Prepares the GPU for a problem."""
        self._worker.warm_up(task, candidate)

    async def evaluate(
        self,
        task: SearchTask,
        candidate: Candidate,
        compiled: Compiled,
        drop_above_ms: float | None,
        files: bytes,
    ) -> Evaluation:
        """Verifies and times a candidate."""
        await asyncio.to_thread(_receive, files)
        return await asyncio.wrap_future(self._worker.evaluate(task, candidate, compiled, drop_above_ms))

    async def finals(
        self, task: SearchTask, candidates: tuple[Candidate, ...], closest_seconds: float
    ) -> tuple[Measurement, ...]:
        """Times the finalists."""
        return await asyncio.wrap_future(self._worker.finals(task, candidates, closest_seconds))

    async def evaluate_delayed(
        self, task: SearchTask, candidate: Candidate, files: bytes
    ) -> Evaluation | None:
        """Verifies a candidate with random delays."""
        await asyncio.to_thread(_receive, files)
        return await asyncio.wrap_future(self._worker.evaluate_delayed(task, candidate))

    async def machine_code(self, task: SearchTask, candidate: Candidate) -> MachineCode:
        """Returns the machine code of a candidate."""
        return await asyncio.wrap_future(self._worker.machine_code(task, candidate))


def _receive(files: bytes) -> None:
    """Adds the files of a compiled kernel to this node's cache."""
    if files:
        unpack_files(files, triton_folder())


class RayCompiler:
    """Compiles on the nodes of a cluster, each candidate on the node with the largest free share.

    Attributes:
        width: The number of processes on all nodes.
    """

    def __init__(self, nodes: dict[Any, int]) -> None:
        """Takes the actors of `CompileNode` and the number of processes of each."""
        self.width = sum(nodes.values())
        self._nodes = nodes
        self._running = dict.fromkeys(nodes, 0)
        self._lock = threading.Lock()
        # Ray's references to the files of kernels, without and with random delays.
        self._files: dict[tuple[SearchTask, Candidate], Any] = {}
        self._late: dict[tuple[SearchTask, Candidate], Any] = {}

    def submit(self, scope: SearchTask, candidate: Candidate) -> Future[Compiled]:
        """Starts compiling. If the process of the node is lost, the compilation is started again."""
        task = _without_spaces(scope)

        def start() -> Any:
            node = self._take()
            compiled, files = node.compile.options(num_returns=2).remote(task, candidate)
            self._keep(self._files, (task, candidate), files)
            compiled.future().add_done_callback(lambda _: self._give_back(node))
            return compiled

        return _called(start, MachineError(f"the cluster's compilers were lost; {NOTHING_LOST}"))

    def compile_delayed(self, scope: SearchTask, candidate: Candidate) -> Any:
        """Starts compiling a candidate with random delays, once, and returns Ray's reference to its files."""
        key = _without_spaces(scope), candidate
        if key not in self._late:
            node = self._take()
            files = node.compile_delayed.remote(*key)
            self._keep(self._late, key, files)
            files.future().add_done_callback(lambda _: self._give_back(node))
            return files
        return self._late[key]

    def take_files(self, scope: SearchTask, candidate: Candidate) -> Any:
        """Returns Ray's reference to the files of a compiled candidate once, then no files."""
        return self._files.pop((_without_spaces(scope), candidate), b"")

    def _keep(self, kept: dict[tuple[SearchTask, Candidate], Any], key: Any, files: Any) -> None:
        with self._lock:
            kept[key] = files
            if len(kept) > MAX_KEPT:
                del kept[next(iter(kept))]

    def _take(self) -> Any:
        with self._lock:
            node = min(self._nodes, key=lambda node: self._running[node] / self._nodes[node])
            self._running[node] += 1
        return node

    def _give_back(self, node: Any) -> None:
        with self._lock:
            self._running[node] -= 1


class RayMeasurer:
    """A `Measurer` that uses the GPU of a `GpuNode`."""

    provenance = Provenance.MEASURED

    def __init__(self, node: Any, compiler: RayCompiler, name: str, gpu_uuid: str | None = None) -> None:
        """`name` is the name of the GPU in messages."""
        self._node = node
        self._compiler = compiler
        self._name = name
        self.gpu_uuid = gpu_uuid

    def warm_up(self, scope: SearchTask, candidate: Candidate) -> None:
        """Prepares the GPU while the first candidates compile."""
        self._node.warm_up.remote(_without_spaces(scope), candidate)

    def evaluate(
        self, scope: SearchTask, candidate: Candidate, compiled: Compiled, drop_above_ms: float | None
    ) -> Future[Evaluation]:
        """Queues a candidate for verification and measurement."""
        files = self._compiler.take_files(scope, candidate)
        return self._call("evaluate", scope, candidate, compiled, drop_above_ms, files=files)

    def finals(
        self, scope: SearchTask, candidates: tuple[Candidate, ...], closest_seconds: float
    ) -> Future[tuple[Measurement, ...]]:
        """Queues the finals."""
        return self._call("finals", scope, candidates, closest_seconds)

    def evaluate_delayed(self, scope: SearchTask, candidate: Candidate) -> Future[Evaluation | None]:
        """Queues a candidate for verification with random delays, after its compilation."""
        files = self._compiler.compile_delayed(scope, candidate)
        return self._call("evaluate_delayed", scope, candidate, files=files)

    def machine_code(self, scope: SearchTask, candidate: Candidate) -> Future[MachineCode]:
        """Queues the making of an entry of a bundle."""
        return self._call("machine_code", scope, candidate)

    def _call(self, method: str, scope: SearchTask, *arguments: Any, **files: Any) -> Future[Any]:
        """Calls a method of the node. If its process is lost, Ray restarts it, and the call is repeated.

        Repeated calls have no files, which may be lost too. The node then compiles the kernel.
        """
        lost = DeviceLostError(f"{self._name} cannot be used (its process was lost): {NOTHING_LOST}")
        calls = itertools.chain([files], itertools.repeat(dict.fromkeys(files, b"")))
        task, function = _without_spaces(scope), getattr(self._node, method)
        return _called(lambda: function.remote(task, *arguments, **next(calls)), lost)


def _called(start: Callable[[], Any], lost: Exception) -> Future[Any]:
    """Returns the result of a call of a process, which is repeated while Ray restarts that process.

    Args:
        start: Starts the call, and returns Ray's reference to its result.
        lost: The error if the process is not back after `RESTART_SECONDS`.
    """
    settled: Future[Any] = Future()
    ends: list[float] = []

    def call() -> None:
        if settled.done():
            return
        try:
            reference = start()
        except Exception as error:  # noqa: BLE001 - raised where the result is used
            end(error)
        else:
            reference.future().add_done_callback(settle)
            settled.add_done_callback(functools.partial(_cancel, reference))

    def settle(job: Future[Any]) -> None:
        error = job.exception()
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, (RayActorError, ObjectLostError)) and not settled.done():
            ends.append(time.monotonic() + RESTART_SECONDS)
            if time.monotonic() < ends[0]:
                threading.Timer(RETRY_SECONDS, call).start()
                return
        end(cause, None if error else job.result())

    def end(cause: BaseException | None, result: Any = None) -> None:
        if settled.done() or not settled.set_running_or_notify_cancel():
            return
        if cause is None:
            settled.set_result(result)
        else:
            settled.set_exception(lost if isinstance(cause, RayError) else cause)

    call()
    return settled


def _cancel(reference: Any, settled: Future[Any]) -> None:
    """Cancels a call of Ray if its future was cancelled."""
    # After the end of the connection, Ray would start a cluster.
    if settled.cancelled() and ray.is_initialized():
        # The call has ended already if its process is lost.
        with contextlib.suppress(RayError):
            ray.cancel(reference)


def _without_spaces(scope: SearchTask) -> SearchTask:
    """Returns a task without its search spaces, which nodes do not need."""
    return msgspec.structs.replace(scope, spaces=())
