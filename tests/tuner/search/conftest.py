import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flashtune.core.kernel import Specialization
from flashtune.core.target import find_target
from flashtune.db.store import Store, open_store
from flashtune.templates.registry import find_family
from flashtune.tuner.candidates import FamilySpace, SearchTask
from flashtune.tuner.execution.machine_probe import look_for_fault
from flashtune.tuner.execution.processes import Workers

if TYPE_CHECKING:
    from flashtune.tuner.fleet.ray_cluster import Cluster

# Worker processes import the fakes by name, as the tests do; last, so that nothing is shadowed.
ROOT = str(Path(__file__).parents[3])
if ROOT not in sys.path:
    sys.path.append(ROOT)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "search.sqlite")) as opened:
        yield opened


class Jobs(dict[Callable[..., Any], Callable[..., Any]]):
    """Functions that worker processes call instead of others, and an upper bound of their time limits."""

    seconds = 600.0


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """No job is replaced at first."""
    replaced, schedule = Jobs(), Workers.schedule

    def scheduled(self: Workers, function: Any, arguments: Any, seconds: float) -> Any:
        return schedule(self, replaced.get(function, function), arguments, min(seconds, replaced.seconds))

    monkeypatch.setattr(Workers, "schedule", scheduled)
    return replaced


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The programs that want to run, on average in the last minute: none at first."""
    programs = [0.0]
    monkeypatch.setattr(os, "getloadavg", lambda: (*programs, 0.0, 0.0))
    return programs


@pytest.fixture
def healthy_machine(jobs: Jobs, load: list[float]) -> None:
    """Probes find nothing wrong, however busy the machine of the tests is."""
    from tests.tuner.search import fakes

    jobs[look_for_fault] = fakes.nothing_wrong


@pytest.fixture(scope="session")
def ray_cluster() -> "Iterator[Cluster]":
    """The processes of a Ray cluster on this machine, with fakes of compilers and of GPUs."""
    from tests.tuner.search.ray_fakes import opened_cluster, started_cluster

    # Paths of sockets have a limit of 107 bytes.
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="ray-") as folder,
        started_cluster(Path(folder)) as address,
        opened_cluster(address) as cluster,
    ):
        yield cluster


@pytest.fixture
def scope() -> SearchTask:
    from tests.tuner.search.fakes import FAMILY, a_problem, a_space

    return SearchTask(
        a_problem(), find_target("h100"), Specialization(), (FamilySpace(find_family(FAMILY), a_space()),)
    )
