"""Tests of the run of FlashAttention's own tests: samples, outcomes and the report."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.integrations import flash_attn_suite as suite
from benchmarks.saved import ROOT

FILE = """
import pytest
import torch
from flash_attn import flash_attn_func
from flash_attn.cute import flash_attn_func as newest

@pytest.mark.parametrize("mod", [None, abs])
@pytest.mark.parametrize("a,b", [(1, 2), (3, 4), (5, 6)])
def test_sums(a, b, mod):
    if a == 5:
        pytest.skip()
    q = torch.ones(1, a, 1, 8, dtype=torch.float64)
    assert b == a + 1
    assert flash_attn_func(q, q, q).shape == q.shape
    newest(q, q, q, score_mod=mod)

def test_fails():
    raise RuntimeError("as expected")

def test_flash3_bw_compatibility():
    raise AssertionError
"""


def report(folder: Path, *options: str) -> dict[str, Any]:
    """Returns the report of a run of a file, in another process."""
    (folder / "tests").mkdir()
    (folder / "tests/test_flash_attn.py").write_text(FILE)
    out = folder / "out.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.integrations.flash_attn_suite",
        str(folder),
        "--out",
        str(out),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, *options], cwd=ROOT, env=environment, check=True, capture_output=True)
    rows: dict[str, Any] = json.loads(out.read_bytes())["rows"]
    return rows


@pytest.mark.slow
def test_processes_share_the_cases_and_outcomes_are_counted(tmp_path: Path) -> None:
    rows = report(tmp_path, "--workers", "2")
    counts = {name: rows[name] for name in suite.OUTCOMES}
    assert counts == {"passed": 2, "refused": 2, "failed": 1, "skipped": 2}
    assert list(rows["refusals"].values()) == [2]
    assert "score_mod" in next(iter(rows["refusals"]))
    assert rows["failures"] == {"tests/test_flash_attn.py::test_fails": "RuntimeError: as expected"}
    assert rows["sizes"] == {"test_sums": 6}
    assert list(rows["left_out"]) == ["test_flash3_bw_compatibility"]
