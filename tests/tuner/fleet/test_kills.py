"""Workers and their connections are killed at random moments: nothing is lost, doubled or left open."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from flashtune.core.record import Record
from flashtune.db.queue import Queue
from flashtune.db.store import open_store
from tests.tuner.fleet import killed_workers

PROGRAM = Path(killed_workers.__file__)
ROOT = PROGRAM.parents[3]


def finals_run(record: Record) -> str | None:
    """The run of finals that timed a record, None if it was timed alone."""
    peers = record.measurement.peers if record.measurement else ()
    return peers[0].name if peers else None


@pytest.mark.slow
def test_kills_lose_and_double_nothing(
    postgres: str, tmp_path: Path, fuzz_count: Callable[[int, int], int]
) -> None:
    log = tmp_path / "stored.txt"
    log.touch()
    command = [sys.executable, "-m", "tests.tuner.fleet.killed_workers", postgres, str(log), "44"]
    command.append(str(fuzz_count(12, 200)))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["open"] == 0, counts
    with Queue(postgres) as queue:
        assert {row.state for row in queue.jobs()} <= {"done", "failed"}
    with open_store(postgres) as store:
        records = [entry.record for entry in store.records()]
        selections = [entry.record for entry in store.selections()]
    # All results that a worker saw stored are there.
    stored = Counter(f"{record.problem.key} {record.ms!r}" for record in records)
    told = log.read_text().splitlines()
    assert told
    assert [line for line in told if line.count(" ") == 1 and line not in stored] == []
    # Each candidate was timed once before finals, and once in each run of finals.
    timings = Counter((record.problem.key, record.config, finals_run(record)) for record in records)
    assert set(timings.values()) == {1}
    problems = {record.problem.key for record in selections}
    assert len(selections) == len(problems) == killed_workers.SHAPES
    alone = Counter(record.problem.key for record in records if finals_run(record) is None)
    assert set(alone.values()) == {24}
    assert all(finals_run(record) for record in selections)
