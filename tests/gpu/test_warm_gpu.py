"""Tests of `flashtune warm` on a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.marks import SERVED

pytestmark = SERVED

SHAPE = "heads=8,kv_heads=2,seqlen=777,head_dim=64,dtype=bf16,causal,batch=2"
# Neither compiler can begin, and no kernel is checked.
FIRST_CALL = """
import torch
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from flashtune.verification import check

def refuse(*_, **__):
    raise RuntimeError("works at the first call")

ASTSource.make_ir = GluonASTSource.make_ir = check.check_rendered = refuse

import flashtune

q = torch.randn(2, 8, 777, 64, dtype=torch.bfloat16, device="cuda")
k, v = (torch.randn(2, 2, 777, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
print(flashtune.attention(q, k, v, causal=True, prefer="generated").isfinite().all().item())
"""


def test_first_call_after_warm_neither_compiles_nor_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path / "cache"))
    cold = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True)
    assert "works at the first call" in cold.stderr
    arguments = ["warm", "--shape", SHAPE, "--json"]
    warmed = subprocess.run(
        [sys.executable, "-m", "flashtune.tuner.cli", *arguments], capture_output=True, text=True
    )
    assert warmed.returncode == 0, warmed.stderr
    # A second kernel may serve the integrations, which round lengths up.
    assert {row["loaded"] for row in json.loads(warmed.stdout)} == {True}
    warm = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True)
    assert warm.returncode == 0, warm.stderr
    assert warm.stdout == "True\n"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_warm_and_bench_use_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "records.sqlite"))
    command = [sys.executable, "-m", "flashtune.tuner.cli"]
    options = ["--shape", SHAPE, "--shape", SHAPE.replace("777", "888"), "--devices", "0,1", "--json"]
    warmed = subprocess.run([*command, "warm", *options], capture_output=True, text=True)
    assert warmed.returncode == 0, warmed.stderr
    assert {row["loaded"] for row in json.loads(warmed.stdout)} == {True}
    timed = subprocess.run([*command, "bench", *options], capture_output=True, text=True)
    assert timed.returncode == 0, timed.stderr
    benches = json.loads(timed.stdout)["run"]["benches"]
    assert [bench["problem"]["seqlen_q"] for bench in benches] == [777, 888]
    assert all(bench["rows"] for bench in benches)
