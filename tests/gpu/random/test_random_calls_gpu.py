"""Default calls are not slower than SDPA, and as accurate, whatever their shapes, masks and strides."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.saved import ROOT
from tests.gpu.marks import ON_HOPPER

pytestmark = [pytest.mark.gpu, pytest.mark.alone, ON_HOPPER]


def test_default_calls_are_not_slower_than_sdpa(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.kernels.random_calls", "--out", str(tmp_path / "calls.json")]
    answer = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert answer.returncode == 0, answer.stdout + answer.stderr
