"""The contract of executors, and the local one on several GPUs."""

import contextlib
import threading
from collections.abc import Callable

import pytest

from flashtune.core.errors import MachineError
from flashtune.db.store import Store
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.execution.evaluation import Evaluation
from flashtune.tuner.search.executors.executor import Executor
from flashtune.tuner.search.executors.local import LocalExecutor
from flashtune.tuner.search.request import Phase, Progress, SearchRequest
from tests.tuner.search.fakes import FakeCompiler, FakeMeasurer, a_problem, by_tile
from tests.tuner.search.small_search import SIZE, a_request

Judge = Callable[[Candidate], Evaluation]
# Makes an executor on several GPUs from the results that each returns.
Make = Callable[[Store, list[Judge]], Executor]


def local(store: Store, judges: list[Judge]) -> Executor:
    return LocalExecutor(store, FakeCompiler(), dict(enumerate(map(FakeMeasurer, judges))))


@pytest.fixture(params=[local])
def make(request: pytest.FixtureRequest) -> Make:
    executor: Make = request.param
    return executor


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
    keys = {request.problem.key for request in wanted}
    assert {result.problem.key for result in results} == keys
    assert len(results) == 5
    assert all(result.is_selected and result.counts.tried == SIZE for result in results)
    assert len(store.selections()) == 5
    for phase in Phase:
        assert {progress.problem.key for progress in seen if progress.phase is phase} == keys
    assert threads == {threading.get_ident()}
    assert {bool(progress.worker) for progress in seen} == {gpus > 1}


def test_no_requests_have_no_results(store: Store, make: Make) -> None:
    assert list(make(store, [by_tile]).run([], ignore)) == []


def test_searches_start_in_order(store: Store, make: Make) -> None:
    begun = dict[str, None]()
    wanted = requests(4)
    list(make(store, [by_tile]).run(wanted, lambda progress: begun.setdefault(progress.problem.key)))
    assert list(begun) == [request.problem.key for request in wanted]


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
    begun = threading.Event()

    def slow(candidate: Candidate) -> Evaluation:
        begun.wait(60.0)
        return by_tile(candidate)

    stream = make(store, [by_tile, slow]).run(requests(9), ignore)
    with contextlib.closing(stream):
        first = next(stream)
        begun.set()
    assert first.is_selected
    assert len(store.selections()) < 9
