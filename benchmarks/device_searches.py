"""Searches of all shapes on some GPUs of a host, and the picks of several such runs in one run.

`benchmarks.search_efforts` has the commands `devices` and `picks`.
"""

import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.search_efforts import SHAPES, Searched, request_of, timed
from flashtune.tuner.search.request import Effort
from flashtune.tuner.workloads.shapes import parse_shape


class DeviceRun(msgspec.Struct, frozen=True):
    """Searches of all shapes by one executor, with empty caches and an empty database."""

    devices: tuple[int, ...]
    cores: int
    seconds: float  # From the start of the process to the last selection.
    searches: tuple[Searched, ...]  # With the times of the picks, if they were timed.


def searched_on(devices: Sequence[int], effort: Effort, began: float, folder: Path) -> DeviceRun:
    """Searches all shapes on GPUs as one `flashtune search` does."""
    os.environ |= {"TRITON_CACHE_DIR": f"{folder}/triton", "XDG_CACHE_HOME": str(folder)}
    from flashtune.tuner.execution.processes import start_server

    start_server()
    from flashtune.db.codec import encode_record, without_gpu
    from flashtune.db.store import open_store
    from flashtune.tuner.execution.cpus import available_cpus
    from flashtune.tuner.search.executors.local import open_local

    shapes = {problem: shape for shape in SHAPES for problem in parse_shape(shape)}
    requests = [request_of(problem, effort) for problem in shapes]
    rows = []
    with open_store(str(folder / "records.sqlite")) as store, open_local(store, devices) as executor:
        for result in executor.run(requests, lambda _: None):
            best = result.best
            row = Searched(
                problem=result.problem.key,
                shape=shapes[result.problem],
                effort=effort,
                turn=1,
                cold=False,
                alone=False,
                seconds=result.seconds,
                first_seconds=None,
                tried=result.counts.tried,
                stop=result.stop.value,
                spans=(),
                best=(),
                record=encode_record(without_gpu(best)).decode() if best else None,
            )
            rows.append(row)
            print(
                f"{time.time() - began:.1f} s: {row.problem}: {row.seconds:.1f} s, {row.tried} tried",
                flush=True,
            )
        seconds = time.time() - began
    return DeviceRun(tuple(devices), available_cpus(), seconds, tuple(rows))


def with_picks(runs: Sequence[DeviceRun]) -> list[DeviceRun]:
    """Returns runs with the times of their picks. Those of a shape are timed interleaved on the first GPU."""
    turns = [msgspec.structs.replace(row, turn=turn) for turn, run in enumerate(runs) for row in run.searches]
    rows = timed(turns)
    return [
        msgspec.structs.replace(run, searches=tuple(row for row in rows if row.turn == turn))
        for turn, run in enumerate(runs)
    ]


def comparison(runs: Sequence[DeviceRun]) -> Iterator[str]:
    """Yields a line about each run: its time and the speed of its picks, over those of the first."""
    first = {row.problem: row.pick_ms for row in runs[0].searches}
    for run in runs:
        speeds = [ms / row.pick_ms for row in run.searches if row.pick_ms and (ms := first.get(row.problem))]
        mean = math.exp(statistics.mean(map(math.log, speeds))) if speeds else math.nan
        yield (
            f"GPUs {','.join(map(str, run.devices))}, {run.cores} cores: {run.seconds:.1f} s, "
            f"{run.seconds / runs[0].seconds:.3f} of the first; speed of the picks {mean:.4f} of the first, "
            f"worst {min(speeds, default=math.nan):.4f} ({len(speeds)} shapes)"
        )
