"""Tests of a process with a bundle in which Triton cannot be imported."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from flashtune.bundle.bundle_file import dump_bundle
from flashtune.bundle.records import Receipt
from flashtune.core.target import find_target
from flashtune.dispatch.tables import tuned_records
from flashtune.tuner.tables.bundles import build
from flashtune.tuner.tables.warm import calls_of
from flashtune.tuner.workloads.shapes import parse_shape
from tests.support.records import VERDICT

ROOT = Path(__file__).resolve().parents[3]
H200 = find_target("h200")
SHAPES = (
    "heads=16,seqlen=2048,head_dim=128,batch=8,causal",
    "heads=16,seqlen=2048,head_dim=128,batch=8,causal,backward",
    "heads=32,kv_heads=8,seqlen_q=1,seqlen_kv=8192,head_dim=128,batch=16,page_size=16,causal",
    "heads=32,kv_heads=8,seqlen=4096,head_dim=64,batch=16,packed=16384,causal",
)
PROGRAM = """
import sys
sys.modules["triton"] = None  # its import fails
import warnings
import torch
import flashtune
warnings.simplefilter("error", flashtune.FlashtuneWarning)
from tests.support.emulated_gpu import emulated_gpu

def empty(*shape, grad=False):
    return torch.empty(shape, dtype=torch.bfloat16, requires_grad=grad)

with emulated_gpu() as library:
    q, k, v = (empty(8, 16, 2048, 128, grad=True) for _ in range(3))
    flashtune.attention(q, k, v, causal=True, prefer="generated").backward(torch.empty_like(q))
    pages, table = empty(8192, 16, 8, 128), torch.zeros(16, 512, dtype=torch.int32)
    lengths = torch.full((16,), 8192, dtype=torch.int32)
    flashtune.attention_paged(empty(16, 32, 128), pages, pages, table, lengths, prefer="generated")
    q, k = empty(16384, 32, 64), empty(16384, 8, 64)
    starts = torch.zeros(17, dtype=torch.int32)
    flashtune.attention_varlen(q, k, k, starts, starts, 4096, 4096, causal=True, prefer="generated")
    print(*[launched.function for launched in library.launches])
    q, k, v = (empty(8, 16, 2048, 128) for _ in range(3))
    print(flashtune.explain(q, k, v, causal=True, prefer="generated"))
print(*sorted({"jinja2", "optuna", "sqlalchemy", "flashtune.verification.check"} & sys.modules.keys()))
"""


@pytest.mark.slow
def test_calls_run_from_a_bundle_without_triton_a_compiler_or_a_home_folder(tmp_path: Path) -> None:
    calls = [
        (problem, msgspec.structs.replace(specialization, lse=lse))
        for problem, specialization in calls_of(parse_shape(shape)[0] for shape in SHAPES)
        for lse in (False, True)
    ]
    built = build(calls, H200, tuned_records(H200.name))
    entries = [
        msgspec.structs.replace(entry, receipts=(Receipt(entry.machine, H200.name, "580.1", VERDICT),))
        for entry in built.entries
    ]
    path = tmp_path / "kernels.bundle"
    path.write_bytes(dump_bundle("sm_90", "1", entries, built.codes))
    missing = dict.fromkeys(("HOME", "PATH", "XDG_CACHE_HOME"), "/nonexistent/folder")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("FLASH", "TRITON"))
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment | missing | {"FLASHTUNE_BUNDLE": str(path), "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    launched, *explained, imported = done.stdout.splitlines()
    assert launched.split() == [
        "forward_hopper", "prepare", "backward_hopper", "finish", "decode_split_kv", "combine",
        "forward_masked",
    ]  # fmt: skip
    assert f"  its machine code is from bundle {path}" in explained
    assert any(line.endswith("; timed") for line in explained)
    assert imported == ""
