"""Tests of building a tabular benchmark with fake processes."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.exhaustive import run
from benchmarks.exhaustive.inner_loop import Loop
from benchmarks.exhaustive.jobs import Batch, Described
from benchmarks.exhaustive.run import Drawing, make_table
from benchmarks.exhaustive.truth_table import read_table
from flashtune.core.record import Measurement, Outcome, PeerTime, Resources
from flashtune.core.target import find_target
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.execution.compile_pool import Compiled
from flashtune.tuner.execution.evaluation import Evaluation
from flashtune.tuner.execution.gpu_jobs import time_finalists
from tests.benchmarks.research.truth_fakes import a_problem

ANCHOR_MS = 2.0


def failed(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def of_two_groups(candidate: Candidate) -> int:
    return int(getattr(candidate.config, "num_consumer_groups", 0)) == 2


class FakeWorkers:
    """Compiles and measures in no time. Some candidates do not compile."""

    device, jobs = 0, 4

    def __init__(self) -> None:
        self.compilers = SimpleNamespace(schedule=self._compile)
        self.batches: list[tuple[Candidate, ...]] = []
        self.final: tuple[Candidate, ...] = ()

    def _compile(self, function: Any, *, args: tuple[Any, ...], timeout: float) -> Future[Any]:
        candidate = args[1]
        if candidate.config.num_stages == 4:
            return failed(TimeoutError())
        if candidate.config.num_stages == 3:
            return done(Described(Compiled(Outcome.COMPILE_ERROR, message="m" * 300)))
        resources = Resources(1000, compile_seconds=1.23456)
        return done(Described(Compiled(Outcome.OK, resources=resources), Loop({"HGMMA": 8}, 900)))

    def on_gpu(self, function: Any, arguments: tuple[Any, ...], seconds: float) -> Future[Any]:
        if function is time_finalists:
            self.final = arguments[1]
            peers = (PeerTime("sdpa-cudnn", 3.0),)
            return done(tuple(Measurement(1.5, 1.4, 1.6, 21, peers=peers) for _ in self.final))
        candidates = arguments[2]
        self.batches.append(candidates)
        measured = tuple(
            Evaluation(Outcome.OK, measurement=Measurement(1.0, 0.9, 1.1, 9))
            if of_two_groups(entry)
            else Evaluation(Outcome.OK, measurement=Measurement(4.0, 3.9, 4.1, 9))
            for entry in candidates
        )
        return done(Batch(measured, ANCHOR_MS))


def test_every_drawn_config_is_a_row_and_the_best_are_timed_again(tmp_path: Path) -> None:
    workers, path = FakeWorkers(), tmp_path / "folder" / "table.json.xz"
    fake: Any = workers
    drawing = Drawing(configs=40)
    table = make_table(fake, a_problem(), "forward_hopper", find_target("h200"), drawing, path)
    assert read_table(path) == table
    assert len(table.rows) == table.drawn == 40
    stages = [table.candidate(row).config.num_stages for row in table.rows]
    outcomes = {2: Outcome.OK, 3: Outcome.COMPILE_ERROR, 4: Outcome.TIMEOUT}
    assert [row.outcome for row in table.rows] == [outcomes[number] for number in stages]
    assert all(len(row.message) <= 100 for row in table.rows)
    assert all(row.loop for row in table.rows if row.outcome is Outcome.OK)
    assert table.anchors == (ANCHOR_MS,) * len(workers.batches)
    assert all(len(batch) <= run.BATCH for batch in workers.batches)
    # Only the best are timed again.
    assert workers.final
    assert all(map(of_two_groups, workers.final))
    for row in table.rows:
        assert (row.final is not None) == (table.candidate(row) in workers.final)
    assert table.peers == (PeerTime("sdpa-cudnn", 3.0),)
