"""The GPU's own process, as the search sees it: it may crash or hang at any time, and is replaced."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from flashtune.record import Measurement, Outcome, Provenance
from flashtune.tuner.candidates import Candidate, Scope
from flashtune.tuner.compile_pool import COMPILE_SECONDS, Compiled
from flashtune.tuner.evaluation import Evaluation, lost_device
from flashtune.tuner.jobs import (
    DELAYED,
    build_late,
    evaluate_candidate,
    evaluate_late,
    fatal_error,
    prepare,
    time_finalists,
)
from flashtune.tuner.processes import exit_code_of, failure_of, start_pool, stop_pool

JOB_SECONDS = 20.0
# Warps that fall behind are waited for.
DELAYED_PATIENCE = 3.0
# Gradients are three results of five products, and their reference is as much more work.
BACKWARD_PATIENCE = 3.0
FINALS_SECONDS = 180.0
START_SECONDS = 120.0

Result = TypeVar("Result")


class GpuWorker:
    """A `Measurer` that works in a process of its own on one GPU; a lost process is replaced.

    A worker that has just crashed may mean a bad kernel or a GPU that was taken away: before a
    crash counts as the candidate's failure, a new process has to reach the GPU.
    """

    provenance = Provenance.MEASURED

    def __init__(self, device: int, seconds: float = JOB_SECONDS) -> None:
        self._device = device
        self._seconds = seconds
        self._pool = start_pool(1)
        # The process starts, and imports what it needs, while the first candidates compile.
        self._pool.schedule(prepare, args=(device,), timeout=START_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop_pool(self._pool)

    def evaluate(
        self, scope: Scope, candidate: Candidate, compiled: Compiled, drop_above_ms: float | None
    ) -> Future[Evaluation]:
        """Starts verifying and measuring a candidate, once those before it are done."""
        del compiled  # Triton's cache has the binary
        arguments = (scope.problem, candidate, scope.specialization, scope.target, self._device)
        settled: Future[Evaluation] = Future()
        job = self._scheduled(evaluate_candidate, (*arguments, drop_above_ms), self._patience(scope))
        job.add_done_callback(lambda done: self._settle(done, settled))
        return settled

    def evaluate_delayed(self, scope: Scope, candidate: Candidate) -> Future[Evaluation | None]:
        """Starts verifying a candidate with warps that fall behind: one that never ends by that is wrong."""
        arguments = (scope.problem, candidate, scope.specialization, scope.target)
        settled: Future[Evaluation | None] = Future()

        def prove(built: Future[bool]) -> None:
            lost, error = failure_of(built), built.exception()
            if error is None and built.result():
                seconds = DELAYED_PATIENCE * self._patience(scope)
                job = self._scheduled(evaluate_late, (*arguments, self._device), seconds)
                job.add_done_callback(lambda done: self._settle(done, settled, DELAYED))
            elif error is None or lost:
                # A compiler that crashes or hangs says nothing of the candidate.
                settled.set_result(None)
            else:
                settled.set_exception(error)

        self._scheduled(build_late, arguments, COMPILE_SECONDS).add_done_callback(prove)
        return settled

    def _patience(self, scope: Scope) -> float:
        return self._seconds * (BACKWARD_PATIENCE if scope.problem.is_backward else 1.0)

    def finals(self, scope: Scope, candidates: tuple[Candidate, ...]) -> Future[tuple[Measurement, ...]]:
        """Starts the finals; if their process is lost they come to nothing."""
        arguments = (scope.problem, candidates, scope.specialization, scope.target, self._device)
        settled: Future[tuple[Measurement, ...]] = Future()
        job = self._scheduled(time_finalists, arguments, FINALS_SECONDS)
        job.add_done_callback(lambda done: _pass_on(done, settled, () if failure_of(done) else None))
        return settled

    def _scheduled(
        self, function: Callable[..., Result], arguments: tuple[Any, ...], seconds: float
    ) -> Future[Result]:
        if not self._pool.active:
            # A job's callback runs in a thread of its own pool, which cannot wait for itself to end.
            threading.Thread(target=stop_pool, args=(self._pool,), daemon=True).start()
            self._pool = start_pool(1)
        return self._pool.schedule(function, args=arguments, timeout=seconds)

    def _settle(self, job: Future[Any], settled: Future[Any], how: str = "") -> None:
        failure = failure_of(job)
        if failure is None:
            _pass_on(job, settled, None)
            return
        timed_out, words = failure
        outcome = Outcome.TIMEOUT if timed_out else Outcome.LAUNCH_ERROR
        message = how + (fatal_error(exit_code_of(job)) or f"running {words}")
        evaluation = Evaluation(outcome, message=message)
        probe = self._scheduled(prepare, (self._device,), START_SECONDS)
        probe.add_done_callback(lambda done: self._settle_after(done, evaluation, settled))

    def _settle_after(self, probe: Future[None], evaluation: Evaluation, settled: Future[Any]) -> None:
        if failure_of(probe):
            settled.set_exception(lost_device(self._device, "a new process cannot reach it"))
        else:
            _pass_on(probe, settled, evaluation)


def _pass_on(job: Future[Any], settled: Future[Result], instead: Result | None) -> None:
    """Gives a finished job's error, or its result, or what is `instead` of it, to another future."""
    error = None if instead is not None and failure_of(job) else job.exception()
    if error is not None:
        settled.set_exception(error)
    else:
        settled.set_result(job.result() if instead is None else instead)
