"""Tests of workers with fakes of the compiler and the GPU, and a real queue."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sqlalchemy import text

from flashtune.core.errors import FlashtuneError, MachineError, StoreError, UsageError
from flashtune.core.notices import FlashtuneWarning
from flashtune.core.record import Outcome
from flashtune.db.engine import writing
from flashtune.db.errors import ServerUnavailableError
from flashtune.db.queue import JobSpec, Queue
from flashtune.db.retries import RETRY_SECONDS
from flashtune.db.store import open_store
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.execution.compiled_files import RECEIVED
from flashtune.tuner.execution.evaluation import Evaluation, lost_device
from flashtune.tuner.fleet import worker
from flashtune.tuner.fleet.executor import QueueExecutor
from flashtune.tuner.fleet.jobs import queue_versions, request_of, spec_of
from flashtune.tuner.fleet.worker import Ended, Event, Patience, run_workers
from flashtune.tuner.search import driver
from flashtune.tuner.search.request import Progress
from tests.db.postgres import Server
from tests.tuner.search.fakes import FAMILY, FakeCompiler, FakeMeasurer, a_problem, by_tile
from tests.tuner.search.small_search import H100, SPACES, a_request

Judge = Callable[[Candidate], Evaluation]


@pytest.fixture
def small_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers search a small space."""

    def small_request(*arguments: Any) -> Any:
        return msgspec.structs.replace(request_of(*arguments), spaces=SPACES)

    monkeypatch.setattr(worker, "request_of", small_request)


@pytest.fixture
def queue(postgres: str, small_spaces: None) -> Iterator[Queue]:
    """A queue with workers that search a small space."""
    with Queue(postgres, lease_seconds=1.0) as opened:
        yield opened


def enqueue(queue: Queue, count: int = 1, **changes: Any) -> None:
    problems = (a_problem(seqlen_kv=256 * (1 + number)) for number in range(count))
    values: dict[str, Any] = {"target": H100.name, "families": (FAMILY,), "trials": 100} | changes
    queue.enqueue([JobSpec(problem=problem, **values) for problem in problems], queue_versions())


def run(queue: Queue, *judges: Judge, hang: float = 60.0, **options: Any) -> Iterator[Event]:
    measurers = dict(enumerate(map(FakeMeasurer, judges or (by_tile,))))
    options = {"exit_when_empty": True, "patience": Patience(0.05, hang)} | options
    return run_workers(queue, H100, FakeCompiler(), measurers, **options)  # type: ignore[arg-type]


def states(queue: Queue) -> list[tuple[str, int]]:
    return [(row.state, row.attempts) for row in queue.jobs()]


def failing(error: BaseException, after: int = 3) -> Judge:
    seen: list[Candidate] = []

    def judge(candidate: Candidate) -> Evaluation:
        seen.append(candidate)
        if len(seen) > after:
            raise error
        return by_tile(candidate)

    return judge


@pytest.mark.parametrize("gpus", [1, 3])
def test_workers_search_every_job_once(queue: Queue, gpus: int) -> None:
    enqueue(queue, 5)
    events = list(run(queue, *[by_tile] * gpus))
    ended = [event for event in events if isinstance(event, Ended)]
    assert sorted(event.lease.job for event in ended) == [1, 2, 3, 4, 5]
    assert all(event.result and event.result.is_selected and not event.reason for event in ended)
    assert states(queue) == [("done", 1)] * 5
    assert {event.worker for event in events if isinstance(event, Progress)} <= {
        "",
        "GPU 0",
        "GPU 1",
        "GPU 2",
    }
    with open_store(queue.url) as store:
        assert len(store.selections()) == 5


def test_closed_worker_selects_the_best_so_far_and_gives_the_job_back(queue: Queue) -> None:
    enqueue(queue)
    with contextlib.closing(run(queue)) as events:  # type: ignore[type-var]
        for event in events:
            if isinstance(event, Progress) and event.counts.tried > 3:
                break
    assert states(queue) == [("queued", 0)]
    with open_store(queue.url) as store:
        assert len(store.selections()) == 1
    (*_, ended, _) = [event for event in run(queue) if not isinstance(event, Progress)]
    assert isinstance(ended, Ended)
    assert ended.result
    assert ended.result.counts.reused > 3


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (MachineError("the disk is full"), [("queued", 0)]),
        (StoreError("the disk of the server is full"), [("queued", 0)]),
        # A kernel may be the cause.
        (lost_device(0, "it was unplugged"), [("queued", 1)]),
    ],
)
def test_a_fault_of_the_machine_gives_the_job_back_and_ends_the_worker(
    queue: Queue, error: FlashtuneError, left: list[tuple[str, int]]
) -> None:
    enqueue(queue)
    with pytest.raises(type(error)):
        list(run(queue, failing(error)))
    assert states(queue) == left
    with open_store(queue.url) as store:
        assert {entry.record.outcome for entry in store.records()} == {Outcome.OK}


def test_a_refused_row_counts_as_an_attempt_and_the_worker_continues(queue: Queue) -> None:
    enqueue(queue, 2)
    refused = queue.jobs()[0].problem_key
    with writing(queue._engine, queue.url) as connection:
        condition = f"CHECK (problem_key <> '{refused}')"
        connection.execute(text(f"ALTER TABLE records ADD CONSTRAINT refusal {condition}"))
    ended = [event for event in run(queue) if isinstance(event, Ended)]
    assert ["refuses a row" in event.reason for event in ended] == [True, True, True, False]
    assert states(queue) == [("failed", 3), ("done", 1)]


def test_other_gpus_of_a_host_continue_after_one_is_lost(queue: Queue) -> None:
    enqueue(queue, 5)
    lost = failing(lost_device(1, "it was unplugged"))
    with pytest.warns(FlashtuneWarning, match=r"^GPU 1 cannot be used \(it was unplugged\): the other GPUs"):
        events = list(run(queue, by_tile, lost))
    assert sum(isinstance(event, Ended) for event in events) == 5
    assert sorted(states(queue)) == [("done", 1)] * 4 + [("done", 2)]


def test_unexpected_error_ends_the_worker_and_is_the_reason_of_the_job(queue: Queue) -> None:
    enqueue(queue)

    def judge(candidate: Candidate) -> Evaluation:
        raise ZeroDivisionError("division by zero")

    for attempt in (1, 2, 3):
        with pytest.raises(ZeroDivisionError):
            list(run(queue, judge))
        (row,) = queue.jobs()
        assert row.attempts == attempt
    assert (row.state, row.reason) == ("failed", "ZeroDivisionError: division by zero")


def test_job_without_a_right_kernel_is_set_aside_with_its_reason(queue: Queue) -> None:
    enqueue(queue)
    list(run(queue, lambda candidate: Evaluation(Outcome.WRONG_RESULT, message="probe 7")))
    (row,) = queue.jobs()
    assert row.state == "failed"
    assert row.reason.startswith("no candidate worked: ")
    assert "wrong_result: probe #" in row.reason


def test_job_of_an_unknown_family_is_set_aside(queue: Queue) -> None:
    enqueue(queue, families=("other",))
    (_, ended, _) = [event for event in run(queue) if not isinstance(event, Progress)]
    assert isinstance(ended, Ended)
    assert "other" in ended.reason
    assert states(queue) == [("failed", 1)]


class Hanging(FakeMeasurer):
    """A GPU that does not answer after some candidates."""

    def evaluate(self, *arguments: Any) -> Future[Evaluation]:
        return super().evaluate(*arguments) if len(self.seen) < 3 else Future()


def test_worker_that_received_kernels_stores_no_machine_code(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[object] = []
    monkeypatch.setattr(driver, "store_machine_code", lambda *arguments: stored.append(arguments))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    enqueue(queue)
    list(run(queue))
    assert len(stored) == 1
    (tmp_path / RECEIVED).touch()
    enqueue(queue, 2)
    list(run(queue))
    assert states(queue) == [("done", 1)] * 3
    assert len(stored) == 1


def test_hanging_search_ends_its_worker_and_its_lease(queue: Queue) -> None:
    enqueue(queue)
    with pytest.raises(MachineError, match=r"finished nothing for 0\.5 s"):
        list(run_workers(queue, H100, FakeCompiler(), {0: Hanging(by_tile)}, patience=Patience(0.05, 0.5)))
    assert states(queue) == [("running", 1)]
    list(run(queue))
    assert states(queue) == [("done", 2)]


def test_cancelled_job_ends_its_search(queue: Queue) -> None:
    enqueue(queue)
    begun = threading.Event()
    events: list[Event] = []

    def work() -> None:
        measurer = Hanging(by_tile)
        for event in run_workers(queue, H100, FakeCompiler(), {0: measurer}, exit_when_empty=True):
            events.append(event)
            if len(measurer.seen) >= 3:
                begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    assert queue.cancel(None, (1,)) == 1
    thread.join(60)
    (ended,) = [event for event in events if isinstance(event, Ended)]
    assert "was cancelled" in ended.reason
    assert states(queue) == [("cancelled", 1)]


@pytest.mark.parametrize(
    ("target", "versions", "reason"),
    [
        ("nvidia-h200", None, "no job for nvidia-h100 is open: the open jobs are for nvidia-h200"),
        ("nvidia-h100", "flashtune 9\x1b[1m", "need flashtune 9?[1m, and this worker has"),
    ],
)
def test_worker_that_no_job_wants_says_why(
    queue: Queue, target: str, versions: str | None, reason: str
) -> None:
    queue.enqueue([JobSpec(problem=a_problem(), target=target)], versions or queue_versions())
    (event,) = run(queue)
    assert isinstance(event, str)
    assert reason in event


def test_executor_without_a_gpu_returns_results_of_workers_elsewhere(queue: Queue) -> None:
    requests = [a_request(problem=a_problem(seqlen_kv=256 * size), spaces=()) for size in (1, 2)]
    wrong = msgspec.structs.replace(requests[1], families=("other",))

    def work() -> None:
        while not queue.jobs():
            time.sleep(0.05)
        list(run(queue))

    elsewhere = threading.Thread(target=work)
    elsewhere.start()
    executor = QueueExecutor(queue, None, {}, Patience(poll=0.05))
    results = {result.problem: result for result in executor.run([requests[0], wrong], lambda progress: None)}
    elsewhere.join()
    right = results[requests[0].problem]
    assert right.is_selected
    assert right.best is not None
    assert right.counts.tried > 3
    failed = results[wrong.problem]
    assert failed.best is None
    assert "other" in failed.reasons[0][0]


def test_interrupt_is_raised_while_the_server_is_down(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        monkeypatch.setattr(Queue, "_in", fail)
        raise KeyboardInterrupt

    def fail(*arguments: Any) -> None:
        raise ServerUnavailableError("the server is down")

    monkeypatch.setattr("flashtune.tuner.fleet.executor.time", SimpleNamespace(sleep=interrupt))
    start = time.monotonic()
    requests = [a_request(spaces=())]
    with (
        pytest.warns(FlashtuneWarning, match=r"batch \w+ stays queued: flashtune queue cancel --batch"),
        pytest.raises(KeyboardInterrupt),
    ):
        list(QueueExecutor(queue, None, {}).run(requests, lambda progress: None))
    assert time.monotonic() - start < RETRY_SECONDS / 2


def test_queue_takes_no_search_with_spaces_of_its_own() -> None:
    with pytest.raises(UsageError, match="a queue takes searches of whole families"):
        spec_of(a_request())


@pytest.mark.slow
def test_restart_of_the_server_costs_no_attempt(own_postgres: Server, small_spaces: None) -> None:
    restarted: list[int] = []

    def judge(candidate: Candidate) -> Evaluation:
        restarted.append(0)
        if len(restarted) == 5:
            own_postgres.restart()
        return by_tile(candidate)

    with Queue(own_postgres.new_database("restarted"), lease_seconds=5.0) as queue:
        enqueue(queue)
        list(run(queue, judge))
        assert states(queue) == [("done", 1)]
        assert len(queue.selections()) == 1
