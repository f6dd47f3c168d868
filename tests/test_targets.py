"""Tests that `make test-all` and `make test-gpu` run every test."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def commands(target: str) -> list[str]:
    """Returns the commands of a target that run tests or verify kernels, without running them."""
    # Without the options of a make that runs this test.
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    command = ["make", "--dry-run", "--no-print-directory", target]
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return [line for line in made.stdout.splitlines() if re.search(r"-m pytest|flashtune verify", line)]


def test_test_all_and_test_gpu_run_every_test() -> None:
    runs = commands("test-all")

    assert len(runs) == 7
    assert not [run for run in runs if "--sample" in run or " -k " in run]
    markers = [(run.split()[-1], re.findall(r" -m '([^']*)'", run)) for run in runs if "-m pytest" in run]
    assert ("tests", ["not gpu"]) in markers
    assert ("tests/interpreter", []) in markers
    assert [selected for _, selected in markers if selected] == [["not gpu"]]
    on_gpu = [re.findall(r" -m '([^']*)'", run) for run in commands("test-gpu")]
    assert on_gpu == [["gpu and not alone"], ["gpu and alone"]]


def test_test_runs_the_same_commands_as_test_all_with_samples() -> None:
    runs = commands("test")

    assert len(runs) == 7
    assert all("--sample" in run for run in runs)
    assert [run.split()[-1] for run in runs if "pytest" in run] == [
        run.split()[-1] for run in commands("test-all") if "pytest" in run
    ]
