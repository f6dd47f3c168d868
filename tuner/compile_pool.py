"""Compiling on all cores: each candidate in a worker process, with a time limit."""

from __future__ import annotations

from concurrent.futures import Future
from types import TracebackType
from typing import Protocol, Self

import msgspec

from flashtune.compilation import load_module
from flashtune.errors import KernelError
from flashtune.kernel import Kernel, Specialization
from flashtune.problem import Problem
from flashtune.record import Digest, Outcome, Resources
from flashtune.target import Target
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import Candidate, Scope
from flashtune.tuner.processes import failure_of, start_pool, stop_pool
from flashtune.tuner.resources import Part, largest, occupancy, overflow, read_parts

COMPILE_SECONDS = 60.0
MAX_MESSAGE = 400


class Compiled(msgspec.Struct, frozen=True):
    """What compiling a candidate gave.

    Attributes:
        outcome: `ok`, `infeasible`, `compile_error` or `timeout`.
        kernel: Digest of the rendered kernel, where it was rendered.
        resources: What the compiler says of it, where it compiled.
        message: Why it is not `ok`.
    """

    outcome: Outcome
    kernel: Digest | None = None
    resources: Resources | None = None
    message: str = ""


class Compiler(Protocol):
    """Compiles candidates, several at once."""

    def submit(self, scope: Scope, candidate: Candidate) -> Future[Compiled]:
        """Starts compiling; the future never raises for a candidate's failure."""
        ...


class CompilePool:
    """Compiles candidates in worker processes, of one search after the other."""

    def __init__(self, workers: int, seconds: float = COMPILE_SECONDS) -> None:
        self._seconds = seconds
        self._workers = workers
        self._pool = start_pool(workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop_pool(self._pool)

    def submit(self, scope: Scope, candidate: Candidate) -> Future[Compiled]:
        """Starts compiling; a crash or a hang of the compiler is an outcome like any other."""
        if not self._pool.active:
            # All workers died at once, as by an out-of-memory killer.
            stop_pool(self._pool)
            self._pool = start_pool(self._workers)
        job = self._pool.schedule(
            compile_candidate,
            args=(scope.problem, candidate, scope.specialization, scope.target),
            timeout=self._seconds,
        )
        settled: Future[Compiled] = Future()
        job.add_done_callback(lambda done: _settle(done, settled))
        return settled


def _settle(job: Future[Compiled], settled: Future[Compiled]) -> None:
    failure = failure_of(job)
    if failure is not None:
        timed_out, words = failure
        outcome = Outcome.TIMEOUT if timed_out else Outcome.COMPILE_ERROR
        settled.set_result(Compiled(outcome, message=f"compiling {words}"))
        return
    error = job.exception()
    if error is not None:
        settled.set_exception(error)
    else:
        settled.set_result(job.result())


def compile_candidate(
    problem: Problem, candidate: Candidate, specialization: Specialization, target: Target
) -> Compiled:
    """Renders and compiles a candidate here, and holds what it asks for against the target.

    Raises:
        FlashtuneError: The machine cannot compile at all, as with a full disk.
    """
    family = find_family(candidate.family)
    return compile_kernel(render(family, problem, candidate.config, specialization), target)


def compile_kernel(kernel: Kernel, target: Target) -> Compiled:
    """Compiles a rendered kernel here, and holds what it asks for against the target.

    Raises:
        FlashtuneError: The machine cannot compile at all, as with a full disk.
    """
    # A cache that cannot be written is the machine's failure, not the candidate's.
    load_module(kernel)
    try:
        parts = read_parts(kernel, target)
    except KernelError as error:
        return Compiled(Outcome.COMPILE_ERROR, kernel.digest, message=str(error)[:MAX_MESSAGE])
    misfit = next(filter(None, (_misfit(part, target) for part in parts)), "")
    outcome = Outcome.INFEASIBLE if misfit else Outcome.OK
    return Compiled(outcome, kernel.digest, largest(parts), misfit)


def _misfit(part: Part, target: Target) -> str:
    """What rules a compiled kernel out before it is launched, empty if nothing does."""
    resources, options, flaw = part
    over = overflow(resources, target) or flaw
    if over:
        return over
    resident = occupancy(resources, options, target)
    if resident.blocks == 0:
        return f"not one block fits a multiprocessor of {target.name}: too much of its {resident.limit}"
    if resources.serialized_wgmma:
        # Such kernels run at a fraction of the speed; measuring them costs more than it can tell.
        return "ptxas serialised the matrix instructions"
    return ""
