"""Tests of the benchmark of efforts: its plan, its processes, its tables and its pictures."""

import datetime
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import device_searches, efforts_report
from benchmarks.device_searches import DeviceRun, comparison, with_picks
from benchmarks.saved import Saved, Source
from benchmarks.search_efforts import FIRST, SHAPES, Efforts, Job, Lane, Parts, Searched, jobs_of, summary
from flashtune.db.codec import encode_record
from flashtune.tuner.search.request import Effort
from flashtune.tuner.workloads.shapes import parse_shape
from tests.support.records import make_record

SECONDS = {Effort.QUICK: 12.0, Effort.DEFAULT: 21.0, Effort.THOROUGH: 70.0}


def search(job: Job, shape: int, position: int) -> Searched:
    """A search. The second default one of shape 1 takes another config, 1% slower."""
    (problem,) = parse_shape(SHAPES[shape])
    differs = job.turn == 2 and shape == 1
    record = make_record(config="num_stages=2" if differs else "num_stages=3", kernel=None)
    return Searched(
        problem=problem.key,
        shape=SHAPES[shape],
        effort=job.effort,
        turn=job.turn,
        cold=job.cold,
        alone=position == 0,
        seconds=SECONDS[job.effort],
        first_seconds=4.0 if position == 0 else 0.9,
        tried=30,
        stop="nothing better is expected",
        spans=(("compile", 1.0, 4.5), ("compile", 1.5, 3.0), ("evaluate", 4.0, 6.0), ("finals", 9.0, 11.0)),
        best=((4.0, 1.2), (6.0, 1.0)),
        record=encode_record(record).decode(),
        pick_ms=1.0 if job.effort is Effort.THOROUGH else 1.01 if differs else 1.005,
    )


@pytest.fixture
def saved() -> Saved[Efforts]:
    jobs = [job for lane in range(4) for job in jobs_of(lane, 4)]
    searches = tuple(search(job, shape, at) for job in jobs for at, shape in enumerate(job.shapes))
    source = Source("all", datetime.date(2026, 11, 28), "NVIDIA H200", "2.13", "3.7.1", "580.1")
    return Saved(source, Efforts(4, 16, searches, (Parts("a", {"verify quick": 0.1, "time": 0.02}),)))


def test_all_shapes_are_searched_and_the_first_with_each_effort() -> None:
    jobs = [job for lane in range(4) for job in jobs_of(lane, 4)]
    count = [(job.effort, job.turn, shape) for job in jobs if not job.cold for shape in job.shapes]
    assert len(count) == len(set(count))
    for effort in Effort:
        assert {shape for of, turn, shape in count if (of, turn) == (effort, 1)} == {*range(FIRST)}
    assert {shape for of, turn, shape in count if turn == 2} == {*range(len(SHAPES))}
    assert {job.effort for job in jobs if job.cold} == {*Effort}


def test_tables_have_seconds_and_shares(saved: Saved[Efforts]) -> None:
    made = efforts_report.texts(saved)
    assert "| quick | 12 | 12.0 | 12.0 | 4.0 | 30 | 33% | 21% | 0.995 (12) | 0.995 |" in made["efforts"]
    assert "first result after 0.9 s" in made["efforts"]
    assert "| verify quick | 100 |" in made["search-parts"]
    assert "quick: 12 searches, median 12.0 s" in "\n".join(summary(saved.rows.searches))


def test_pictures_have_a_panel_for_each_shape_with_a_cold_start(saved: Saved[Efforts]) -> None:
    drawn = efforts_report.pictures(saved)
    for figure in drawn.values():
        assert [title.text for title in figure.layout.annotations] == list(SHAPES[:4])
    assert len(drawn["search-efforts"].data) == 4 * 6
    assert len(drawn["search-work"].data) == 4 * 4
    row = saved.rows.searches[0]
    assert efforts_report.busy(row, ("compile",), 2)[:3] == [(0.5, 0.0), (1.5, 0.75), (2.5, 1.0)]


def test_lane_saves_finished_searches_and_starts_none_that_may_end_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], *, env: dict[str, str], check: bool, timeout: float) -> None:
        commands.append(command)
        words = dict(zip(command[4::2], command[5::2], strict=True))
        given, save = Path(words["--given"]), Path(words["--save"])
        assert env["CUDA_VISIBLE_DEVICES"] == "0"
        rows: Any = [Parts("a", {})]
        if command[3] == "time":
            rows = msgspec.json.decode(given.read_bytes())
        elif command[3] == "searches":
            job = msgspec.json.decode(given.read_bytes(), type=Job)
            if job.turn == 2:
                raise subprocess.TimeoutExpired(command, timeout)
            rows = [search(job, shape, at) for at, shape in enumerate(job.shapes)]
        save.write_bytes(msgspec.json.encode(rows))

    monkeypatch.setattr(subprocess, "run", run)
    finished: list[None] = []
    lane = Lane(0, 4, time.time() + 80.0, tmp_path, (), lambda: finished.append(None))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    lane.run()
    assert {(row.effort, row.cold) for row in lane.searches} == {
        (effort, cold) for effort in (Effort.QUICK, Effort.DEFAULT) for cold in (False, True)
    }
    assert {job.effort for job in lane.left_out} == {Effort.THOROUGH, Effort.DEFAULT}
    assert [command[3] for command in commands] == ["parts", *["searches"] * 8, "time"]
    assert len(finished) == len(jobs_of(0, 4))

    late = Lane(0, 4, time.time() - 80.0, tmp_path, lane.searches, lambda: None)
    late.run()
    assert late.searches == lane.searches
    assert late.left_out == lane.left_out


def test_runs_on_devices_are_compared_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(search(Job((shape,), Effort.QUICK), shape, 0) for shape in range(2))
    runs = [DeviceRun("local", (0,), 16, 100.0, rows), DeviceRun("queue", (0, 1), 32, 50.0, rows)]

    def timed(given: Sequence[Searched]) -> list[Searched]:
        return [msgspec.structs.replace(row, pick_ms=2.0 if row.turn else 1.0) for row in given]

    monkeypatch.setattr(device_searches, "timed", timed)
    one, two = comparison(with_picks(runs))
    assert "100.0 s, 1.000 of the first; speed of the picks 1.0000" in one
    assert two.startswith("queue, GPUs 0,1, 32 cores: 50.0 s, 0.500 of the first; speed of the picks 0.5000")


def test_tables_of_runs_have_the_time_of_each_and_the_cost_of_picks(
    saved: Saved[Efforts], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(gpus: int, seconds: float, turn: int) -> DeviceRun:
        rows = tuple(search(Job((shape,), Effort.QUICK, turn), shape, 0) for shape in range(2))
        return DeviceRun("ray", tuple(range(gpus)), 32, seconds, rows)

    runs = [run(2, 45.0, 2), run(1, 90.0, 1)]
    monkeypatch.setattr(device_searches, "load", lambda *_: Saved(saved.source, runs))
    made = device_searches.texts()
    assert "| `--ray local`, 2 GPUs | 45 | 0.500 | 0.998 | 0.995 |" in made["device-searches"]
    assert "1 of 2 shapes got more than one config from 2 searches" in made["repeats"]
    assert f"| `{SHAPES[1]}` | 2 | 1.0050, 1.0100 | 0.50% |" in made["repeats"]
