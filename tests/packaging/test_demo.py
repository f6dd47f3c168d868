"""Tests of `make demo` without a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

DEMO = Path(__file__).parents[2] / "scripts" / "demo.sh"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="takes the path of machines without a GPU")
def test_demo_prints_its_results_and_paths(tmp_path: Path, own_database: Path) -> None:
    result = subprocess.run(
        [DEMO, Path(sys.executable).parent],
        cwd=tmp_path,
        env={**os.environ, "DEMO_TRIALS": "2"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "predicted" in result.stdout
    assert str(own_database) in result.stdout
    rendered = (tmp_path / "out" / "demo_kernel.py").read_text()
    assert re.search(r"^@(triton|gluon)\.jit\ndef forward_\w+\($", rendered, flags=re.MULTILINE)
