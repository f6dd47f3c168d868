"""Workers, drivers and connections are killed at random moments: nothing is lost, doubled or left open."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.fleet_report import TrialRow
from benchmarks.saved import load
from tests.db.postgres import require

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("trial", ["workers", "local", "queue", "lost"])
def test_faults_lose_and_double_nothing(
    trial: str, tmp_path: Path, fuzz_count: Callable[[int, int], int]
) -> None:
    require()
    file, kills = tmp_path / "rows.json", fuzz_count(12, 200)
    command = [sys.executable, "-m", "benchmarks.fleet_trials", trial, "--save", str(file)]
    command += ["--kills", str(kills)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr
    (row,) = load(file, list[TrialRow]).rows
    assert (row.lost, row.doubled, row.timed_twice, row.unfinished) == (0, 0, 0, 0)
    assert row.moments >= (1 if trial == "lost" else kills)
    assert row.records >= 26 * row.shapes
