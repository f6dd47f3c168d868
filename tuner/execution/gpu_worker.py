"""The interface of a search to the GPU process. A process that crashes or hangs is replaced."""

import functools
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from flashtune.core.errors import MachineError
from flashtune.core.record import Measurement, Outcome, Provenance
from flashtune.core.target import device_uuid
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution.compile_pool import COMPILE_SECONDS, Compiled, build_late
from flashtune.tuner.execution.evaluation import Evaluation, MachineCode, lost_device
from flashtune.tuner.execution.gpu_jobs import (
    DELAYED,
    evaluate_candidate,
    evaluate_late,
    fatal_error,
    machine_code_of,
    prepare,
    time_finalists,
    warm_up,
)
from flashtune.tuner.execution.machine_probe import fault_of, outside_fault, settle_after_probe
from flashtune.tuner.execution.processes import LostJob, Workers, exit_code_of, failure_of, stopped
from flashtune.tuner.execution.timed_runs import CLOSEST_SECONDS

# Name of the GPU process in messages.
RUNNER = "the process that runs kernels"
JOB_SECONDS = 20.0
# Factor of the time limit with schedule fuzzing: its delays take time.
DELAYED_PATIENCE = 3.0
# Factor for gradients: they take five products instead of two, and more reference work.
BACKWARD_PATIENCE = 3.0
FINALS_SECONDS = 180.0
START_SECONDS = 120.0

Result = TypeVar("Result")


class GpuWorker:
    """A `Measurer` that uses one GPU from a separate process. A lost process is replaced.

    A crash or a hang can come from a bad kernel, a lost GPU, or a machine without free cores or memory.
    It counts as the candidate's failure only if a new process reaches the GPU and a probe of the machine
    passes.
    """

    provenance = Provenance.MEASURED

    def __init__(self, device: int, seconds: float = JOB_SECONDS) -> None:
        self._device = device
        self._seconds = seconds
        self._worker = Workers(1)
        # The process starts and imports its modules while the first candidates compile.
        self._worker.start(prepare, (device,), START_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.stop()

    @functools.cached_property
    def gpu_uuid(self) -> str:
        """The physical GPU."""
        return device_uuid(self._device)

    def warm_up(self, scope: SearchTask, candidate: Candidate) -> None:
        """Queues what a first verification in the process needs. Its errors recur in that verification."""
        arguments = (scope.problem, candidate, scope.specialization, scope.target, self._device)
        self._worker.start(warm_up, arguments, START_SECONDS)

    def evaluate(
        self, scope: SearchTask, candidate: Candidate, compiled: Compiled, drop_above_ms: float | None
    ) -> Future[Evaluation]:
        """Queues a candidate for verification and measurement."""
        del compiled  # Triton's cache has the binary
        arguments = (scope.problem, candidate, scope.specialization, scope.target, self._device)
        settled: Future[Evaluation] = Future()
        self._run(evaluate_candidate, (*arguments, drop_above_ms), self._patience(scope), scope, settled)
        return settled

    def evaluate_delayed(self, scope: SearchTask, candidate: Candidate) -> Future[Evaluation | None]:
        """Queues a candidate for verification with schedule fuzzing. A kernel that then hangs is rejected."""
        arguments = (scope.problem, candidate, scope.specialization, scope.target)
        settled: Future[Evaluation | None] = Future()

        def prove(built: Future[bool]) -> None:
            lost, error = failure_of(built), built.exception()
            if error is None and built.result():
                seconds = DELAYED_PATIENCE * self._patience(scope)
                self._run(evaluate_late, (*arguments, self._device), seconds, scope, settled, DELAYED)
            elif error is None or lost:
                # A crash or hang of the compiler here is not a failure of the candidate.
                settled.set_result(None)
            else:
                settled.set_exception(_explained(error))

        self._worker.supervise(build_late, arguments, COMPILE_SECONDS, settled, prove)
        return settled

    def _patience(self, scope: SearchTask) -> float:
        return self._seconds * (BACKWARD_PATIENCE if scope.problem.is_backward else 1.0)

    def finals(
        self, scope: SearchTask, candidates: tuple[Candidate, ...], closest_seconds: float = CLOSEST_SECONDS
    ) -> Future[tuple[Measurement, ...]]:
        """Queues the finals. The result is empty if their process is lost."""
        assumed = (scope.specialization, scope.target, self._device)
        arguments = (scope.problem, candidates, *assumed, closest_seconds)
        settled: Future[tuple[Measurement, ...]] = Future()

        def settle(done: Future[tuple[Measurement, ...]]) -> None:
            _pass_on(done, settled, () if failure_of(done) else None)

        self._worker.supervise(time_finalists, arguments, FINALS_SECONDS, settled, settle)
        return settled

    def machine_code(self, scope: SearchTask, candidate: Candidate) -> Future[MachineCode]:
        """Queues the making of an entry of a bundle. The result is empty if its process is lost."""
        arguments = (scope.problem, candidate, scope.specialization, scope.target, self._device)
        settled: Future[MachineCode] = Future()

        def settle(done: Future[MachineCode]) -> None:
            _pass_on(done, settled, () if failure_of(done) else None)

        self._worker.supervise(machine_code_of, arguments, self._patience(scope), settled, settle)
        return settled

    def _run(
        self,
        function: Callable[..., Evaluation],
        arguments: tuple[Any, ...],
        seconds: float,
        scope: SearchTask,
        settled: Future[Any],
        how: str = "",
        *,
        again: bool = True,
    ) -> None:
        """Starts an evaluation. With `again`, it is retried once if its process died before it took it."""

        def settle(job: Future[Evaluation]) -> None:
            lost = failure_of(job)
            if lost is None:
                _pass_on(job, settled, None)
            elif not lost.taken and again:
                self._run(function, arguments, seconds, scope, settled, how, again=False)
            else:
                self._settle_lost(job, lost, scope, settled, how)

        self._worker.supervise(function, arguments, seconds, settled, settle)

    def _settle_lost(
        self, job: Future[Evaluation], lost: LostJob, scope: SearchTask, settled: Future[Any], how: str
    ) -> None:
        """Settles a job with a lost process: the cause is the machine, the GPU or the candidate."""
        outside = outside_fault(lost, RUNNER)
        if outside:
            settled.set_exception(stopped(outside))
            return
        outcome = Outcome.TIMEOUT if lost.timed_out else Outcome.LAUNCH_ERROR
        fatal = fatal_error(exit_code_of(job))
        evaluation = Evaluation(outcome, message=how + (fatal or f"running {lost.words}"))

        def settle(probe: Future[None]) -> None:
            if failure_of(probe):
                settled.set_exception(lost_device(self._device, "a new process cannot reach it"))
            elif fatal or probe.exception():
                _pass_on(probe, settled, evaluation)
            else:
                settle_after_probe(
                    scope.target,
                    settled,
                    lambda probe_result: fault_of(lost, probe_result, RUNNER),
                    evaluation,
                )

        self._worker.supervise(prepare, (self._device,), START_SECONDS, settled, settle)


def _pass_on(job: Future[Any], settled: Future[Result], instead: Result | None) -> None:
    """Copies a finished job's error or result to another future; `instead` replaces the result."""
    error = None if instead is not None and failure_of(job) else job.exception()
    if error is not None:
        settled.set_exception(_explained(error))
    else:
        settled.set_result(job.result() if instead is None else instead)


def _explained(error: BaseException) -> BaseException:
    """Returns an error, with a remedy in its message if the machine caused it."""
    return stopped(str(error)) if isinstance(error, MachineError) else error
