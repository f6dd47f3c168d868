"""Jobs of `flashtune verify` in worker processes: compile, run on the GPU, run in the interpreter.

`Runs` starts them, up to a time limit or a signal.

Modules that import Triton are imported in functions, after an interpreter worker has set `TRITON_INTERPRET`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from pebble import ProcessPool

from flashtune.core.errors import KernelError, MachineError, VerificationError
from flashtune.tuner.execution.processes import import_safely, started, stop_pool

if TYPE_CHECKING:
    import torch

    from flashtune.core.config import Config
    from flashtune.core.kernel import Kernel, Specialization
    from flashtune.core.problem import Problem
    from flashtune.core.record import Measurement, Record, Resources, Verdict
    from flashtune.core.target import Target
    from flashtune.db.codec import Check

COMPILE_SECONDS = 120.0
# Several processes share the GPU.
GPU_SECONDS = 900.0
# Only for hangs: the largest head dims take minutes, and several times that on a busy machine.
INTERPRETER_SECONDS = 1800.0
BROKEN_CONTEXT = 70
# A process that holds more GPU memory than this frees the cached tensors of earlier checks.
MAX_RESERVED_BYTES = 6 * 2**30

# Interval of checks for the time limit and for signals.
POLL_SECONDS = 0.2

Progress = Callable[[str, int, int], None]
Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class Subject(msgspec.Struct, frozen=True):
    """A record to verify, its target, and its kernel as rendered here."""

    record: Record
    target: Target
    kernel: Kernel


class Interpretable(msgspec.Struct, frozen=True):
    """The inputs that determine a kernel in the interpreter."""

    family: str
    problem: Problem
    config: Config
    specialization: Specialization
    target: Target


def start_interpreters(workers: int) -> ProcessPool:
    """Returns a pool of new processes with Triton's interpreter, which must be selected before the import."""
    import_safely()
    context = multiprocessing.get_context("spawn")
    return started(ProcessPool(max_workers=workers, context=context, initializer=_become_interpreter))


def _become_interpreter() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    # Every worker has one core: several numpy threads would spin at each small product.
    os.environ["OMP_NUM_THREADS"] = "1"
    import numpy as np
    import torch

    torch.set_num_threads(1)
    # Kernels divide by zero and subtract infinities in rows without visible keys. The results are compared.
    np.seterr(divide="ignore", invalid="ignore")


def why_not_compiled(kernel: Kernel, target: Target) -> str:
    """Compiles a kernel for a target, and returns why it cannot run there; empty if it can."""
    from flashtune.tuner.binary.resources import overflow, read_sizes

    try:
        return overflow(read_sizes(kernel, target), target)
    except MachineError:
        raise
    except KernelError as error:
        return f"does not compile: {error}"


def check_interpreted(task: Interpretable) -> Verdict:
    """Compares a kernel with the reference on the CPU, in float32 and at small sizes."""
    import torch

    from flashtune.launch.compilation import interpreting
    from flashtune.templates.registry import find_family
    from flashtune.verification.cases import Level
    from flashtune.verification.check import check_kernel

    if not interpreting():
        raise VerificationError(
            "Triton was imported before its interpreter was enabled: run flashtune verify in its own process"
        )
    family = find_family(task.family)
    cpu = torch.device("cpu")
    return check_kernel(family, task.problem, task.config, task.specialization, task.target, cpu, Level.QUICK)


def check_on_gpu(kernel: Kernel, record: Record, index: int) -> Check:
    """Verifies a record's own kernel or its sibling on a GPU, at the record's shape.

    A kernel with explicit synchronisation is also verified with schedule fuzzing. Its verdict then has the
    probe `delays`.
    """
    import torch

    from flashtune.core.target import device_target
    from flashtune.db.codec import Check
    from flashtune.dispatch.versions import current_versions
    from flashtune.verification.check import check_delayed, check_rendered, joined

    assert record.config is not None
    config = record.config
    target, device = device_target(index), torch.device("cuda", index)
    with _whole_context(device):
        verdict = with_memory(lambda: check_rendered(kernel, record.problem, config, target, device), device)
        late = check_delayed(kernel, record.problem, config, target, device) if verdict.passed else None
    if late is not None:
        verdict = joined([verdict, late])
    return Check(
        digest=kernel.digest, target=target.name, versions=current_versions(record.family), verdict=verdict
    )


def with_memory(check: Callable[[], Verdict], device: torch.device) -> Verdict:
    """Returns the verdict of a check. If memory is short, this process's cached tensors are freed."""
    import torch

    from flashtune.tuner.execution.processes import lacked_memory
    from flashtune.verification.passes import forget

    if torch.cuda.memory_reserved(device) > MAX_RESERVED_BYTES:
        # Other processes check kernels on the same GPU.
        forget()
        torch.cuda.empty_cache()
    try:
        return check()
    except KernelError as error:
        if not lacked_memory(str(error)):
            raise
    # This is outside of `except`, because a traceback would hold the tensors of the failed check.
    forget()
    torch.cuda.empty_cache()
    return check()


def read_compiled(kernel: Kernel, target: Target) -> Resources:
    """Returns the resources of a kernel that a search would launch."""
    from flashtune.tuner.execution.compile_pool import compile_kernel

    compiled = compile_kernel(kernel, target)
    if compiled.resources is None or compiled.message:
        raise KernelError(compiled.message)
    return compiled.resources


def time_on_gpu(record: Record, index: int) -> Measurement:
    """Times a record's kernel on a GPU, with baselines in the same run."""
    import torch

    from flashtune.core.target import device_target
    from flashtune.tuner.candidates import Candidate
    from flashtune.tuner.execution.gpu_jobs import prepare
    from flashtune.tuner.execution.timed_runs import run_finals

    assert record.config is not None
    prepare(index)
    device = torch.device("cuda", index)
    candidate, target = Candidate(record.family, record.config), device_target(index)
    with _whole_context(device):
        (measurement,) = run_finals(record.problem, (candidate,), record.specialization, target, device)
    return measurement


@contextlib.contextmanager
def _whole_context(device: torch.device) -> Iterator[None]:
    """Ends this process after an error that broke the CUDA context."""
    import torch

    from flashtune.launch.compilation import first_line

    try:
        yield
    except (KernelError, RuntimeError) as error:
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            os._exit(BROKEN_CONTEXT)
        if isinstance(error, KernelError):
            raise
        raise KernelError(first_line(error)) from error


def failure(job: Future[Any]) -> str:
    """Returns why a job has no result; empty if it has one."""
    from flashtune.tuner.execution.processes import failure_of

    lost = failure_of(job)
    if lost is not None:
        return lost[1]
    error = job.exception()
    if error is not None and (isinstance(error, MachineError) or not isinstance(error, KernelError)):
        raise error
    return str(error) if error else ""


class Runs:
    """Runs jobs in worker processes until a time limit or a call of `stop`.

    Attributes:
        stopped: Whether `stop` was called.
        error: The error that ended the run, with `hold_errors`.
    """

    def __init__(
        self,
        seconds: float | None = None,
        progress: Progress = lambda phase, done, total: None,
        *,
        hold_errors: bool = False,
    ) -> None:
        """Sets the limit.

        Args:
            seconds: Time limit from now on, in seconds; None for no limit.
            progress: Called with the phase, the number of finished jobs and the total.
            hold_errors: Whether an error that is not a job's result ends the run and becomes `error`. The
                caller can then store the results so far, and must raise the error.
        """
        self._end = None if seconds is None else time.monotonic() + seconds
        self._progress = progress
        self._holds_errors = hold_errors
        self.stopped = False
        self.error: Exception | None = None

    def stop(self) -> None:
        """Ends the run. Unfinished jobs are dropped."""
        self.stopped = True

    @property
    def ended(self) -> bool:
        """Returns whether the time limit is over, `stop` was called or an error is held."""
        late = self._end is not None and time.monotonic() >= self._end
        return late or self.stopped or self.error is not None

    def run(
        self,
        phase: str,
        start: Callable[[], ProcessPool],
        function: Callable[..., Any],
        jobs: Mapping[Key, tuple[Any, ...]],
        seconds: float,
        devices: Sequence[int] = (),
    ) -> dict[Key, tuple[str, Any]]:
        """Calls a function for each job in a pool of processes.

        With GPUs, each has a pool and an equal part of the jobs. Their last argument is then its index.

        Returns:
            For each finished job: why it has no result, empty if it has one, and the result. Unfinished jobs
            are left out.
        """
        if not jobs or self.ended:
            return {}
        pools: list[ProcessPool] = []
        try:
            for _ in devices or (None,):
                pool = self._held(start)
                if pool is None:
                    return {}
                pools.append(pool)
            futures: dict[Key, Future[Any]] = {}
            for number, (key, job) in enumerate(jobs.items()):
                part = number * len(pools) // len(jobs)
                own = (*job, *devices[part : part + 1])
                futures[key] = pools[part].schedule(function, args=own, timeout=seconds)
            pending: set[Future[Any]] = set(futures.values())
            while pending and not self.ended:
                finished, pending = wait(pending, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                for ended in finished:
                    self._result(ended)
                self._progress(phase, len(futures) - len(pending), len(futures))
            results = {key: self._result(future) for key, future in futures.items() if future.done()}
            return {key: result for key, result in results.items() if result is not None}
        finally:
            for pool in pools:
                stop_pool(pool)

    def _result(self, job: Future[Any]) -> tuple[str, Any] | None:
        """Returns why a job has no result, and its result; None after a held error."""
        lost = self._held(lambda: failure(job))
        return None if lost is None else (lost, None if lost else job.result())

    def _held(self, call: Callable[[], Result]) -> Result | None:
        """Returns the result of a call; None if it raised an error that is held."""
        try:
            return call()
        except Exception as error:
            if not self._holds_errors:
                raise
            self.error = self.error or error
            return None


@contextlib.contextmanager
def stopped_by_signals(runs: Runs) -> Iterator[None]:
    """Makes SIGINT and SIGTERM stop a run instead of the program. A second signal ends the program."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def stop(*_: object) -> None:
        restore()
        runs.stop()

    for number in handlers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore()
