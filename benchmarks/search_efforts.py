"""Measures searches of each effort on all GPUs of a machine: seconds, parts and picks.

    python -m benchmarks.search_efforts all --save nvidia-h200-efforts.json.gz
    python -m benchmarks.search_efforts searches --effort quick --shapes 0:2 --save quick.json
    python -m benchmarks.search_efforts parts --shapes 0:1
    python -m benchmarks.search_efforts devices --devices 0,1 --effort quick --save two.json
    python -m benchmarks.search_efforts picks --given one.json two.json --save picks.json.gz

`all` takes 8 minutes on four GPUs with 16 cores each. The shapes are divided among the GPUs, and one is
searched at a time on each. It runs these searches in this order, and starts none that may end late:

- the first 12 shapes with each effort, each in a new process with empty caches;
- all shapes with the default effort, the later ones of a process with running workers;
- one shape for each GPU with each effort from a cold start, without the winners of other shapes.

Then the picks of each shape are timed in one run on its GPU. With `--resume FILE`, searches of an earlier run
are not repeated, and their picks are timed with the others. `searches` searches shapes in one process, and
`parts` times the parts of evaluating one candidate. `devices` searches all shapes on some GPUs of one model,
as one `flashtune search` does with empty caches. With --db or --ray, they go through a queue or Ray. `picks`
times the picks of several such runs in one run.
"""

import argparse
import functools
import itertools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from flashtune.core.problem import Problem
from flashtune.tuner.search.request import BUDGETS, Effort, Phase, Progress, SearchRequest, WarmStart
from flashtune.tuner.workloads.shapes import parse_shape

# No shipped table has these. The first twelve have features and gradients among them.
SHAPES = (
    "heads=12,kv_heads=4,seqlen=1536,head_dim=128,causal,batch=6",
    "heads=20,seqlen=3000,head_dim=64,batch=3",
    "heads=24,kv_heads=8,seqlen=6144,head_dim=128,causal",
    "heads=10,seqlen=2500,head_dim=96,causal,batch=2",
    "heads=8,kv_heads=2,seqlen=5120,head_dim=256,causal",
    "heads=16,kv_heads=4,seqlen=4608,head_dim=128,window=1000,batch=2",
    "heads=12,seqlen=2304,head_dim=64,causal,alibi,batch=4",
    "heads=16,kv_heads=8,seqlen=3072,head_dim=128,causal,softcap,batch=2",
    "heads=40,kv_heads=8,seqlen_q=1,seqlen_kv=12000,head_dim=128,causal,page_size=16,batch=24",
    "heads=12,seqlen=3072,head_dim=128,causal,batch=2,backward",
    "heads=20,kv_heads=4,seqlen=2560,head_dim=64,batch=2,backward",
    "heads=16,kv_heads=4,seqlen=2048,head_dim=128,causal,window=700,batch=2,backward",
    "heads=6,seqlen=7000,head_dim=128",
    "heads=36,kv_heads=6,seqlen=1100,head_dim=128,causal,batch=8",
    "heads=14,kv_heads=2,seqlen=9000,head_dim=64,causal",
    "heads=9,seqlen=3500,head_dim=160,causal,batch=2",
    "heads=18,seqlen=1800,head_dim=80,batch=4",
    "heads=10,kv_heads=5,seqlen=2200,head_dim=256,batch=3",
    "heads=24,kv_heads=4,seqlen=3300,head_dim=64,causal,sinks,window=200,batch=2",
    "heads=8,seqlen=1500,head_dim=64,alibi,batch=4",
    "heads=28,kv_heads=4,seqlen_q=1,seqlen_kv=7000,head_dim=128,causal,batch=32",
    "heads=16,seqlen=1300,head_dim=128,causal,batch=6",
    "heads=10,seqlen=1700,head_dim=96,causal,batch=4,backward",
    "heads=32,kv_heads=8,seqlen=1900,head_dim=128,causal,batch=3,backward",
)
# The number of shapes that are searched with each effort.
FIRST = 12
REPEATS = 5
CORES = 16
# The longest time of one search in seconds, with its process.
LONGEST = {Effort.QUICK: 22.0, Effort.DEFAULT: 45.0, Effort.THOROUGH: 95.0}
# The time for timing all picks of a GPU.
TIMING_SECONDS = 45.0
# Rounds of the run that times picks.
ROUNDS = 101


class Job(msgspec.Struct, frozen=True):
    """Searches in one process with empty caches."""

    shapes: tuple[int, ...]  # Positions in `SHAPES`.
    effort: Effort
    turn: int = 1  # 2 for the second search of a shape with an effort.
    cold: bool = False  # Without the winners of other shapes.


class Searched(msgspec.Struct, frozen=True, kw_only=True):
    """One search on the GPU."""

    problem: str  # The problem's key.
    shape: str
    effort: Effort
    turn: int
    cold: bool
    alone: bool  # Whether it is the first of its process, with empty caches.
    seconds: float  # From the start of the process, or the end of the previous search, to the selection.
    first_seconds: float | None  # From the same start to the first result.
    tried: int
    stop: str
    # Compilations and jobs of the GPU process: name, begin, end.
    spans: tuple[tuple[str, float, float], ...]
    # Each improvement of the best first time: seconds, ms.
    best: tuple[tuple[float, float], ...]
    record: str | None  # The selected record, encoded.
    pick_ms: float | None = None  # Time of the selected kernel in the common run.


class Parts(msgspec.Struct, frozen=True):
    """Median seconds of the parts of evaluating one candidate, and those of the first time."""

    problem: str
    seconds: dict[str, float]


class Efforts(msgspec.Struct, frozen=True):
    """The results of `all`."""

    gpus: int
    cores: int  # For each GPU.
    searches: tuple[Searched, ...]
    parts: tuple[Parts, ...]


class Probe:
    """Wraps the workers of a search, and notes when their jobs begin and end."""

    def __init__(self, equipment: Any) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self._idle = 0.0
        self._wrap(equipment.compiler, "submit", "compile", serial=False)
        for name in ("evaluate", "finals", "evaluate_delayed", "machine_code"):
            self._wrap(equipment.measurer, name, name, serial=True)

    def _wrap(self, worker: Any, name: str, label: str, *, serial: bool) -> None:
        original = getattr(worker, name)

        def timed(*arguments: Any) -> Future[Any]:
            begun = time.time()
            job: Future[Any] = original(*arguments)

            def add(_: Future[Any]) -> None:
                # The GPU process has one job at a time, in order.
                now, begin = time.time(), max(begun, self._idle) if serial else begun
                self.spans.append((label, begin, now))
                self._idle = now if serial else self._idle

            job.add_done_callback(add)
            return job

        setattr(worker, name, timed)


def request_of(problem: Problem, effort: Effort, *, cold: bool = False) -> SearchRequest:
    """Returns the request of a search on this process's first GPU."""
    from flashtune.core.target import device_target
    from flashtune.tuner.perf_model.prediction import shipped_fit

    experience = WarmStart((), shipped_fit()) if cold else None
    return SearchRequest(
        problem=problem, target=device_target(0), device=0, budget=BUDGETS[effort], experience=experience
    )


def searched(job: Job, began: float, database: Path) -> Iterator[Searched]:
    """Searches shapes with the same workers, and yields their results."""
    from flashtune.tuner.execution.processes import start_server

    start_server()
    from flashtune.db.codec import encode_record, without_gpu
    from flashtune.db.store import open_store
    from flashtune.tuner.execution.backend import open_workers
    from flashtune.tuner.search.driver import run_search

    with open_store(str(database)) as store, open_workers(0) as equipment:
        probe = Probe(equipment)
        requests = [
            request_of(problem, job.effort, cold=job.cold)
            for shape in job.shapes
            for problem in parse_shape(SHAPES[shape])
        ]
        for shape, request, following in itertools.zip_longest(job.shapes, requests, requests[1:]):
            best: list[tuple[float, float]] = []
            first: list[float] = []

            def observe(
                progress: Progress, first: Any = first, best: Any = best, began: float = began
            ) -> None:
                now = time.time() - began
                if progress.finished and not first:
                    first.append(now)
                ms = progress.best.ms if progress.best and progress.phase is Phase.SEARCHING else None
                if ms and (not best or ms < best[-1][1]):
                    best.append((now, ms))

            ahead = functools.partial(lambda later: later, following)
            result = run_search(request, store, observe, equipment, following=ahead)
            spans = tuple((name, begin - began, end - began) for name, begin, end in probe.spans)
            probe.spans.clear()
            yield Searched(
                problem=request.problem.key,
                shape=SHAPES[shape],
                effort=job.effort,
                turn=job.turn,
                cold=job.cold,
                alone=shape == job.shapes[0],
                seconds=time.time() - began,
                first_seconds=first[0] if first else None,
                tried=result.counts.tried,
                stop=result.stop.value,
                spans=spans,
                best=tuple(best),
                record=encode_record(without_gpu(result.best)).decode() if result.best else None,
            )
            began = time.time()


def timed(rows: Sequence[Searched]) -> list[Searched]:
    """Returns searches with the times of their picks. Those of one shape are timed interleaved."""
    import torch

    from flashtune.core.target import device_target
    from flashtune.db.codec import decode_record
    from flashtune.tuner.candidates import SearchTask
    from flashtune.tuner.execution.compile_pool import CompilePool
    from flashtune.tuner.execution.cpus import available_cpus
    from flashtune.tuner.execution.inputs import make_tensors
    from flashtune.tuner.execution.sdpa import precision_of
    from flashtune.tuner.execution.timed_runs import kernel_run
    from flashtune.tuner.execution.timing import measure_interleaved
    from flashtune.tuner.search.selection import candidate_of

    device, target, result = torch.device("cuda", 0), device_target(0), []
    decoded = [decode_record(row.record.encode()) for row in rows if row.record]
    different = {(record.problem, candidate_of(record)): record.specialization for record in decoded}
    with CompilePool(available_cpus()) as pool:
        jobs = [
            pool.submit(SearchTask(problem, target, assumed, ()), candidate)
            for (problem, candidate), assumed in different.items()
        ]
        for job in jobs:
            job.result()
    for key in dict.fromkeys(row.problem for row in rows):
        own = [row for row in rows if row.problem == key]
        records = [decode_record(row.record.encode()) if row.record else None for row in own]
        picks = [candidate_of(record) if record else None for record in records]
        some = next((record for record in records if record), None)
        times = {}
        if some is not None:
            candidates = tuple(dict.fromkeys(pick for pick in picks if pick is not None))
            with torch.cuda.device(device), precision_of(some.problem.dtype):
                tensors = make_tensors(some.problem, device, lse=some.specialization.lse)
                common = (some.specialization, target, tensors)
                runs = [kernel_run(some.problem, candidate, *common) for candidate in candidates]
                measured = measure_interleaved(runs, device, rounds=ROUNDS)
            times = dict(zip(candidates, (measurement.ms for measurement in measured), strict=True))
        result += [
            msgspec.structs.replace(row, pick_ms=times[pick] if pick else None)
            for row, pick in zip(own, picks, strict=True)
        ]
    return result


def time_parts(shape: str) -> dict[str, float]:
    """Returns the median seconds of the parts of evaluating a default candidate, in this process."""
    import torch

    from flashtune.tuner.execution.gpu_jobs import prepare
    from flashtune.tuner.execution.inputs import make_tensors
    from flashtune.tuner.execution.timed_runs import kernel_run
    from flashtune.tuner.execution.timing import measure, once
    from flashtune.tuner.search.driver import search_scope
    from flashtune.verification.cases import Level
    from flashtune.verification.check import check_kernel

    (problem,) = parse_shape(shape)
    scope, device = search_scope(request_of(problem, Effort.QUICK)), torch.device("cuda", 0)
    candidate = scope.defaults()[0]
    common = (scope.specialization, scope.target)
    family = scope.spaces[0].family
    seconds: dict[str, list[float]] = {}

    def part(name: str, run: Callable[..., Any], *values: Any) -> Any:
        begun = time.perf_counter()
        result = run(*values)
        torch.cuda.synchronize()
        seconds.setdefault(name, []).append(time.perf_counter() - begun)
        return result

    part("start of the GPU", prepare, 0)
    for _ in range(REPEATS):
        tensors = part("tensors", make_tensors, problem, device)
        run = part("render, load, bind", kernel_run, problem, candidate, *common, tensors)
        part("one launch", once, run, device)
        for level in (Level.QUICK, Level.FULL):
            checked = (family, problem, candidate.config, *common, device, level)
            part(f"verify {level.value}", check_kernel, *checked)
        part("time", measure, run, device)
    first = {f"first {name}": values[0] for name, values in seconds.items()}
    return first | {name: statistics.median(values[1:]) for name, values in seconds.items() if values[1:]}


def jobs_of(lane: int, lanes: int) -> list[Job]:
    """Returns the jobs of one of several GPUs, the most important first."""
    first = tuple(range(lane, FIRST, lanes))
    every = tuple(range(lane, len(SHAPES), lanes))
    quick, default, thorough = ([Job((shape,), effort) for shape in first] for effort in Effort)
    again = [Job(every, Effort.DEFAULT, 2)]
    cold = [Job(first[:1], effort, cold=True) for effort in Effort]
    return [*quick, *default, *thorough, *again, *cold]


def searches_of(job: Job) -> set[tuple[str, Effort, int, bool]]:
    """Returns the shape, effort, turn and start of each search of a job."""
    return {(SHAPES[shape], job.effort, job.turn, job.cold) for shape in job.shapes}


class Lane:
    """Runs the jobs of one GPU, each in a new process."""

    def __init__(
        self,
        number: int,
        lanes: int,
        deadline: float,
        folder: Path,
        earlier: Sequence[Searched],
        finished: Callable[[], None],
    ) -> None:
        """Binds the GPU and its cores. No job starts that may end after the deadline.

        Jobs of `earlier` searches are left out. `finished` is called after each job.
        """
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, min(CORES, len(cores) // lanes))
        self.cores = cores[number * share : (number + 1) * share]
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        self._gpu = gpus[number] if gpus != [""] else str(number)
        self._place = number, lanes
        own = {SHAPES[shape] for shape in range(number, len(SHAPES), lanes)}
        self.searches = [row for row in earlier if row.shape in own]
        done = {(row.shape, row.effort, row.turn, row.cold) for row in self.searches}
        self._jobs = [job for job in jobs_of(number, lanes) if not searches_of(job) <= done]
        self._deadline, self._finished = deadline, finished
        self._folder = folder / str(number)
        self.parts: list[Parts] = []
        self.left_out: list[Job] = []

    def run(self) -> None:
        """Runs all jobs for which there is time, and times the picks."""
        self.parts += self._run("parts", jobs_of(*self._place)[0], list[Parts], 60.0) or ()
        for job in self._jobs:
            seconds = LONGEST[job.effort] * len(job.shapes)
            rows = None
            if time.time() + 0.6 * seconds < self._deadline - TIMING_SECONDS:
                rows = self._run("searches", job, list[Searched], seconds)
            if rows is None:
                self.left_out.append(job)
            self.searches += rows or ()
            self._finished()
        rows = self._run("time", None, list[Searched], 3 * TIMING_SECONDS)
        self.searches = rows or self.searches

    def _run(self, command: str, job: Job | None, kind: Any, seconds: float) -> Any:
        """Returns the result of a command in a new process with empty caches. None after an error."""
        with tempfile.TemporaryDirectory() as folder:
            self._folder.mkdir(parents=True, exist_ok=True)
            file, given = Path(folder, "result.json"), self._folder / "given.json"
            given.write_bytes(msgspec.json.encode(job if job else self.searches))
            caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "XDG_CACHE_HOME": folder, "HOME": folder}
            environment = {**os.environ, **caches, "CUDA_VISIBLE_DEVICES": self._gpu}
            words = [sys.executable, "-m", "benchmarks.search_efforts", command, "--given", str(given)]
            words += ["--cores", ",".join(map(str, self.cores)), "--began", repr(time.time())]
            try:
                subprocess.run(
                    [*words, "--save", str(file)], env=environment, check=True, timeout=2 * seconds
                )
            except subprocess.SubprocessError as error:
                print(f"GPU {self._gpu}: {command} {job}: {error}", flush=True)
            return msgspec.json.decode(file.read_bytes(), type=kind) if file.exists() else None


def run_all(minutes: float, earlier: Sequence[Searched], save: Path) -> None:
    """Runs everything on all GPUs, prints the figures, and saves the results."""
    import torch

    from benchmarks.saved import save as save_rows

    deadline, lanes = time.time() + 60 * minutes, torch.cuda.device_count()
    # Reads all files once, so that no search waits for the disk.
    imports = "import torch, flashtune.tuner.search.driver, flashtune.tuner.execution.gpu_jobs"
    subprocess.run([sys.executable, "-c", f"{imports}; torch.zeros(1, device='cuda')"], check=True)
    each: list[Lane] = []
    lock = threading.Lock()

    def results() -> Efforts:
        searches = tuple(row for lane in each for row in lane.searches)
        parts = tuple(row for lane in each for row in lane.parts)
        return Efforts(lanes, len(each[0].cores), searches, parts)

    def store() -> None:
        with lock:
            save_rows(save, results())

    with tempfile.TemporaryDirectory() as folder:
        each += (Lane(number, lanes, deadline, Path(folder), earlier, store) for number in range(lanes))
        threads = [threading.Thread(target=lane.run) for lane in each]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    store()
    for lane in each:
        for job in lane.left_out:
            print(f"left out or failed: {job}")
    print("\n".join(summary(results().searches)))


def line(row: Searched) -> str:
    """Returns a line about a search."""
    busy: defaultdict[str, float] = defaultdict(float)
    for name, begin, end in row.spans:
        busy[name] += end - begin
    return (
        f"{row.effort.value}{' cold' if row.cold else ''} {row.turn}{'' if row.alone else ' later'} "
        f"{row.problem}: {row.seconds:.1f} s (first result {row.first_seconds or math.nan:.1f} s), "
        f"{row.tried} tried, {row.best[-1][1] if row.best else math.nan:.4f} ms, {row.stop}; "
        + ", ".join(f"{name} {seconds:.1f}" for name, seconds in busy.items())
    )


def shares(searches: Sequence[Searched], effort: Effort) -> list[float]:
    """Returns the speed of an effort's picks over those of thorough searches, for shapes with both."""
    picks = {
        (row.problem, row.effort): row.pick_ms
        for row in searches
        if row.turn == 1 and not row.cold and row.pick_ms
    }
    return [
        picks[problem, Effort.THOROUGH] / ms
        for (problem, of), ms in picks.items()
        if of is effort and (problem, Effort.THOROUGH) in picks
    ]


def summary(searches: Sequence[Searched]) -> Iterator[str]:
    """Yields a line for each effort, and one about later shapes."""
    for effort in Effort:
        rows = [row for row in searches if row.effort is effort and row.alone and not row.cold]
        if rows:
            wall, over = [row.seconds for row in rows], shares(searches, effort)
            mean = math.exp(statistics.mean(map(math.log, over))) if over else math.nan
            yield (
                f"{effort.value}: {len(rows)} searches, median {statistics.median(wall):.1f} s, longest "
                f"{max(wall):.1f} s; share of thorough {mean:.4f}, worst {min(over, default=math.nan):.4f} "
                f"({len(over)} shapes)"
            )
    later = [row.first_seconds for row in searches if not row.alone and row.first_seconds]
    if later:
        yield f"later shapes: first result after {statistics.median(later):.1f} s, at most {max(later):.1f} s"


def main() -> None:
    """Runs one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("command", choices=("all", "searches", "parts", "time", "devices", "picks"))
    parser.add_argument("--minutes", type=float, default=8.0, help="time of all, from its start")
    parser.add_argument("--effort", type=Effort, default=Effort.DEFAULT)
    parser.add_argument("--shapes", default="0:1", help="a range of SHAPES")
    parser.add_argument("--given", type=Path, nargs="+", help="a job, searches to time, or runs of devices")
    parser.add_argument("--resume", type=Path, help="the saved file of an earlier run of all")
    parser.add_argument("--devices", default="0", help="indexes of GPUs, such as 0,1")
    parser.add_argument("--db", help="an empty PostgreSQL database: devices uses a worker for each GPU")
    parser.add_argument("--ray", action="store_true", help="devices uses the Ray cluster of this machine")
    parser.add_argument("--cores")
    parser.add_argument("--began", type=float)
    parser.add_argument("--save", type=Path, required=True)
    arguments = parser.parse_args()
    began = arguments.began or time.time()
    if arguments.command == "all":
        from benchmarks.saved import load

        earlier = load(arguments.resume, Efforts).rows.searches if arguments.resume else ()
        run_all(arguments.minutes, earlier, arguments.save)
        return
    if arguments.cores:
        os.sched_setaffinity(0, {*map(int, arguments.cores.split(","))})
    if arguments.command in ("devices", "picks"):
        _run_on_devices(arguments, began)
        return
    rows: list[Any] = []
    if arguments.command == "time":
        rows = timed(msgspec.json.decode(arguments.given[0].read_bytes(), type=list[Searched]))
        arguments.save.write_bytes(msgspec.json.encode(rows))
        return
    job = Job(tuple(range(len(SHAPES))[slice(*map(int, arguments.shapes.split(":")))]), arguments.effort)
    if arguments.given:
        job = msgspec.json.decode(arguments.given[0].read_bytes(), type=Job)
    with tempfile.TemporaryDirectory() as folder:
        results: Iterator[Any]
        if arguments.command == "parts":
            results = (Parts(SHAPES[shape], time_parts(SHAPES[shape])) for shape in job.shapes)
        else:
            results = searched(job, began, Path(folder, "records.sqlite"))
        for row in results:
            rows.append(row)
            print(line(row) if isinstance(row, Searched) else row, flush=True)
            # Searches that end later may exceed the time limit.
            arguments.save.write_bytes(msgspec.json.encode(rows))


def _run_on_devices(arguments: argparse.Namespace, began: float) -> None:
    """Runs the command `devices` or `picks`."""
    from benchmarks.device_searches import DeviceRun, comparison, queued_on, searched_on, with_picks
    from benchmarks.saved import save

    if arguments.command == "picks":
        given = [msgspec.json.decode(path.read_bytes(), type=DeviceRun) for path in arguments.given]
        runs = with_picks(given)
        save(arguments.save, runs)
        print("\n".join(comparison(runs)))
        return
    devices = [*map(int, arguments.devices.split(","))]
    with tempfile.TemporaryDirectory() as folder:
        place = devices, arguments.effort, began, Path(folder)
        run = queued_on(arguments.db, *place) if arguments.db else searched_on(*place, ray=arguments.ray)
    arguments.save.write_bytes(msgspec.json.encode(run))
    print(f"{len(run.searches)} shapes on {len(devices)} GPUs in {run.seconds:.1f} s")


if __name__ == "__main__":
    main()
