"""Compiling on all cores: each candidate in a worker process, with a time limit."""

from __future__ import annotations

from concurrent.futures import Future
from types import TracebackType
from typing import Protocol, Self

import msgspec

from flashtune.core.errors import KernelError, MachineError
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.machine import tool_failed
from flashtune.core.problem import Problem
from flashtune.core.record import Digest, Outcome, Resources
from flashtune.core.target import Target
from flashtune.launch.compilation import load_module
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.binary.resources import Part, largest, occupancy, overflow, read_parts, read_sizes
from flashtune.tuner.candidates import Candidate, Scope
from flashtune.tuner.execution.machine_probe import fault_of, outside_fault, settle_after_probe, stopped
from flashtune.tuner.execution.processes import Lost, Workers, failure_of

COMPILE_SECONDS = 60.0
MAX_MESSAGE = 400
# What sentences call the process that compiles.
COMPILER = "a compiler process"


class Compiled(msgspec.Struct, frozen=True):
    """What compiling a candidate gave.

    Attributes:
        outcome: `ok`, `infeasible`, `compile_error` or `timeout`.
        kernel: Digest of the rendered kernel, where it was rendered.
        resources: What the compiler says of it, where it compiled.
        message: Why it is not `ok`.
        tool_failed: Whether a program that the compiler ran failed, which may be the machine's fault.
    """

    outcome: Outcome
    kernel: Digest | None = None
    resources: Resources | None = None
    message: str = ""
    tool_failed: bool = False


class Compiler(Protocol):
    """Compiles candidates, several at once."""

    def submit(self, scope: Scope, candidate: Candidate) -> Future[Compiled]:
        """Starts compiling; the future raises nothing but `MachineError`."""
        ...


class CompilePool:
    """Compiles candidates in worker processes, of one search after the other."""

    def __init__(self, workers: int, seconds: float = COMPILE_SECONDS, *, sizes_only: bool = False) -> None:
        """Starts no process yet.

        Args:
            workers: Worker processes.
            seconds: Time limit of a candidate.
            sizes_only: Whether to read shared and tensor memory alone, and to judge nothing.
        """
        self._seconds = seconds
        self._sizes_only = sizes_only
        self._workers = Workers(workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._workers.stop()

    def submit(self, scope: Scope, candidate: Candidate) -> Future[Compiled]:
        """Starts compiling; a crash or a hang of the compiler is an outcome like any other.

        After one of them, and after a tool that failed, a probe decides whether the machine or
        the candidate failed.
        """
        settled: Future[Compiled] = Future()
        self._start(scope, candidate, settled, again=True)
        return settled

    def _start(self, scope: Scope, candidate: Candidate, settled: Future[Compiled], *, again: bool) -> None:
        """Starts compiling, and once more `again` where the process died before it took the job."""

        def settle(job: Future[Compiled]) -> None:
            lost = failure_of(job)
            if self._workers.stopped:
                settled.cancel()
            elif lost is not None and not lost.taken and again:
                self._start(scope, candidate, settled, again=False)
            else:
                _settle(job, lost, scope.target, settled)

        arguments = (scope.problem, candidate, scope.specialization, scope.target)
        compiling = compile_sizes if self._sizes_only else compile_candidate
        try:
            job = self._workers.schedule(compiling, arguments, self._seconds)
        except MachineError as error:
            settled.set_exception(stopped(str(error)))
            return
        job.add_done_callback(settle)


def _settle(job: Future[Compiled], lost: Lost | None, target: Target, settled: Future[Compiled]) -> None:
    error = None if lost else job.exception()
    if lost is not None:
        outcome = Outcome.TIMEOUT if lost.timed_out else Outcome.COMPILE_ERROR
        compiled = Compiled(outcome, message=f"compiling {lost.words}")
        known = outside_fault(lost, COMPILER)
        if known:
            settled.set_exception(stopped(known))
        else:
            settle_after_probe(target, settled, lambda probe: fault_of(lost, probe, COMPILER), compiled)
    elif isinstance(error, MachineError):
        settled.set_exception(stopped(str(error)))
    elif error is not None:
        settled.set_exception(error)
    elif job.result().tool_failed:
        settle_after_probe(target, settled, lambda probe: probe.fault, job.result())
    else:
        settled.set_result(job.result())


def compile_candidate(
    problem: Problem, candidate: Candidate, specialization: Specialization, target: Target
) -> Compiled:
    """Renders and compiles a candidate here, and holds what it asks for against the target.

    Raises:
        MachineError: The machine cannot compile at all, as with a full disk.
    """
    family = find_family(candidate.family)
    return compile_kernel(render(family, problem, candidate.config, specialization), target)


def compile_sizes(
    problem: Problem, candidate: Candidate, specialization: Specialization, target: Target
) -> Compiled:
    """Renders and compiles a candidate here, and reads its shared and tensor memory alone.

    Raises:
        MachineError: As `compile_candidate`.
    """
    kernel = render(find_family(candidate.family), problem, candidate.config, specialization)
    try:
        return Compiled(Outcome.OK, kernel.digest, read_sizes(kernel, target))
    except MachineError:
        raise
    except KernelError as error:
        return _refused(kernel, error)


def compile_kernel(kernel: Kernel, target: Target) -> Compiled:
    """Compiles a rendered kernel here, and holds what it asks for against the target.

    Raises:
        MachineError: The machine cannot compile at all, as with a full disk.
    """
    # A cache that cannot be written is the machine's failure, not the candidate's.
    load_module(kernel)
    try:
        parts = read_parts(kernel, target)
    except MachineError:
        raise
    except KernelError as error:
        return _refused(kernel, error)
    misfit = next(filter(None, (_misfit(part, target) for part in parts)), "")
    outcome = Outcome.INFEASIBLE if misfit else Outcome.OK
    return Compiled(outcome, kernel.digest, largest(parts), misfit)


def _refused(kernel: Kernel, error: KernelError) -> Compiled:
    message = str(error)[:MAX_MESSAGE]
    return Compiled(Outcome.COMPILE_ERROR, kernel.digest, message=message, tool_failed=tool_failed(error))


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
