"""Compiles kernels for the jobs of a queue on machines without their GPU.

The kernels that a search probably tries first are compiled, in the order of open jobs. Their files of
Triton's cache go to the workers through the database. A worker compiles a missing kernel itself.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future

from flashtune.core.errors import MachineError, StoreError, UsageError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.record import Outcome
from flashtune.core.target import Target
from flashtune.db.queue import MAX_FILES_BYTES, Queue
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.execution.compile_pool import COMPILE_SECONDS, compile_candidate
from flashtune.tuner.execution.compiled_files import pack_files
from flashtune.tuner.execution.processes import Workers
from flashtune.tuner.fleet.jobs import queue_versions, request_of
from flashtune.tuner.search.driver import likely_candidates, search_scope

# Kernels for one job: about as many as a search of the default effort compiles.
LIKELY = 96
POLL_SECONDS = 5.0


def compile_ahead(
    queue: Queue, target: Target, width: int, *, exit_when_empty: bool = False
) -> Generator[tuple[int, int]]:
    """Compiles for the open jobs for a GPU, and yields the number of each job and of its kernels.

    Raises:
        MachineError: This machine cannot compile, for example because its disk is full.
        StoreError: The server does not answer for long.
    """
    workers, free, seen = Workers(width), threading.Semaphore(width), set[int]()
    faults: list[MachineError] = []
    try:
        while True:
            new = [entry for entry in queue.open_specs(target.name, queue_versions()) if entry[0] not in seen]
            for job, spec in new:
                seen.add(job)
                count = 0
                try:
                    request = request_of(spec, target)
                    scope = search_scope(request)
                except UsageError:
                    continue  # The worker that claims it gives the reason.
                for candidate in likely_candidates(request, queue, LIKELY):
                    family = find_family(candidate.family)
                    kernel = render(family, spec.problem, candidate.config, scope.specialization).digest
                    if not queue.take_kernel(job, kernel):
                        continue
                    _acquire(free, faults)
                    arguments = (spec.problem, candidate, scope.specialization, target)
                    done = workers.schedule(compiled_files, arguments, COMPILE_SECONDS)
                    done.add_done_callback(functools.partial(_store, queue, job, kernel, faults))
                    done.add_done_callback(lambda _: free.release())
                    count += 1
                yield job, count
            if not new:
                if exit_when_empty:
                    break
                time.sleep(POLL_SECONDS)
        for _ in range(width):
            _acquire(free, faults)
    finally:
        # No callback waits for a server that is down.
        queue.retries.stop()
        workers.stop()


def _acquire(free: threading.Semaphore, faults: Sequence[MachineError]) -> None:
    """Waits for a free process. Raises if the machine made an earlier one fail."""
    free.acquire()
    if faults:
        raise faults[0]


def _store(queue: Queue, job: int, kernel: str, faults: list[MachineError], done: Future[bytes]) -> None:
    """Stores the files of a kernel. After a failure, its worker compiles it and records the reason."""
    error = None if done.cancelled() else done.exception()
    if isinstance(error, MachineError):
        faults.append(error)
    elif not (done.cancelled() or error) and 0 < len(done.result()) <= MAX_FILES_BYTES:
        with contextlib.suppress(StoreError):
            queue.store_files(job, kernel, done.result())


def compiled_files(
    problem: Problem, candidate: Candidate, specialization: Specialization, target: Target
) -> bytes:
    """Compiles a candidate in this process, and returns its files of Triton's cache; nothing if it fails."""
    if compile_candidate(problem, candidate, specialization, target).outcome is not Outcome.OK:
        return b""
    return pack_files(
        render(find_family(candidate.family), problem, candidate.config, specialization), target
    )
