"""A search of a small space, with fakes of the compiler and the GPU."""

from typing import Any

from flashtune.core.target import find_target
from flashtune.db.store import Store
from flashtune.tuner.execution.backend import SearchWorkers
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.request import Budget, Progress, SearchRequest, SearchResult
from tests.tuner.search.fakes import FAMILY, FakeCompiler, a_problem, a_space

SPACES = ((FAMILY, a_space()),)
SIZE = 24
H100 = find_target("h100")


def a_request(**changes: Any) -> SearchRequest:
    values: dict[str, Any] = {
        "problem": a_problem(),
        "target": H100,
        "device": 0,
        "budget": Budget(100, None, None),
        "spaces": SPACES,
        "jobs": 2,
    }
    return SearchRequest(**(values | changes))


def search(
    store: Store, measurer: Any, compiler: Any = None, seen: list[Progress] | None = None, **changes: Any
) -> SearchResult:
    observer = (lambda progress: None) if seen is None else seen.append
    return run_search(
        a_request(**changes), store, observer, SearchWorkers(compiler or FakeCompiler(), measurer)
    )
