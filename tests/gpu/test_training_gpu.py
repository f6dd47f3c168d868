"""Tests of the training example on a GPU: bf16 losses match those of SDPA."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
MID = ("--layers", "4", "--context", "512", "--batch", "8", "--steps", "80")
RUNS = {
    "tiny": ("--tiny", "--steps", "60"),
    "mid": MID,
    "dropout": (*MID, "--dropout", "0.1"),
    "checkpoint": (*MID, "--checkpoint"),
    "compile": (*MID, "--compile"),
    "all": (*MID, "--compile", "--checkpoint", "--dropout", "0.1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RUNS))
def test_losses_match_sdpa(name: str, tmp_path: Path) -> None:
    saved = tmp_path / "training.json"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    program = [sys.executable, "-m", "examples.training", *RUNS[name], "--save", str(saved)]
    said = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    report = json.loads(saved.read_bytes())
    assert report["difference"] <= report["tolerance"] < 0.2 * report["runs"][0]["losses"][0]
    for run in report["runs"]:
        first, last = (sum(part) / 10 for part in (run["losses"][:10], run["losses"][-10:]))
        assert last < 0.8 * first, run["name"]
        assert min(run["step_ms"]) > 0
    theirs, ours = (run["peak_bytes"] for run in report["runs"][:2])
    assert 0 < ours <= 1.1 * theirs
