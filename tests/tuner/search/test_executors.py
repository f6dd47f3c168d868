"""The contract of executors, and the local one on several GPUs."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashtune.core import notices
from flashtune.core.errors import MachineError
from flashtune.core.notices import FlashtuneWarning
from flashtune.db.errors import ServerUnavailableError
from flashtune.db.queue import Queue
from flashtune.db.retries import RETRY_SECONDS
from flashtune.db.store import Store, open_store
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution.compile_pool import Compiled, CompilerShare
from flashtune.tuner.execution.evaluation import DeviceLostError, Evaluation, Measurer, lost_device
from flashtune.tuner.fleet import worker
from flashtune.tuner.fleet.executor import QueueExecutor
from flashtune.tuner.fleet.jobs import request_of
from flashtune.tuner.fleet.ray_cluster import Cluster
from flashtune.tuner.fleet.ray_nodes import RayCompiler, RayMeasurer
from flashtune.tuner.fleet.worker import Patience
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.executors import local as local_module
from flashtune.tuner.search.executors.executor import Executor, longest_first
from flashtune.tuner.search.executors.local import LocalExecutor
from flashtune.tuner.search.request import Observer, Phase, Progress, SearchRequest, SearchResult
from flashtune.tuner.workloads.shapes import parse_shape
from tests.tuner.search.fakes import FakeCompiler, FakeMeasurer, a_problem, by_tile, compiled
from tests.tuner.search.small_search import SIZE, SPACES, a_request

Judge = Callable[[Candidate], Evaluation]
# Makes an executor on several GPUs from the results that each returns.
Make = Callable[[Store, list[Judge]], Executor]


def local(store: Store, judges: list[Judge]) -> Executor:
    return LocalExecutor(store, FakeCompiler(), dict(enumerate(map(FakeMeasurer, judges))))


class SmallQueueExecutor(QueueExecutor):
    """A queue for searches with the spaces of these tests, which no queue takes."""

    def run(self, requests: Sequence[SearchRequest], observer: Observer) -> Generator[SearchResult]:
        return super().run([msgspec.structs.replace(request, spaces=()) for request in requests], observer)


def queued(store: Store, judges: list[Judge]) -> Executor:
    assert isinstance(store, Queue)
    measurers: dict[int | None, Measurer] = dict(enumerate(map(FakeMeasurer, judges)))
    return SmallQueueExecutor(store, FakeCompiler(), measurers, Patience(poll=0.05))


@pytest.fixture(params=[local, queued, pytest.param("ray", marks=pytest.mark.xdist_group("ray"))])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    if request.param == "ray":
        cluster: Cluster = request.getfixturevalue("ray_cluster")
        return functools.partial(on_ray, cluster)

    def small_request(*arguments: Any) -> SearchRequest:
        return msgspec.structs.replace(request_of(*arguments), spaces=SPACES)

    monkeypatch.setattr(worker, "request_of", small_request)
    executor: Make = request.param
    return executor


def on_ray(cluster: Cluster, store: Store, judges: list[Judge]) -> Executor:
    import ray

    nodes = list(cluster.gpus)[: len(judges)]
    ray.get([node.use.remote(judge) for node, judge in zip(nodes, judges, strict=True)])
    compiler = RayCompiler(cluster.compilers)
    measurers: dict[int | None, Measurer] = {
        number: RayMeasurer(node, compiler, f"GPU {number}") for number, node in enumerate(nodes)
    }
    return LocalExecutor(store, compiler, measurers, cluster.driver)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A server's database for the executor that needs one."""
    needs_server = "queued" in request.node.name
    with (
        Queue(request.getfixturevalue("postgres"))
        if needs_server
        else open_store(str(tmp_path / "search.sqlite")) as opened
    ):
        yield opened


def requests(count: int) -> list[SearchRequest]:
    return [a_request(problem=a_problem(seqlen_kv=256 * (1 + number))) for number in range(count)]


def ignore(progress: Progress) -> None:
    pass


@pytest.mark.parametrize("gpus", [1, 3])
def test_every_search_has_a_result_progress_and_a_selection(store: Store, make: Make, gpus: int) -> None:
    wanted, seen, threads = requests(5), list[Progress](), set[int]()

    def observe(progress: Progress) -> None:
        seen.append(progress)
        threads.add(threading.get_ident())

    results = list(make(store, [by_tile] * gpus).run(wanted, observe))
    keys = [request.problem.key for request in wanted]
    assert sorted(result.problem.key for result in results) == sorted(keys)
    assert all(result.is_selected and result.counts.tried == SIZE for result in results)
    assert len(store.selections()) == 5
    for phase in Phase:
        assert {progress.problem.key for progress in seen if progress.phase is phase} == {*keys}
    assert threads == {threading.get_ident()}
    assert {bool(progress.worker) for progress in seen} == {gpus > 1}
    if gpus == 1:
        assert [*dict.fromkeys(progress.problem.key for progress in seen)] == keys
    assert list(make(store, [by_tile]).run([], observe)) == []


def test_the_same_requests_resume(store: Store, make: Make) -> None:
    list(make(store, [by_tile] * 2).run(requests(3), ignore))
    results = list(make(store, [by_tile]).run(requests(4), ignore))
    assert sorted(result.counts.reused for result in results) == [0, SIZE, SIZE, SIZE]


def fails_after(count: int, error: BaseException) -> Judge:
    seen: list[Candidate] = []

    def judge(candidate: Candidate) -> Evaluation:
        seen.append(candidate)
        if len(seen) > count:
            raise error
        return by_tile(candidate)

    return judge


def test_a_fault_of_the_machine_ends_all_searches_and_selects_the_best_so_far(
    store: Store, make: Make
) -> None:
    full = MachineError("the disk is full")
    with pytest.raises(MachineError, match="the disk is full"):
        list(make(store, [fails_after(3, full)]).run(requests(3), ignore))
    assert len(store.selections()) == 1


def test_a_closed_generator_ends_all_searches_and_selects_the_best_so_far(store: Store, make: Make) -> None:
    def slow(candidate: Candidate) -> Evaluation:
        time.sleep(0.02)
        return by_tile(candidate)

    stream = make(store, [slow] * 2).run(requests(9), ignore)
    with contextlib.closing(stream):
        first = next(stream)
    assert first.is_selected
    assert len(store.selections()) < 9


def test_an_interrupt_ends_all_searches_and_selects_the_best_so_far(store: Store, make: Make) -> None:
    best: dict[str, float | None] = {}

    def slow(candidate: Candidate) -> Evaluation:
        time.sleep(0.01)
        return by_tile(candidate)

    def observe(progress: Progress) -> None:
        best[progress.problem.key] = progress.best.ms if progress.best else None
        if len([ms for ms in best.values() if ms]) == 2:
            raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        contextlib.closing(make(store, [slow] * 2).run(requests(9), observe)) as run,
    ):
        list(run)
    assert len(store.selections()) == 2
    assert len(store.records()) < 2 * SIZE


# ---- the local executor -------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_seen_messages", {})


@pytest.mark.parametrize("uuids", [(None, None), ("a", "b")])
def test_search_of_a_lost_gpu_goes_on_at_another(store: Store, uuids: tuple[str | None, ...]) -> None:
    judges = by_tile, fails_after(3, lost_device(1, "it was unplugged"))
    gpus = (FakeMeasurer(judge, gpu_uuid=uuid) for judge, uuid in zip(judges, uuids, strict=True))
    executor = LocalExecutor(store, FakeCompiler(), dict(enumerate(gpus)))
    sentence = r"GPU 1 cannot be used \(it was unplugged\): the other GPUs continue, also with forward_"
    with pytest.warns(FlashtuneWarning, match=sentence):
        results = list(executor.run(requests(4), ignore))
    # Times of the lost GPU are not compared with those of another one.
    assert sorted(result.counts.reused for result in results) == [0, 0, 0, 0 if uuids[0] else 3]
    assert all(result.is_selected and result.counts.tried == SIZE for result in results)


@pytest.mark.filterwarnings("ignore::flashtune.core.notices.FlashtuneWarning")
@pytest.mark.parametrize("gpus", [1, 2, 3])
def test_losing_every_gpu_or_two_by_one_search_ends_all(store: Store, gpus: int) -> None:
    judges = [fails_after(3, lost_device(gpu, "it was unplugged")) for gpu in range(gpus)]
    with pytest.raises(DeviceLostError, match="the same command goes on"):
        list(local(store, judges).run(requests(1), ignore))
    assert len(store.records()) == 3 * min(gpus, 2)
    assert len(store.selections()) == 1


def test_after_an_error_no_search_waits_for_a_server_that_is_down(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_down, waits = threading.Event(), threading.Event()
    answer = Store._in

    def answer_or_fail(self: Store, *arguments: Any) -> Any:
        if not is_down.is_set():
            return answer(self, *arguments)
        waits.set()
        raise ServerUnavailableError("the server is down")

    def before_an_error(candidate: Candidate) -> Evaluation:
        assert waits.wait(60)
        raise MachineError("the disk is full")

    def before_a_write(candidate: Candidate) -> Evaluation:
        is_down.set()
        return by_tile(candidate)

    monkeypatch.setattr(Store, "_in", answer_or_fail)
    start = time.monotonic()
    with pytest.raises(MachineError, match="the disk is full"):
        list(local(store, [before_an_error, before_a_write]).run(requests(2), ignore))
    assert time.monotonic() - start < RETRY_SECONDS / 2


def test_running_searches_share_the_compilers(store: Store) -> None:
    for running, width in {1: 7, 2: 4, 3: 3, 9: 1}.items():
        assert CompilerShare(FakeCompiler(width=7), lambda count=running: count).width == width  # type: ignore[misc]
    compiler = BusyCompiler(width=4)
    executor = LocalExecutor(store, compiler, {gpu: FakeMeasurer(by_tile) for gpu in range(2)})
    assert len(list(executor.run(requests(2), ignore))) == 2
    assert 2 <= compiler.most <= 4


class BusyCompiler(FakeCompiler):
    """Needs some time for each candidate, and notes how many it compiles at once."""

    def __init__(self, width: int) -> None:
        super().__init__(width=width)
        self.begun, self.most = list[Future[Compiled]](), 0

    def submit(self, scope: SearchTask, candidate: Candidate) -> Future[Compiled]:
        job: Future[Compiled] = Future()
        self.begun.append(job)
        threading.Timer(0.02, job.set_result, [compiled(candidate)]).start()
        self.most = max(self.most, sum(not begun.done() for begun in self.begun))
        return job


def test_each_waiting_search_compiles_ahead_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead: list[SearchRequest | None] = []

    def noting(*arguments: Any, **options: Any) -> Any:
        ahead.append(options["following"]())
        return run_search(*arguments)

    monkeypatch.setattr(local_module, "run_search", noting)
    wanted = requests(4)
    list(local(store, [by_tile] * 2).run(wanted, ignore))
    # In any order, because two threads ask.
    assert [ahead.count(request) for request in (*wanted, None)] == [0, 0, 1, 1, 2]


def test_searches_of_gradients_start_first() -> None:
    forward, backward = (
        tuple(parse_shape(f"heads=2,seqlen=64..128,head_dim=64{suffix}")) for suffix in ("", ",backward")
    )
    problems = [forward[0], backward[0], forward[1], backward[1]]
    given = [msgspec.structs.replace(requests(1)[0], problem=problem) for problem in problems]
    assert [entry.problem for entry in longest_first(given)] == [*backward, *forward]
