"""Tests of searches on a Ray cluster: lost processes, nodes that do not fit, and errors of users."""

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
from ray.exceptions import ActorDiedError, ObjectReconstructionFailedError, RayError

from flashtune.core.errors import UsageError
from flashtune.core.notices import FlashtuneWarning
from flashtune.db.store import Store
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution.evaluation import Evaluation
from flashtune.tuner.fleet import ray_nodes
from flashtune.tuner.fleet.ray_cluster import Cluster, alike, open_cluster
from flashtune.tuner.fleet.ray_nodes import Identity, RayCompiler, RayMeasurer, identity
from flashtune.tuner.search.selection import candidate_of
from tests.support.fuzzing import fuzz_count
from tests.tuner.search.fakes import a_problem, by_tile, compiled
from tests.tuner.search.ray_fakes import wait_for
from tests.tuner.search.small_search import H100, SIZE, a_request
from tests.tuner.search.test_executors import on_ray

pytestmark = pytest.mark.xdist_group("ray")
SAMPLES_OF_FINALS = 21


def slow(candidate: Candidate) -> Evaluation:
    time.sleep(0.02)
    return by_tile(candidate)


@pytest.mark.slow
def test_killed_processes_lose_and_repeat_no_result(store: Store, ray_cluster: Cluster) -> None:
    drawn = random.Random(5)
    processes = [*ray_cluster.gpus, *ray_cluster.compilers]
    for number in range(fuzz_count(3, 200)):
        first = 3 * number + 1
        wanted = [a_request(problem=a_problem(seqlen_kv=64 * (first + each))) for each in range(3)]
        executor = on_ray(ray_cluster, store, [slow] * len(ray_cluster.gpus))
        victim = processes[-1] if number == 0 else drawn.choice(processes)
        killer = threading.Timer(drawn.uniform(0.0, 0.6), victim.die.remote)
        killer.start()
        results = list(executor.run(wanted, lambda progress: None))
        killer.join()
        assert all(result.is_selected and result.counts.tried == SIZE for result in results)
        assert len(results) == len(wanted)
        assert len(store.selections()) == first + 2
        for request in wanted:
            rows = [row.record for row in store.records(request.problem)]
            timed = [row for row in rows if row.measurement and row.measurement.samples != SAMPLES_OF_FINALS]
            assert set(Counter(map(candidate_of, timed)).values()) == {1}
            assert {row.versions.driver for row in rows} == {ray_cluster.driver}
        wait_for(victim)


class Reference:
    """Ray's reference to a result that is known."""

    def __init__(self, result: object) -> None:
        self._job: Future[object] = Future()
        if isinstance(result, Exception):
            self._job.set_exception(result)
        else:
            self._job.set_result(result)

    def future(self) -> Future[object]:
        return self._job


class Node:
    """A process with given results of its calls. Exceptions of Python are raised when a call starts."""

    def __init__(self, *results: object) -> None:
        self.results, self.files = list(results), list[object]()
        self.evaluate = self.compile = self

    def options(self, num_returns: int) -> "Node":
        return self

    def remote(self, *arguments: object, files: object = None) -> Any:
        self.files.append(files)
        result = self.results.pop(0)
        if isinstance(result, ValueError):
            raise result
        return result if isinstance(result, tuple) else Reference(result)


@pytest.mark.parametrize("loss", [ActorDiedError(), ObjectReconstructionFailedError("0" * 56)])
def test_repeated_calls_have_no_files(
    monkeypatch: pytest.MonkeyPatch, loss: RayError, scope: SearchTask
) -> None:
    monkeypatch.setattr(ray_nodes, "RETRY_SECONDS", 0.0)
    candidate = next(scope.candidates())
    node, done = Node(loss, loss, by_tile(candidate)), compiled(candidate)
    compiler = RayCompiler({Node((Reference(done), Reference(b"files"))): 1})
    assert compiler.submit(scope, candidate).result(60) == done
    measurer = RayMeasurer(node, compiler, "GPU 0")
    assert measurer.evaluate(scope, candidate, done, None).result(60) == by_tile(candidate)
    first, *others = node.files
    assert isinstance(first, Reference)
    assert others == [b"", b""]
    failing = RayMeasurer(Node(loss, ValueError("no thread")), compiler, "GPU 0")
    with pytest.raises(ValueError, match="no thread"):
        failing.evaluate(scope, candidate, done, None).result(60)


def test_files_of_few_kernels_are_kept(monkeypatch: pytest.MonkeyPatch, scope: SearchTask) -> None:
    monkeypatch.setattr(ray_nodes, "MAX_KEPT", 2)
    tried = list(scope.candidates())[:3]
    compiler = RayCompiler({Node(*[(Reference(0), Reference(number)) for number in range(3)]): 1})
    for candidate in tried:
        compiler.submit(scope, candidate)
    kept = [compiler.take_files(scope, candidate) for candidate in tried]
    assert [isinstance(files, Reference) for files in kept] == [False, True, True]


def test_nodes_with_other_versions_are_not_used() -> None:
    own = identity(None)
    names = list(own.versions)
    other = {**own.versions, names[0]: msgspec.structs.replace(own.versions[names[0]], triton="1.0")}
    newer = {name: msgspec.structs.replace(each, driver="999.1") for name, each in own.versions.items()}
    known = {
        "a": Identity(H100, own.versions),
        "b": Identity(None, other),
        "c": Identity(H100, newer),
        "d": Identity(None, newer),
    }
    driver = own.versions[names[0]].driver
    with pytest.warns(FlashtuneWarning, match=r"node [bc] is not used: its versions differ"):
        assert alike(known, driver, {key: f"node {key}" for key in known}) == {"a", "d"}


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:1", "Connection refused"),
        ("auto", "Connection refused"),
        ("127.0.0.1:99999", ""),
        ("nowhere", ""),
        ("local-", ""),
    ],
)
def test_wrong_address_is_one_sentence(monkeypatch: pytest.MonkeyPatch, address: str, reason: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UsageError, match=f"Ray cluster.*{reason}") as error, open_cluster(address, H100):
        pass
    assert "\n" not in str(error.value)


def test_local_cluster_does_not_depend_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(address: str, **options: object) -> None:
        # Without an address, Ray would take that of `RAY_ADDRESS`.
        assert address == "local"
        raise RayError("no memory")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(UsageError, match=r"cannot be used \(.*no memory\)"), open_cluster("local", H100):
        pass


LOCAL = """
import os
from flashtune.core.errors import UsageError
from flashtune.core.target import find_target
from flashtune.tuner.fleet.ray_cluster import open_cluster

try:
    with open_cluster("local", find_target("h100")):
        pass
except UsageError as error:
    print(error)
print([name for name in os.environ if name.startswith("RAY_AUTH")])
"""


@pytest.mark.slow
def test_local_cluster_leaves_no_token(tmp_path: Path) -> None:
    """Later clusters of the user would ask for it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", LOCAL], capture_output=True, text=True, env=environment, check=True
    )
    sentence, names = done.stdout.splitlines()
    assert sentence.startswith("no free GPU of the Ray cluster at local is nvidia-h100")
    assert names == "[]"
    assert not (tmp_path / ".ray").exists()


def test_missing_ray_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(UsageError, match=r"--ray needs Ray: install flashtune\[ray\]"),
        open_cluster("auto", H100),
    ):
        pass
