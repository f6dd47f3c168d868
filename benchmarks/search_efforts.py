"""Measures searches of each effort on a GPU: wall clock, start-up, seconds of each part, and the picks' cost.

    python -m benchmarks.search_efforts run --effort quick --shapes 0:12 --save quick.json
    python -m benchmarks.search_efforts run --effort default --shapes 0:24 --save first.json
    python -m benchmarks.search_efforts sequence --effort quick --shapes 0:4 --save sequence.json
    python -m benchmarks.search_efforts time quick.json thorough.json --save timed.json
    python -m benchmarks.search_efforts parts --shapes 0:1

`run` searches each shape in a new process with an empty database and empty caches. `sequence` searches all
shapes in one process. `time` times all picks of a shape in one run, and compares each file with the last one.
`parts` times the parts of evaluating one candidate. Times of files from different machines can be compared by
`time`.
"""

import argparse
import itertools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from flashtune.core.problem import Problem
from flashtune.tuner.search.request import BUDGETS, Effort, Phase, Progress, SearchRequest
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
REPEATS = 8


class Searched(msgspec.Struct, frozen=True, kw_only=True):
    """One search on the GPU."""

    problem: str  # The problem's key.
    shape: str
    effort: Effort
    wall_seconds: float  # From the start of the process to the selection; 0 in a sequence.
    search_seconds: float  # From the start of the search to the selection.
    first_seconds: float | None  # From the same start as the total to the first result.
    tried: int
    stop: str
    # Seconds of the GPU process: busy with candidates, with the finals, with delayed verifications.
    gpu_seconds: dict[str, float]
    compiler_seconds: float  # Sum of all compilations, as all processes together took.
    # Each improvement of the best first time: seconds, ms.
    best: tuple[tuple[float, float], ...]
    record: str | None  # The selected record, encoded.


class Timed(msgspec.Struct, frozen=True):
    """Times of the picks of several files, in one run."""

    problem: str  # The problem's key.
    ms: tuple[float, ...]  # One for each file; not a number where a search has no kernel.


class Probe:
    """Wraps the workers of a search, and adds up the seconds of their jobs."""

    def __init__(self, equipment: Any) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._idle = time.monotonic()
        compiler, measurer = equipment.compiler, equipment.measurer
        self._wrap(compiler, "submit", "compile", serial=False)
        for name in ("evaluate", "finals", "evaluate_delayed"):
            self._wrap(measurer, name, name, serial=True)

    def _wrap(self, worker: Any, name: str, label: str, *, serial: bool) -> None:
        original = getattr(worker, name)

        def timed(*arguments: Any) -> Future[Any]:
            begun = time.monotonic()
            job: Future[Any] = original(*arguments)

            def add(_: Future[Any]) -> None:
                now = time.monotonic()
                # The GPU process has one job at a time, in order.
                self.seconds[label] += now - (max(begun, self._idle) if serial else begun)
                self._idle = max(self._idle, now) if serial else self._idle

            job.add_done_callback(add)
            return job

        setattr(worker, name, timed)


def request_of(problem: Problem, effort: Effort) -> SearchRequest:
    """Returns the request of a search on this machine's first GPU."""
    from flashtune.core.target import device_target

    return SearchRequest(problem=problem, target=device_target(0), device=0, budget=BUDGETS[effort])


def searched(shapes: list[str], effort: Effort, began: float, database: Path) -> Iterator[Searched]:
    """Searches shapes with the same workers, and yields their results."""
    from flashtune.tuner.execution.processes import start_server

    start_server()
    from flashtune.db.codec import encode_record
    from flashtune.db.store import open_store
    from flashtune.tuner.execution.backend import open_workers
    from flashtune.tuner.search.driver import run_search

    with open_store(str(database)) as store, open_workers(0) as equipment:
        probe = Probe(equipment)
        requests = [request_of(problem, effort) for shape in shapes for problem in parse_shape(shape)]
        for shape, request, following in itertools.zip_longest(shapes, requests, requests[1:]):
            problem = request.problem
            probe.seconds.clear()
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

            result = run_search(request, store, observe, equipment, following=following)
            seconds = dict(probe.seconds)
            yield Searched(
                problem=problem.key,
                shape=shape,
                effort=effort,
                wall_seconds=time.time() - began,
                search_seconds=result.seconds,
                first_seconds=first[0] if first else None,
                tried=result.counts.tried,
                stop=result.stop.value,
                compiler_seconds=seconds.pop("compile", 0.0),
                gpu_seconds=seconds,
                best=tuple(best),
                record=encode_record(result.best).decode() if result.best else None,
            )
            began = time.time()


def run_alone(shape: str, effort: Effort) -> Searched:
    """Searches one shape in a new process, with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "XDG_CACHE_HOME": folder, "HOME": folder}
        file = Path(folder, "result.json")
        command = [sys.executable, "-m", "benchmarks.search_efforts", "one", "--shape", shape]
        command += ["--effort", effort.value, "--began", repr(time.time()), "--save", str(file)]
        subprocess.run(command, env={**os.environ, **caches}, check=True)
        (result,) = msgspec.json.decode(file.read_bytes(), type=list[Searched])
    return result


def time_picks(files: list[Path]) -> list[Timed]:
    """Times the picks of all files in one run for each shape."""
    import torch

    from flashtune.core.target import device_target
    from flashtune.db.codec import decode_record
    from flashtune.tuner.execution.timed_runs import run_finals
    from flashtune.tuner.search.selection import candidate_of

    columns = [
        {row.problem: row for row in msgspec.json.decode(file.read_bytes(), type=list[Searched])}
        for file in files
    ]
    rows: list[Timed] = []
    for key in columns[-1]:
        stored = [column[key].record if key in column else None for column in columns]
        records = [decode_record(raw.encode()) if raw else None for raw in stored]
        known = [record for record in records if record is not None]
        candidates = tuple(dict.fromkeys(map(candidate_of, known)))
        if not candidates:
            continue
        measured = run_finals(
            known[0].problem, candidates, known[0].specialization, device_target(0), torch.device("cuda", 0)
        )
        times = dict(zip(candidates, (measurement.ms for measurement in measured), strict=True))
        rows.append(Timed(key, tuple(times[candidate_of(r)] if r else math.nan for r in records)))
        print(rows[-1], flush=True)
    for number, file in enumerate(files[:-1]):
        pairs = [(row.ms[-1], row.ms[number]) for row in rows if not math.isnan(sum(row.ms))]
        shares = [last / ms for last, ms in pairs]
        differ = sum(last != ms for last, ms in pairs)
        mean = math.exp(statistics.mean(map(math.log, shares)))
        print(
            f"{file}: speed over {files[-1]}: geometric mean {mean:.4f}, worst {min(shares):.4f}; "
            f"{differ} of {len(pairs)} picks differ; mean cost of the slower pick "
            f"{statistics.mean(max(pair) / min(pair) - 1 for pair in pairs):.3%}, "
            f"largest {max(max(pair) / min(pair) - 1 for pair in pairs):.3%}"
        )
    return rows


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


def summary(rows: list[Searched]) -> str:
    """Returns a line for each search, and one with their medians."""
    lines = [
        f"{row.problem}: {row.wall_seconds:.1f} s (first result {row.first_seconds or math.nan:.1f} s), "
        f"{row.tried} tried, {row.best[-1][1] if row.best else math.nan:.4f} ms, {row.stop}; "
        f"GPU {', '.join(f'{name} {value:.1f} s' for name, value in row.gpu_seconds.items())}; "
        f"compilers {row.compiler_seconds:.0f} s"
        for row in rows
    ]
    wall = [row.wall_seconds for row in rows]
    lines.append(f"median {statistics.median(wall):.1f} s, longest {max(wall):.1f} s")
    return "\n".join(lines)


def main() -> None:
    """Runs one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("command", choices=("run", "sequence", "one", "time", "parts"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--effort", type=Effort, default=Effort.DEFAULT)
    parser.add_argument("--shapes", default="0:12", help="a range of SHAPES")
    parser.add_argument("--shape")
    parser.add_argument("--began", type=float)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    start, _, end = arguments.shapes.partition(":")
    shapes = list(SHAPES[int(start or 0) : int(end or len(SHAPES))])
    rows: list[Any] = []

    def save() -> None:
        if arguments.save:
            arguments.save.write_bytes(msgspec.json.encode(rows))

    if arguments.command == "time":
        rows += time_picks(arguments.files)
    elif arguments.command == "parts":
        for shape in shapes:
            rows.append({"shape": shape, **time_parts(shape)})
            print(msgspec.json.format(msgspec.json.encode(rows[-1])).decode())
    elif arguments.command == "run":
        for shape in shapes:
            rows.append(run_alone(shape, arguments.effort))
            print(summary(rows[-1:]).splitlines()[0], flush=True)
            save()
        print(summary(rows))
    else:
        shapes = [arguments.shape] if arguments.command == "one" else shapes
        with tempfile.TemporaryDirectory() as folder:
            began = arguments.began or time.time()
            for row in searched(shapes, arguments.effort, began, Path(folder, "records.sqlite")):
                rows.append(row)
                save()
        if arguments.command == "sequence":
            print(summary(rows))
    save()


if __name__ == "__main__":
    main()
