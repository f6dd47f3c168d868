"""Default calls are not slower than SDPA, and as accurate, whatever their shapes, masks and strides."""

import subprocess
import sys

import pytest

from benchmarks.saved import ROOT
from tests.gpu.marks import ON_HOPPER

pytestmark = [pytest.mark.gpu, pytest.mark.alone, ON_HOPPER]


def test_default_calls_are_not_slower_than_sdpa() -> None:
    command = [sys.executable, "-m", "benchmarks.kernels.random_calls"]
    answer = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert answer.returncode == 0, answer.stdout + answer.stderr
