"""Tests of the examples: losses match those of SDPA, and served tokens those of a loop."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.training.data import LANGUAGES, NOISE, floor, sequences
from examples.training.report import difference, median_ms, tolerance
from examples.training.trainer import Run

ROOT = Path(__file__).parents[2]


def run(*losses: float, step_ms: tuple[float, ...] = ()) -> Run:
    return Run("any", losses, step_ms, 0)


@pytest.mark.slow
def test_losses_of_both_runs_agree(tmp_path: Path) -> None:
    saved, plot = tmp_path / "training.json", tmp_path / "training.html"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONSAFEPATH", None)
    program = [sys.executable, "-m", "examples.training", "--tiny", "--save", str(saved), "--plot", str(plot)]
    said = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    document = json.loads(saved.read_bytes())
    losses = {entry["name"]: entry["losses"] for entry in document["runs"]}
    assert list(losses) == ["torch SDPA", "flashtune", "another SDPA"]
    assert losses["flashtune"] == pytest.approx(losses["torch SDPA"], abs=1e-4)
    assert losses["flashtune"][0] == pytest.approx(
        math.log(document["setting"]["shape"]["vocabulary"]), abs=0.2
    )
    assert sum(losses["flashtune"][3:]) < sum(losses["flashtune"][:3]) - 0.3
    assert document["difference"] <= document["tolerance"] == 1e-4
    assert f"differ by {document['difference']:.3g} at most" in said.stdout
    assert "losses differ by" in plot.read_text(encoding="utf-8")


def test_sequences_are_drawn_from_a_few_languages() -> None:
    tokens = sequences(64, 600, 64, 3)
    assert torch.equal(tokens, sequences(64, 600, 64, 3))
    assert not torch.equal(tokens, sequences(64, 600, 64, 4))
    assert (int(tokens.min()), int(tokens.max())) == (0, 63)
    pairs = torch.zeros(64, 64).index_put_(
        (tokens[:, :-1].flatten(), tokens[:, 1:].flatten()), torch.ones(()), accumulate=True
    )
    share = pairs.topk(LANGUAGES).values.sum() / pairs.sum()
    assert 1 - NOISE < share < 1 - NOISE + 0.05
    assert 0 < floor(64) < math.log(LANGUAGES)


def test_loss_tolerance() -> None:
    first, other = run(4.0, 3.0, 2.0), run(4.0, 3.25, 1.9)
    assert difference(first, other) == pytest.approx(0.25)
    assert math.isnan(difference(first, run(4.0, math.nan, 2.0)))
    assert tolerance(first, 0.2, in_bf16=True) == pytest.approx(0.6)
    assert tolerance(first, 0.0, in_bf16=True) == 4.0 / 256
    assert tolerance(first, 0.0, in_bf16=False) == 1e-4


def test_median_excludes_first_steps() -> None:
    assert median_ms(run(step_ms=(900.0,) * 10 + (3.0, 1.0, 2.0) * 10)) == 2.0
    assert median_ms(run(step_ms=(900.0, 3.0))) == 3.0


@pytest.mark.slow
def test_tokens_match_the_reference_loop_with_few_pages() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONSAFEPATH", None)
    program = [sys.executable, "-m", "examples.serving", "--pages", "2", "--requests", "4"]
    said = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    match = re.search(r"^0 of (\d+) tokens differ", said.stdout, re.MULTILINE)
    assert match is not None
    assert int(match.group(1)) >= 10
    assert "at most 2 of 2 pages" in said.stdout
    assert "; 0 requests began anew" not in said.stdout
