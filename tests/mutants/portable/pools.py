"""Processes for compilation or the GPU: a process that hangs or dies is replaced."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

from pebble import ProcessPool

from flashtune.core.kernel import Kernel
from flashtune.core.target import Target
from flashtune.launch.compilation import first_line
from flashtune.tuner.execution.cpus import available_cpus
from flashtune.tuner.execution.processes import failure_of, start_pool, stop_pool
from flashtune.verification.cases import Level
from flashtune.verification.schedule_fuzzing import delayed
from tests.mutants import jobs
from tests.mutants.core import Subject

COMPILE_SECONDS = 120.0
START_SECONDS = 120.0
# A process among others shares the GPU with them.
SHARED_SECONDS = 30.0
# A kernel whose warps fall behind is compiled where it is checked, unless that was done before.
LATE_SECONDS = 60.0
WORKERS = 4


class Plan(NamedTuple):
    """How kernels are run."""

    target: Target  # The GPU.
    seed: int  # Of the inputs.
    deadline: float  # When to stop, by `time.monotonic`.
    workers: int = WORKERS  # Processes that share the GPU.

    @property
    def over(self) -> bool:
        """Whether time is up."""
        return time.monotonic() > self.deadline


class Compiling(NamedTuple):
    """Compilations under way, by the kernel's digest; each ends in what is wrong, or nothing."""

    jobs: dict[str, Future[str]]

    def failure(self, kernel: Kernel) -> str:
        """Waits for a kernel; why it did not compile, or nothing."""
        job = self.jobs[kernel.digest]
        lost = ended(job)
        return f"compiling {lost}" if lost else job.result()


@contextlib.contextmanager
def compiling(kernels: Iterable[Kernel], plan: Plan) -> Iterator[Compiling]:
    """Starts to compile kernels, in their order, on all cores but those of the GPU's processes.

    A kernel that does not fit the GPU counts as not compiled, since a search would not launch it.
    """
    pool = start_pool(max(1, available_cpus() - plan.workers))
    try:
        distinct = {kernel.digest: kernel for kernel in kernels}
        yield Compiling(
            {
                digest: pool.schedule(
                    jobs.compile_fitting, args=(kernel, plan.target), timeout=COMPILE_SECONDS
                )
                for digest, kernel in distinct.items()
            }
        )
    finally:
        stop_pool(pool)


@contextlib.contextmanager
def on_the_gpu(workers: int) -> Iterator[ProcessPool]:
    """Processes that have taken the GPU.

    Raises:
        RuntimeError: The GPU cannot be reached.
    """
    pool = start_pool(workers)
    try:
        take_gpu(pool, workers)
        yield pool
    finally:
        stop_pool(pool)


def take_gpu(pool: ProcessPool, workers: int = 1) -> None:
    """Waits until as many processes have the GPU.

    Raises:
        RuntimeError: It cannot be reached.
    """
    for job in [pool.schedule(jobs.warm, timeout=START_SECONDS) for _ in range(workers)]:
        lost = ended(job)
        if lost:
            raise RuntimeError(f"the GPU cannot be used: {lost}")


def ended(job: Future[Any]) -> str:
    """Waits for a job; how its process was lost or what it raised, or nothing."""
    error = job.exception()
    lost = failure_of(job)
    return lost[1] if lost else first_line(error) if error else ""


def checking(
    pool: ProcessPool, subject: Subject, kernel: Kernel, seed: int, seconds: float = SHARED_SECONDS
) -> Future[jobs.Checked]:
    """Starts to verify a kernel at its subject's problem."""
    arguments = (kernel, subject.problem, subject.config, Level.FULL, seed)
    job: Future[jobs.Checked] = pool.schedule(jobs.check, args=arguments, timeout=seconds)
    return job


def checking_late(pool: ProcessPool, subject: Subject, kernel: Kernel, seed: int) -> Future[jobs.Checked]:
    """Starts to verify a kernel with warps that fall behind."""
    arguments = (kernel, subject.problem, subject.config, seed)
    job: Future[jobs.Checked] = pool.schedule(jobs.check_late, args=arguments, timeout=LATE_SECONDS)
    return job


def with_late(kernels: Iterable[Kernel]) -> Iterator[Kernel]:
    """Kernels, each followed by itself with warps that fall behind where it has barriers of its own."""
    for kernel in kernels:
        yield kernel
        late = delayed(kernel)
        if late is not None:
            yield late
