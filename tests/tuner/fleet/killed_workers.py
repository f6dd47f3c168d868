"""Workers that are killed at random moments, as a program: `killed_workers.py URL LOG SEED KILLS`.

It imports everything once and forks the workers. They search a small space with fakes of the compiler and the
GPU. Each appends a line to LOG for every stored trial and every timed run of finals.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import psycopg

from flashtune import testing
from flashtune.core.record import Measurement, PeerTime
from flashtune.core.target import find_target
from flashtune.db.queue import JobSpec, Queue
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution.evaluation import Evaluation
from flashtune.tuner.fleet import worker
from flashtune.tuner.fleet.jobs import queue_versions, request_of
from flashtune.tuner.perf_model.prediction import shipped_fit
from flashtune.tuner.search.request import Progress, WarmStart
from tests.tuner.search.fakes import FAMILY, FakeCompiler, FakeMeasurer, a_space, by_tile

TARGET = find_target("h100")
SHAPES = 6
WORKERS = 3
LEASE_SECONDS = 0.6
SPACES = ((FAMILY, a_space()),)
EXPERIENCE = WarmStart((), shipped_fit())


class NoisyMeasurer(FakeMeasurer):
    """Returns another time at each call, so that a second timing makes another record."""

    def __init__(self) -> None:
        super().__init__(self._time)
        self._noise = random.SystemRandom()

    def _time(self, candidate: Candidate) -> Evaluation:
        time.sleep(0.004)
        evaluation = by_tile(candidate)
        assert evaluation.measurement is not None
        ms = evaluation.measurement.ms * self._noise.uniform(1.0, 1.001)
        return msgspec.structs.replace(evaluation, measurement=Measurement(ms, ms, ms, 9))

    def finals(
        self, scope: SearchTask, candidates: tuple[Candidate, ...], closest_seconds: float
    ) -> Future[tuple[Measurement, ...]]:
        (times,) = (super().finals(scope, candidates, closest_seconds).result(),)
        run = PeerTime(f"run-{self._noise.getrandbits(60):x}", 1.0)
        done: Future[tuple[Measurement, ...]] = Future()
        done.set_result(tuple(msgspec.structs.replace(entry, peers=(run,)) for entry in times))
        return done


def small_request(*arguments: Any) -> Any:
    request = request_of(*arguments)
    return msgspec.structs.replace(request, spaces=SPACES, experience=EXPERIENCE)


def work(url: str, log: Path) -> None:
    """Runs one worker until the queue is empty."""
    with log.open("a", buffering=1) as lines:
        mock.patch.object(worker, "request_of", small_request).start()
        patience = worker.Patience(poll=0.1)
        with Queue(url, LEASE_SECONDS) as queue:
            for event in worker.run_workers(
                queue, TARGET, FakeCompiler(), {0: NoisyMeasurer()}, exit_when_empty=True, patience=patience
            ):
                if isinstance(event, Progress):
                    for record in event.finished:
                        lines.write(f"{record.problem.key} {record.ms!r}\n")


def fork(url: str, log: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work(url, log)
        code = 0
    finally:
        os._exit(code)


def enqueue(url: str, seed: int) -> None:
    """Queues the shapes, anew in each round: their results are reused."""
    keys = (f"heads=4,seqlen={64 * number},head_dim=64,dtype=fp16" for number in range(1, SHAPES + 1))
    limits: dict[str, Any] = {"families": (FAMILY,), "trials": 100, "seed": seed}
    specs = [JobSpec(problem=testing.problem(key), target=TARGET.name, **limits) for key in keys]
    with Queue(url) as queue:
        queue.enqueue(specs, queue_versions())


def reap(children: set[int], *, wait: bool = False) -> None:
    for child in list(children):
        if os.waitpid(child, 0 if wait else os.WNOHANG)[0]:
            children.discard(child)


def main() -> None:
    url, log, seed, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    chance = random.Random(seed)
    children: set[int] = set()
    killed = cut = rounds = 0
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as server:
        while killed + cut < kills:
            enqueue(url, rounds)
            rounds += 1
            deadline = time.monotonic() + chance.uniform(2, 6)
            while killed + cut < kills and time.monotonic() < deadline:
                while len(children) < WORKERS:
                    children.add(fork(url, log))
                time.sleep(chance.uniform(0.02, 0.4))
                if chance.random() < 0.5:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(chance.choice(sorted(children)), signal.SIGKILL)
                    killed += 1
                else:
                    query = (
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                        "WHERE pid <> pg_backend_pid() AND datname = current_database() "
                        "ORDER BY random() LIMIT 1"
                    )
                    cut += len(server.execute(query).fetchall())
                reap(children)
        # Without further kills, every job ends.
        ended = time.monotonic()
        while len(children) < WORKERS:
            children.add(fork(url, log))
        reap(children, wait=True)
    with Queue(url) as queue:
        rows = queue.jobs()
        failed = queue.retry(None, ())
        reasons = sorted({row.reason for row in rows if row.state == "failed"})
        open_jobs = sum(row.state in ("queued", "running") for row in rows)
    for _ in range(2):
        reap({fork(url, log)}, wait=True)
    counts = {
        "rounds": rounds,
        "killed": killed,
        "cut": cut,
        "jobs": len(rows),
        "set_aside": failed,
        "reasons": reasons,
        "open": open_jobs,
        "seconds": time.monotonic() - ended,
    }
    sys.stdout.write(json.dumps(counts))


if __name__ == "__main__":
    main()
