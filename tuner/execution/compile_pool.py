"""Compilation of candidates in worker processes, with a time limit."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Protocol, Self

import msgspec

from flashtune.core.errors import KernelError, MachineError
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.machine import machine_errors, tool_failed
from flashtune.core.problem import Problem
from flashtune.core.record import Digest, Outcome, Resources
from flashtune.core.target import Target
from flashtune.launch.compilation import load_module
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.binary.resources import Part, combined, misfit, read_parts, read_sizes
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution.machine_probe import fault_of, outside_fault, settle_after_probe
from flashtune.tuner.execution.processes import LostJob, Workers, failure_of, stopped
from flashtune.verification.schedule_fuzzing import delayed

COMPILE_SECONDS = 60.0
MAX_MESSAGE = 400
# Name of a compiling process in messages.
COMPILER = "a compiler process"


class Compiled(msgspec.Struct, frozen=True):
    """The result of compiling a candidate."""

    outcome: Outcome  # `ok`, `infeasible`, `compile_error` or `timeout`.
    kernel: Digest | None = None  # Digest of the rendered kernel, if it was rendered.
    resources: Resources | None = None  # The compiler's report, if it compiled.
    message: str = ""  # Why it is not `ok`.
    # Whether a program that the compiler ran failed, possibly because of the machine.
    tool_failed: bool = False


class Compiler(Protocol):
    """Compiles candidates, several at once."""

    def submit(self, scope: SearchTask, candidate: Candidate) -> Future[Compiled]:
        """Starts compiling. The future raises only `MachineError`."""
        ...


class SearchCompiler(Compiler, Protocol):
    """The compiler of a search."""

    @property
    def width(self) -> int:
        """Returns the number of candidates that the search may compile at once."""
        ...

    def compile_delayed(self, scope: SearchTask, candidate: Candidate) -> object:
        """Compiles a candidate with random delays into Triton's cache. Does not wait."""
        ...


class CompilePool:
    """Compiles candidates in worker processes. Several searches can use one pool, in turn or at once.

    Attributes:
        width: The number of processes.
    """

    def __init__(self, workers: int, seconds: float = COMPILE_SECONDS, *, sizes_only: bool = False) -> None:
        """Makes the pool. The first candidate starts the processes.

        `seconds` is the time limit of a candidate. `sizes_only` reads only shared and tensor memory, and
        rejects no kernel.
        """
        self._seconds = seconds
        self._sizes_only = sizes_only
        self.width = workers
        self._workers = Workers(workers)
        self._delayed: dict[tuple[Problem, Candidate, Specialization], Future[bool]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._workers.stop()

    def submit(self, scope: SearchTask, candidate: Candidate) -> Future[Compiled]:
        """Starts compiling. A crash or a hang of the compiler is an outcome too.

        A crash and a failed tool are tried once more. If it fails again, or after a hang, a probe decides
        whether the machine or the candidate is the cause.
        """
        settled: Future[Compiled] = Future()
        self._start(scope, candidate, settled, again=True)
        return settled

    def compile_delayed(self, scope: SearchTask, candidate: Candidate) -> Future[bool]:
        """Compiles a candidate with random delays into Triton's cache. Errors recur in its verification.

        Returns:
            Whether there is such a kernel.
        """
        key = scope.problem, candidate, scope.specialization
        if key not in self._delayed:
            arguments = (scope.problem, candidate, scope.specialization, scope.target)
            self._delayed[key] = self._workers.schedule(build_late, arguments, self._seconds)
        return self._delayed[key]

    def start(self) -> None:
        """Starts the processes without waiting for them."""
        self._workers.start()

    def _start(
        self, scope: SearchTask, candidate: Candidate, settled: Future[Compiled], *, again: bool
    ) -> None:
        """Starts compiling. With `again`, a failure that the machine may have caused is tried once more."""

        def settle(job: Future[Compiled]) -> None:
            lost = failure_of(job)
            if again and _may_pass(job, lost):
                self._start(scope, candidate, settled, again=False)
            else:
                _settle(job, lost, scope.target, settled)

        arguments = (scope.problem, candidate, scope.specialization, scope.target)
        compiling = compile_sizes if self._sizes_only else compile_candidate
        self._workers.supervise(compiling, arguments, self._seconds, settled, settle)


class CompilerShare:
    """The share of one of several searches in a pool, so that none of them fills the pool's queue."""

    def __init__(self, pool: SearchCompiler, searches: Callable[[], int]) -> None:
        """`searches` returns the number of running searches, which share the pool equally."""
        self._pool = pool
        self._searches = searches
        self.submit = pool.submit
        self.compile_delayed = pool.compile_delayed

    @property
    def width(self) -> int:
        """Returns the share, rounded up."""
        return math.ceil(self._pool.width / max(1, self._searches()))


def _may_pass(job: Future[Compiled], lost: LostJob | None) -> bool:
    """Returns whether a failure may be the machine's, and another attempt may succeed."""
    if lost is not None:
        return not (lost.timed_out or outside_fault(lost, COMPILER))
    return job.exception() is None and job.result().tool_failed


def _settle(job: Future[Compiled], lost: LostJob | None, target: Target, settled: Future[Compiled]) -> None:
    error = None if lost else job.exception()
    if lost is not None:
        outcome = Outcome.TIMEOUT if lost.timed_out else Outcome.COMPILE_ERROR
        compiled = Compiled(outcome, message=f"compiling {lost.words}")
        fault = outside_fault(lost, COMPILER)
        if fault:
            settled.set_exception(stopped(fault))
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
    """Renders and compiles a candidate in this process, and checks that it fits the target."""
    family = find_family(candidate.family)
    return compile_kernel(render(family, problem, candidate.config, specialization), target)


def compile_sizes(
    problem: Problem, candidate: Candidate, specialization: Specialization, target: Target
) -> Compiled:
    """Renders and compiles a candidate in this process, and reads only its shared and tensor memory."""
    kernel = render(find_family(candidate.family), problem, candidate.config, specialization)
    try:
        return Compiled(Outcome.OK, kernel.digest, read_sizes(kernel, target))
    except MachineError:
        raise
    except KernelError as error:
        return _refused(kernel, error)


def compile_kernel(kernel: Kernel, target: Target) -> Compiled:
    """Compiles a rendered kernel in this process, and checks that it fits the target."""
    # Outside of `try`: if the cache cannot be written, the candidate is not the cause.
    load_module(kernel)
    try:
        parts = read_parts(kernel, target)
    except MachineError:
        raise
    except KernelError as error:
        return _refused(kernel, error)
    reason = next(filter(None, (_infeasible(part, target) for part in parts)), "")
    outcome = Outcome.INFEASIBLE if reason else Outcome.OK
    return Compiled(outcome, kernel.digest, combined(parts), reason)


@machine_errors()
def build_late(
    problem: Problem, candidate: Candidate, specialization: Specialization, target: Target
) -> bool:
    """Compiles a candidate with random delays, and returns whether that kernel can be launched.

    It cannot if the kernel has no explicit synchronisation, or if the kernel with delays does not compile
    or fit. Neither is a failure of the candidate.
    """
    late = delayed(render(find_family(candidate.family), problem, candidate.config, specialization))
    return late is not None and compile_kernel(late, target).outcome is Outcome.OK


def _refused(kernel: Kernel, error: KernelError) -> Compiled:
    message = str(error)[:MAX_MESSAGE]
    return Compiled(Outcome.COMPILE_ERROR, kernel.digest, message=message, tool_failed=tool_failed(error))


def _infeasible(part: Part, target: Target) -> str:
    """Returns why a compiled kernel must not be launched, or an empty text."""
    reason = misfit(part, target) or part.flaw
    if reason:
        return reason
    if part.resources.serialized_wgmma:
        # Such kernels run at a fraction of the speed, so they are not measured.
        return "ptxas serialised the matrix instructions"
    return ""
