"""Tests of the run of PyTorch's own attention tests: samples, lost processes and the report."""

import os
import subprocess
import sys

import pytest

from benchmarks.integrations import torch_sdpa_suite as suite
from benchmarks.saved import ROOT, Saved, load

FILE = """
import functools
import os
import unittest
from pathlib import Path

RAN = Path(__file__).with_suffix(".ran")

class TestThings(unittest.TestCase):
    def test_passes(self, size):
        if size == 2:
            self.skipTest("not here")

    @unittest.expectedFailure
    def test_expected(self):
        self.fail()

    def test_fails(self):
        self.assertEqual(1, 2, "as expected")

    def test_fails_second_time(self):
        if RAN.exists():
            raise ValueError("no longer")
        RAN.touch()

    def test_exits(self):
        os._exit(3)

own = dict(vars(TestThings))
passes = own.pop("test_passes")
for size in (1, 2, 3):
    own[f"test_passes_size_{size}"] = functools.partialmethod(passes, size)
TestThingsCPU = type("TestThingsCPU", (unittest.TestCase,), own)
del TestThings
"""


@pytest.fixture(scope="module", name="saved")
def saved_report(tmp_path_factory: pytest.TempPathFactory) -> Saved[suite.Report]:
    """The report of a run of a file, in other processes."""
    folder = tmp_path_factory.mktemp("suite")
    file, out = folder / "test_transformers.py", folder / "out.json"
    file.write_text(FILE)
    command = [sys.executable, "-m", "benchmarks.integrations.torch_sdpa_suite", str(file)]
    command += ["--workers", "1", "--seconds", "100", "--save", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    return load(out, suite.Report)


@pytest.mark.slow
def test_outcomes_are_counted(saved: Saved[suite.Report]) -> None:
    report = saved.rows
    assert (report.cases, report.skipped, report.passed_without, report.passed_with) == (6, 1, 4, 3)
    assert report.functions["test_passes"] == (2, 2, 0)
    assert "torch_sdpa_suite" in saved.source.command


@pytest.mark.slow
def test_failures_name_their_reason(saved: Saved[suite.Report]) -> None:
    failed = saved.rows.failed_without
    assert failed["TestThingsCPU.test_fails"] == "AssertionError: 1 != 2 : as expected"
    assert failed["TestThingsCPU.test_fails_second_time"] == "passed once: ValueError: no longer"
    (lost,) = saved.rows.failures.items()
    assert lost[0] == "TestThingsCPU.test_exits"
    assert lost[1].startswith("stopped: its process ended with exit code 3")
