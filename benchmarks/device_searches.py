"""Searches of all shapes on some GPUs of a host, and the picks of several such runs in one run.

`benchmarks.search_efforts` has the commands `devices` and `picks`. `python -m benchmarks.documents --write`
puts the tables into docs/fleets.md and docs/search.md.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.saved import RESULTS, Source, load, run_of
from benchmarks.search_efforts import SHAPES, Searched, request_of, timed
from flashtune.core.problem import Problem
from flashtune.core.record import Record
from flashtune.db.codec import decode_record
from flashtune.tuner.cli.output import table
from flashtune.tuner.search.executors.executor import longest_first
from flashtune.tuner.search.request import Effort, SearchRequest
from flashtune.tuner.workloads.shapes import parse_shape

SCRIPT = "benchmarks/device_searches.py"
SAVED = RESULTS / "nvidia-h200-device-searches.json.gz"
NAMES = {"local": "`--devices`", "queue": "a worker for each GPU", "ray": "`--ray local`"}

FAR = 0.03


class DeviceRun(msgspec.Struct, frozen=True):
    """Searches of all shapes by one executor, with empty caches and an empty database."""

    executor: str  # "local", "queue" or "ray".
    devices: tuple[int, ...]
    cores: int
    seconds: float  # From the start of the process to the last selection.
    searches: tuple[Searched, ...]  # With the times of the picks, if they were timed.


def searched_on(
    devices: Sequence[int], effort: Effort, began: float, folder: Path, *, ray: bool = False
) -> DeviceRun:
    """Searches all shapes on GPUs as one `flashtune search` does, or as one with `--ray local` does."""
    os.environ |= _caches(folder)
    if ray:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    from flashtune.tuner.execution.processes import start_server

    if not ray:
        start_server()
    from flashtune.db.store import open_store
    from flashtune.tuner.execution.cpus import available_cpus
    from flashtune.tuner.fleet.ray_cluster import open_ray
    from flashtune.tuner.search.executors.local import open_local

    requests, rows = _requests(effort, len(devices)), []
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(open_store(str(folder / "records.sqlite")))
        executor = stack.enter_context(
            open_ray(store, "local", requests[0].target) if ray else open_local(store, devices)
        )
        for result in executor.run(requests, lambda _: None):
            row = _row(result.problem, effort, result.seconds, result.counts.tried, result.best)
            rows.append(msgspec.structs.replace(row, stop=result.stop.value))
            print(f"{time.time() - began:.1f} s: {row.problem}: {row.seconds:.1f} s, {row.tried} tried")
        seconds = time.time() - began
    return DeviceRun("ray" if ray else "local", tuple(devices), available_cpus(), seconds, tuple(rows))


def queued_on(url: str, devices: Sequence[int], effort: Effort, began: float, folder: Path) -> DeviceRun:
    """Returns the run of all shapes by a worker for each GPU, through a queue in an empty database.

    The cores are divided among the workers.
    """
    from flashtune.db.queue import Queue
    from flashtune.tuner.execution.cpus import available_cpus
    from flashtune.tuner.fleet.jobs import queue_versions, spec_of

    requests, cores = _requests(effort, len(devices)), available_cpus()
    with Queue(url) as queue, contextlib.ExitStack() as stack:
        queue.enqueue([spec_of(request) for request in requests], queue_versions())
        workers = []
        for device in devices:
            words = ["worker", "--db", url, "--exit-when-empty", "--devices", str(device)]
            words += ["--jobs", str(cores // len(devices))]
            log = stack.enter_context((folder / f"worker-{device}").open("w"))
            workers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "flashtune.tuner.cli", *words],
                    env={**os.environ, **_caches(folder / str(device))},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
        for worker in workers:
            worker.wait()
        seconds = time.time() - began
        print(*((folder / f"worker-{device}").read_text() for device in devices), sep="\n")
        target = requests[0].target.name
        best = {row.record.problem: row.record for row in queue.selections(target)}
        rows = tuple(
            _row(request.problem, effort, 0.0, len(queue.records(request.problem, target)), found)
            for request in requests
            if (found := best.get(request.problem))
        )
        return DeviceRun("queue", tuple(devices), cores, seconds, rows)


def _caches(folder: Path) -> dict[str, str]:
    return {"TRITON_CACHE_DIR": f"{folder}/triton", "XDG_CACHE_HOME": str(folder)}


def _requests(effort: Effort, gpus: int) -> list[SearchRequest]:
    """Returns the searches of all shapes in the order in which `flashtune search` starts them."""
    requests = [request_of(problem, effort) for shape in SHAPES for problem in parse_shape(shape)]
    return requests if gpus == 1 else longest_first(requests)


def _row(problem: Problem, effort: Effort, seconds: float, tried: int, best: Record | None) -> Searched:
    from flashtune.db.codec import encode_record, without_gpu

    shape = next(shape for shape in SHAPES if problem in parse_shape(shape))
    return Searched(
        problem=problem.key,
        shape=shape,
        effort=effort,
        turn=1,
        cold=False,
        alone=False,
        seconds=seconds,
        first_seconds=None,
        tried=tried,
        stop="",
        spans=(),
        best=(),
        record=encode_record(without_gpu(best)).decode() if best else None,
    )


def with_picks(runs: Sequence[DeviceRun]) -> list[DeviceRun]:
    """Returns runs with the times of their picks. Those of a shape are timed interleaved on the first GPU."""
    turns = [msgspec.structs.replace(row, turn=turn) for turn, run in enumerate(runs) for row in run.searches]
    rows = timed(turns)
    return [
        msgspec.structs.replace(run, searches=tuple(row for row in rows if row.turn == turn))
        for turn, run in enumerate(runs)
    ]


def speeds_of(run: DeviceRun, first: DeviceRun) -> list[float]:
    """Returns the speed of each pick over that of another run, for shapes with a pick in both."""
    times = {row.problem: row.pick_ms for row in first.searches}
    return [ms / row.pick_ms for row in run.searches if row.pick_ms and (ms := times.get(row.problem))]


def comparison(runs: Sequence[DeviceRun]) -> Iterator[str]:
    """Yields a line about each run: its time and the speed of its picks, over those of the first."""
    for run in runs:
        speeds = speeds_of(run, runs[0])
        mean, worst = statistics.geometric_mean(speeds), min(speeds)
        yield (
            f"{run.executor}, GPUs {','.join(map(str, run.devices))}, {run.cores} cores: "
            f"{run.seconds:.1f} s, {run.seconds / runs[0].seconds:.3f} of the first; "
            f"speed of the picks {mean:.4f} of the first, worst {worst:.4f} ({len(speeds)} shapes)"
        )


def texts() -> dict[str, str]:
    """Returns the tables by name."""
    saved = load(SAVED, list[DeviceRun])
    return {
        "device-searches": "\n".join(_runs(saved.source, saved.rows)),
        "repeats": "\n".join(_repeats(saved.source, saved.rows)),
    }


def _runs(source: Source, runs: Sequence[DeviceRun]) -> Iterator[str]:
    """A row for each run. The first is the one on a single GPU."""
    yield f"{run_of(source, f', {runs[0].cores} cores')}, {len(runs[0].searches)} shapes:"
    yield ""
    first = min(runs, key=lambda run: len(run.devices))
    rows = []
    for run in sorted(runs, key=lambda run: (len(run.devices), run.executor)):
        speeds = speeds_of(run, first)
        rows.append(
            (
                f"{NAMES[run.executor]}, {len(run.devices)} GPU{'s' * (len(run.devices) > 1)}",
                f"{run.seconds:.0f}",
                f"{run.seconds / first.seconds:.3f}",
                f"{statistics.geometric_mean(speeds):.3f}",
                f"{min(speeds):.3f}",
            )
        )
    yield from table(
        ("searches", "seconds", "over one GPU", "speed of the picks over one GPU, mean", "worst"), rows
    )


def _repeats(source: Source, runs: Sequence[DeviceRun]) -> Iterator[str]:
    """A row for each shape of which searches selected different configs, the most expensive first."""
    rows, costs = [], []
    for key in dict.fromkeys(row.problem for row in runs[0].searches):
        own = [
            row for run in runs for row in run.searches if row.problem == key and row.pick_ms and row.record
        ]
        times = [row.pick_ms for row in own if row.pick_ms]
        records = [decode_record(str(row.record).encode()) for row in own]
        configs = {(record.family, str(record.config)) for record in records}
        costs += [ms / min(times) - 1 for ms in times]
        if len(configs) > 1:
            cost = max(times) / min(times) - 1
            names = f"`{own[0].shape}`", str(len(configs)), f"{min(times):.4f}, {max(times):.4f}"
            rows.append((cost, (*names, f"{cost:.2%}")))
    yield (
        f"{run_of(source)}, `--effort quick`: {len(rows)} of {len(runs[0].searches)} shapes got more than "
        f"one config from {len(runs)} searches. A pick costs {statistics.mean(costs):.2%} over the fastest "
        f"one in the mean of all {len(costs)}, and {sum(cost > FAR for cost in costs)} of them more than "
        f"{FAR:.0%}."
    )
    yield ""
    heads = ("shape", "configs", "ms of the fastest and the slowest", "cost")
    yield from table(heads, [row for _, row in sorted(rows, reverse=True)])
