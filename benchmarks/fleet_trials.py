"""Trials of fleets with faults: no result is lost, stored twice or timed twice, and every search ends.

GPUs and compilers are simulated. Processes, servers, disks, networks and clocks are real. It needs
PostgreSQL, Ray, and root's rights on Linux for the full disk and the partition:

    python -m benchmarks.fleet_trials --save benchmarks/results/fleet-trials.json.gz
"""

import argparse
import contextlib
import ctypes
import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from benchmarks.fleet_report import TrialRow
from benchmarks.saved import save
from flashtune import testing
from flashtune.core.errors import FlashtuneError
from flashtune.core.record import Record
from flashtune.db.queue import JobSpec, Queue
from flashtune.db.store import open_store
from flashtune.tuner.execution.evaluation import Evaluation, Measurer, lost_device
from flashtune.tuner.fleet import worker
from flashtune.tuner.fleet.executor import QueueExecutor
from flashtune.tuner.fleet.jobs import queue_versions
from flashtune.tuner.fleet.worker import Ended, Patience, run_workers
from flashtune.tuner.search.executors.local import LocalExecutor
from flashtune.tuner.search.request import Progress, SearchRequest
from tests.db import postgres
from tests.tuner.fleet import killed_workers
from tests.tuner.fleet.killed_workers import EXPERIENCE, SHAPES, TARGET, NoisyMeasurer, small_request
from tests.tuner.search.fakes import FAMILY, FakeCompiler
from tests.tuner.search.small_search import SIZE, a_request

KILLS = 200
# A new driver connects to the cluster in some seconds.
RAY_DRIVERS = 25
RESTARTS = 8
PARTITION_SECONDS = 60.0
# Seconds for one candidate, where a search must last until its fault.
SLOW = 0.25
DISK = "96m"
NAMESPACE, LINK, HERE, THERE = "flashtune-trial", "flashtune-t", "10.203.0.1", "10.203.0.2"
CLONE_NEWNET = 0x40000000
# Seconds after which drivers and actors are not killed any more.
limit = [math.inf]


def audit(fault: str, moments: int, url: str, log: Path, **values: Any) -> TrialRow:
    """Compares the results in a database with those that the log of its processes names."""
    with open_store(url) as store:
        records = [entry.record for entry in store.records()]
        selected = {entry.record.problem.key for entry in store.selections()}
    stored = Counter(f"{record.problem.key} {record.ms!r}" for record in records)
    # A line of a process that was killed may have no end.
    lines = {line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")}
    results = [line.rstrip() for line in lines if not line.startswith("#")]
    assert results
    timings = Counter((record.problem.key, record.config, finals_run(record)) for record in records)
    alone = Counter(record.problem.key for record in records if finals_run(record) is None)
    shapes = set(alone)
    sentences = [line[1:].strip() for line in log.read_text().splitlines() if line.startswith("#")]
    return TrialRow(
        fault=fault,
        moments=moments,
        shapes=len(shapes),
        records=len(records),
        lost=sum(line not in stored for line in results),
        doubled=sum(count - 1 for count in stored.values()),
        timed_twice=sum(count - 1 for count in timings.values()),
        unfinished=len(shapes - selected) + sum(count != SIZE for count in alone.values()) + open_jobs(url),
        sentence=next(iter(dict.fromkeys(sentences)), ""),
        **values,
    )


def finals_run(record: Record) -> str | None:
    """Returns the run of finals that timed a record, None if it was timed alone."""
    peers = record.measurement.peers if record.measurement else ()
    return peers[0].name if peers else None


def open_jobs(url: str) -> int:
    """Returns the number of jobs that have not ended; 0 without a queue."""
    if not url.startswith("postgresql"):
        return 0
    with Queue(url) as queue:
        return sum(row.state in ("queued", "running") for row in queue.jobs())


# ---- processes ----------------------------------------------------------------------------------


def forked(function: Callable[[], None]) -> int:
    """Runs a function in a process of its own, and returns its number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        function()
        code = 0
    finally:
        os._exit(code)


def ends_within(child: int, seconds: float) -> bool:
    """Returns whether a process ends in time. It must end without an error."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0, status
            return True
        time.sleep(0.005)
    return False


class SlowMeasurer(NoisyMeasurer):
    """A GPU on which a search lasts some seconds. After some candidates it hangs, or raises an error."""

    def __init__(self, after: int = sys.maxsize, error: Exception | None = None) -> None:
        super().__init__()
        self._after, self._error = after, error

    def evaluate(self, *arguments: Any) -> Future[Evaluation]:
        """Returns a time, or what comes after some candidates."""
        time.sleep(SLOW)
        if len(self.seen) < self._after:
            return super().evaluate(*arguments)
        failed: Future[Evaluation] = Future()
        if self._error is not None:
            failed.set_exception(self._error)
        return failed


def work(
    url: str, log: Path, measurers: Sequence[NoisyMeasurer], hang: float = 600.0, namespace: str = ""
) -> None:
    """Runs workers until the queue is empty. The log gets results, and sentences after a #."""
    if namespace:
        handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        assert ctypes.CDLL(None).setns(handle, CLONE_NEWNET) == 0
    mock.patch.object(worker, "request_of", small_request).start()
    with log.open("a", buffering=1) as lines:

        def tell(sentence: object) -> None:
            lines.write(f"# {sentence}\n")

        warnings.showwarning = lambda message, *rest: tell(message)
        with contextlib.suppress(FlashtuneError), Queue(url) as queue:
            gpus: dict[int | None, Measurer] = dict(enumerate(measurers))
            try:
                for event in run_workers(
                    queue, TARGET, FakeCompiler(), gpus, exit_when_empty=True, patience=Patience(0.5, hang)
                ):
                    if isinstance(event, Progress):
                        note(lines.write, event)
                    elif isinstance(event, Ended) and event.reason:
                        tell(event.reason)
            except FlashtuneError as error:
                tell(error)


def note(write: Callable[[str], object], progress: Progress) -> None:
    """Writes the finished results of a search."""
    for record in progress.finished:
        write(f"{record.problem.key} {record.ms!r}\n")


def drive(start: Callable[[], Any], log: Path, begun: Path, first: int) -> None:
    """Runs some searches with an executor, as `flashtune search` does."""
    mock.patch.object(worker, "request_of", small_request).start()
    with log.open("a", buffering=1) as lines, start() as executor:
        begun.touch()
        for _ in executor.run(requests(first), partial(note, lines.write)):
            pass


def requests(first: int) -> list[SearchRequest]:
    """Returns the searches of a round."""
    lengths = (64 * (first + number) for number in range(1, SHAPES + 1))
    problems = (testing.problem(f"heads=4,seqlen={length},head_dim=64,dtype=fp16") for length in lengths)
    return [a_request(problem=problem, experience=EXPERIENCE) for problem in problems]


# ---- kills --------------------------------------------------------------------------------------


def killed_workers_and_connections(kills: int, folder: Path) -> TrialRow:
    """Kills workers of a queue, and connections of its server."""
    log = folder / "log"
    log.touch()
    with running_server() as server:
        url = server.new_database("trial")
        command = [sys.executable, "-m", killed_workers.__name__, url, str(log), "44", str(kills)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        counts = json.loads(done.stdout)
        assert counts["open"] == 0
        moments = counts["killed"] + counts["cut"]
        return audit("SIGKILL of workers, or of connections", moments, url, log)


def killed_drivers(fault: str, kills: int, url: str, folder: Path, start: Callable[[], Any]) -> TrialRow:
    """Kills the process that runs an executor. The same searches are then started again."""
    chance, log, begun = random.Random(44), folder / "log", folder / "begun"  # noqa: S311 - no secret
    killed, end = 0, time.monotonic() + limit[0]
    for first in itertools.count(0, SHAPES):
        is_over = False
        while not is_over:
            begun.unlink(missing_ok=True)
            child = forked(partial(drive, start, log, begun, first))
            while not begun.exists():
                time.sleep(0.005)
            is_last = killed == kills or time.monotonic() > end
            is_over = ends_within(child, 600 if is_last else chance.uniform(0, 0.5))
            if not is_over:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                killed += 1
        # A job was set aside if its drivers were killed three times. The same command queues it again.
        assert ends_within(forked(partial(drive, start, log, begun, first)), 600)
        if is_last:
            return audit(fault, killed, url, log)
    raise AssertionError


def killed_local_drivers(kills: int, folder: Path) -> TrialRow:
    """Kills `flashtune search --devices`."""
    url = str(folder / "local.sqlite")

    @contextlib.contextmanager
    def start() -> Iterator[LocalExecutor]:
        with open_store(url) as store:
            yield LocalExecutor(store, FakeCompiler(), {0: NoisyMeasurer(), 1: NoisyMeasurer()})

    return killed_drivers("SIGKILL of the driver, --devices", kills, url, folder, start)


def killed_queue_drivers(kills: int, folder: Path) -> TrialRow:
    """Kills `flashtune search --enqueue --wait`."""
    with running_server() as server:
        url = server.new_database("trial")

        @contextlib.contextmanager
        def start() -> Iterator[QueueExecutor]:
            with Queue(url, killed_workers.LEASE_SECONDS) as queue:
                gpus: dict[int | None, Measurer] = {0: NoisyMeasurer(), 1: NoisyMeasurer()}
                yield WithoutSpaces(queue, FakeCompiler(), gpus, Patience(poll=0.1))

        return killed_drivers("SIGKILL of the driver, --enqueue --wait", kills, url, folder, start)


class WithoutSpaces(QueueExecutor):
    """A queue for the searches of these trials, of which no job names the spaces."""

    def run(self, requests: Sequence[SearchRequest], observer: Any) -> Generator[Any]:
        """Runs the searches."""
        plain = [msgspec.structs.replace(request, spaces=(), experience=None) for request in requests]
        return super().run(plain, observer)


@contextlib.contextmanager
def on_ray(address: str, url: str) -> Iterator[tuple[LocalExecutor, Any]]:
    """Gives an executor on a cluster, and the cluster."""
    from flashtune.tuner.fleet.ray_nodes import RayCompiler, RayMeasurer
    from tests.tuner.search.ray_fakes import NOISY, opened_cluster

    with open_store(url) as store, opened_cluster(address, NOISY) as cluster:
        compiler = RayCompiler(cluster.compilers)
        gpus: dict[int | None, Measurer] = {
            number: RayMeasurer(node, compiler, "GPU") for number, node in enumerate(cluster.gpus)
        }
        yield LocalExecutor(store, compiler, gpus, cluster.driver), cluster


def killed_ray_drivers(kills: int, folder: Path) -> TrialRow:
    """Kills `flashtune search --ray`."""
    from tests.tuner.search.ray_fakes import started_cluster

    url = str(folder / "ray.sqlite")
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="ray-") as place,
        started_cluster(Path(place)) as address,
    ):

        @contextlib.contextmanager
        def start() -> Iterator[LocalExecutor]:
            with on_ray(address, url) as (executor, _):
                yield executor

        return killed_drivers("SIGKILL of the driver, --ray", kills, url, folder, start)


def killed_actors(kills: int, folder: Path) -> TrialRow:
    """Kills processes of GPUs and of compilers while searches run on a Ray cluster."""
    from tests.tuner.search.ray_fakes import started_cluster, wait_for

    chance, log, url = random.Random(44), folder / "log", str(folder / "ray.sqlite")  # noqa: S311 - no secret
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="ray-") as place,
        started_cluster(Path(place)) as address,
        on_ray(address, url) as (executor, cluster),
        log.open("a", buffering=1) as lines,
    ):
        actors = [*cluster.gpus, *cluster.compilers]
        number, end = 0, time.monotonic() + limit[0]
        while number < kills and time.monotonic() < end:
            victim = chance.choice(actors)
            kill = threading.Timer(chance.uniform(0, 0.5), victim.die.remote)
            kill.start()
            for _ in executor.run(requests(number * SHAPES), partial(note, lines.write)):
                pass
            kill.join()
            wait_for(victim)
            number += 1
    return audit("SIGKILL of Ray's actors", number, url, log)


# ---- single faults ------------------------------------------------------------------------------


@contextlib.contextmanager
def running_server(**settings: str) -> Iterator[postgres.Server]:
    """Gives a server of PostgreSQL."""
    with mock.patch.dict(postgres.SETTINGS, settings):
        server = postgres.Server.make()
        try:
            yield server
        finally:
            server.remove()


def enqueue(url: str, shapes: int = 1) -> None:
    """Queues shapes."""
    specs = [
        JobSpec(problem=request.problem, target=TARGET.name, families=(FAMILY,), trials=100)
        for request in requests(0)[:shapes]
    ]
    with Queue(url) as queue:
        queue.enqueue(specs, queue_versions())


def until(condition: Callable[[], bool], limit: float = 120.0) -> float:
    """Returns the seconds until a condition holds."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + limit
        time.sleep(0.1)
    return time.monotonic() - start


def taken_over(
    name: str, folder: Path, measurer: NoisyMeasurer, *, hang: float = 600.0, stops: bool = False
) -> TrialRow:
    """Makes a fault of a worker on a GPU in mid-search. Another worker takes its job over.

    The first one gives a search up after `hang` seconds without progress. With `stops`, its process is
    stopped, and goes on after the other worker has the job.
    """
    log = folder / "log"
    with running_server() as server:
        url = server.new_database("trial")
        enqueue(url)
        first = forked(partial(work, url, log, [measurer], hang=hang))
        until(lambda: log.exists() and log.read_text().count("\n") >= 6)
        start = time.monotonic()
        if stops:
            os.kill(first, signal.SIGSTOP)
        second = forked(partial(work, url, log, [SlowMeasurer()]))
        with Queue(url) as queue:
            until(lambda: queue.jobs()[0].attempts > 1)
        seconds = time.monotonic() - start
        if stops:
            os.kill(first, signal.SIGCONT)
        assert ends_within(first, 60)
        assert ends_within(second, 60)
        return audit(name, 1, url, log, seconds=seconds)


def hanging_gpu(kills: int, folder: Path) -> TrialRow:
    """A GPU does not answer any more."""
    del kills
    return taken_over("a GPU that hangs", folder, SlowMeasurer(8), hang=10.0)


def stopped_worker(kills: int, folder: Path) -> TrialRow:
    """A worker's process is stopped, and goes on after another one has its job."""
    del kills
    return taken_over("a process that hangs, and goes on", folder, SlowMeasurer(), stops=True)


def lost_gpu(kills: int, folder: Path) -> TrialRow:
    """One of two GPUs is lost."""
    del kills
    log = folder / "log"
    with running_server() as server:
        url = server.new_database("trial")
        enqueue(url, 2)
        lost = SlowMeasurer(8, lost_device(1, "a new process cannot reach it"))
        child = forked(partial(work, url, log, [SlowMeasurer(), lost]))
        with Queue(url) as queue:
            until(lambda: any(row.attempts == 1 and row.state == "queued" for row in queue.jobs()))
            seconds = until(lambda: any(row.attempts > 1 for row in queue.jobs()))
        assert ends_within(child, 60)
        return audit("one of two GPUs is lost", 1, url, log, seconds=seconds)


def restarted_server(kills: int, folder: Path) -> TrialRow:
    """The server restarts, as after a crash."""
    del kills
    log = folder / "log"
    with running_server() as server:
        url = server.new_database("trial")
        enqueue(url, SHAPES)
        child = forked(partial(work, url, log, [SlowMeasurer(), SlowMeasurer()]))
        for number in range(RESTARTS):
            until(lambda lines=8 * (number + 1): log.exists() and log.read_text().count("\n") > lines)  # type: ignore[misc]
            server.restart()
        assert ends_within(child, 300)
        with Queue(url) as queue:
            assert {row.attempts for row in queue.jobs()} == {1}
        return audit("a restart of the server", RESTARTS, url, log)


def full_disk(kills: int, folder: Path) -> TrialRow:
    """The disk of the server fills up in mid-search, and has room again after the worker's end."""
    del kills
    log, disk = folder / "log", folder / "disk"
    # The server is another user's.
    folder.chmod(0o755)
    disk.mkdir()
    run_tool("mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk))
    try:
        with mock.patch.object(tempfile, "tempdir", str(disk)), running_server() as server:
            url = server.new_database("trial")
            enqueue(url, SHAPES)
            first = forked(partial(work, url, log, [SlowMeasurer(), SlowMeasurer()]))
            until(lambda: log.exists() and log.read_text().count("\n") > SIZE)
            filling, start = disk / "filling", time.monotonic()
            with contextlib.suppress(OSError), filling.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            assert ends_within(first, 300)
            filling.unlink()
            second = forked(partial(work, url, log, [NoisyMeasurer()]))
            with Queue(url) as queue:
                until(lambda: any(f":{second}:" in (row.worker or "") for row in queue.jobs()))
            seconds = time.monotonic() - start
            assert ends_within(second, 300)
            return audit("a full disk of the server", 1, url, log, seconds=seconds)
    finally:
        run_tool("umount", "--lazy", str(disk))


def partition(kills: int, folder: Path) -> TrialRow:
    """The network between a worker and the server is down for a minute."""
    del kills
    log = folder / "log"
    with running_server(listen_addresses="*") as server, linked_namespace():
        hba = server.folder / "data/pg_hba.conf"
        hba.write_text(f"{hba.read_text()}\nhost all all {THERE}/32 trust\n")
        server.restart()
        url = server.new_database("trial")
        enqueue(url)
        there = url.replace("127.0.0.1", HERE)
        first = forked(partial(work, there, log, [SlowMeasurer()], namespace=NAMESPACE))
        other = partial(forked, partial(work, url, log, [NoisyMeasurer()]))
        until(lambda: log.exists() and log.read_text().count("\n") >= 6)
        start = time.monotonic()
        run_tool("ip", "link", "set", LINK, "down")
        second = other()
        with Queue(url) as queue:
            until(lambda: queue.jobs()[0].attempts > 1)
        seconds = time.monotonic() - start
        time.sleep(max(0.0, PARTITION_SECONDS - seconds))
        run_tool("ip", "link", "set", LINK, "up")
        assert ends_within(second, 60)
        assert ends_within(first, 200)
        return audit("a partition of 60 s", 1, url, log, seconds=seconds)


@contextlib.contextmanager
def linked_namespace() -> Iterator[None]:
    """Makes a network namespace with a link to this one."""
    run_tool("ip", "netns", "add", NAMESPACE)
    try:
        run_tool("ip", "link", "add", LINK, "type", "veth", "peer", "name", "eth0", "netns", NAMESPACE)
        run_tool("ip", "address", "add", f"{HERE}/24", "dev", LINK)
        run_tool("ip", "link", "set", LINK, "up")
        for command in (("address", "add", f"{THERE}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            run_tool("ip", "-n", NAMESPACE, *command)
        yield
    finally:
        run_tool("ip", "netns", "delete", NAMESPACE)


def run_tool(*command: str) -> None:
    """Runs a program of the system."""
    subprocess.run(command, check=True)


# ---- all ----------------------------------------------------------------------------------------

# With the number of faults. The longest comes first.
TRIALS: dict[str, tuple[Callable[[int, Path], TrialRow], int]] = {
    "actors": (killed_actors, KILLS),
    "workers": (killed_workers_and_connections, KILLS),
    "local": (killed_local_drivers, KILLS),
    "queue": (killed_queue_drivers, KILLS),
    "ray": (killed_ray_drivers, RAY_DRIVERS),
    "hang": (hanging_gpu, 1),
    "stopped": (stopped_worker, 1),
    "lost": (lost_gpu, 1),
    "restart": (restarted_server, 1),
    "partition": (partition, 1),
    "disk": (full_disk, 1),
}


def run(chosen: tuple[str, int | None]) -> tuple[str, TrialRow]:
    """Runs one trial."""
    name, kills = chosen
    function, usual = TRIALS[name]
    with tempfile.TemporaryDirectory() as folder:
        return name, function(kills or usual, Path(folder))


def main() -> None:
    """Runs trials and prints their rows."""
    parser = argparse.ArgumentParser(description="Runs fleets with faults.")
    parser.add_argument("trials", nargs="*", choices=[*TRIALS, []], metavar="TRIAL", help="by default all")
    parser.add_argument("--kills", type=int, help=f"moments of each trial with kills, by default {KILLS}")
    parser.add_argument("--seconds", type=float, default=math.inf, help="limit of each trial with kills")
    parser.add_argument("--jobs", type=int, default=1, help="trials at the same time")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    limit[0] = options.seconds
    chosen = [(name, options.kills) for name in options.trials or TRIALS]
    rows: dict[str, TrialRow] = {}
    # A trial has a process of its own, because it forks others and starts Ray.
    with multiprocessing.get_context("fork").Pool(options.jobs, maxtasksperchild=1) as pool:
        for name, row in pool.imap_unordered(run, chosen, chunksize=1):
            rows[name] = row
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()
            if options.save:
                save(options.save, [rows[name] for name in TRIALS if name in rows])


if __name__ == "__main__":
    main()
