"""Tests of the integration that explanations name, and of recordings through servers and flash_attn."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashtune.recording.callers import called_by, present_caller
from flashtune.recording.recorder import read_counts
from flashtune.runtime.session import SESSION
from flashtune.tuner.cli import main

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def unknown_callers() -> None:
    """No call was met before."""
    SESSION.forget()


def test_functions_call_for_their_integration() -> None:
    seen: list[str] = []

    @called_by("inner")
    def inner() -> None:
        seen.append(present_caller())
        raise ValueError

    @called_by("outer")
    def outer() -> None:
        with pytest.raises(ValueError):  # noqa: PT011 - the error is this test's
            inner()
        seen.append(present_caller())

    outer()
    assert [*seen, present_caller()] == ["inner", "outer", ""]


def recorded(program: str, file: Path) -> None:
    """Runs a program that records its calls. FLASHTUNE_RECORD takes effect when flashtune is imported."""
    environment = {**os.environ, "FLASHTUNE_RECORD": str(file), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True, timeout=1200)


def searched(file: Path) -> list[str]:
    """The shapes that a search of recorded calls would have."""
    arguments = ["search", "--target", "h200", "--from", str(file), "--dry-run", "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return [row["problem"] for row in json.loads(result.stdout)]


SERVING = """
import importlib

import pytest
import torch

from flashtune.integrations.flash_attn import flash_attn_func, flash_attn_with_kvcache
from flashtune.runtime.session import SESSION
from tests.problems import sglang_objects, vllm_objects
from tests.problems.serving_batches import CASES, DECODING, MIXED, make_batch
from tests.support import host_stubs


def flash_attn():
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16)
    flash_attn_func(q, k, k, causal=True)
    cache, table = torch.randn(3, 16, 2, 16), torch.tensor([[1], [2]], dtype=torch.int32)
    lengths = torch.tensor([4, 9], dtype=torch.int32)
    flash_attn_with_kvcache(q[:, :1], cache, cache, cache_seqlens=lengths, block_table=table)


def vllm():
    module = importlib.import_module("flashtune.integrations.vllm_backend")
    batch = make_batch(MIXED)
    metadata = vllm_objects.builder(module).build(0, vllm_objects.common(batch))
    cache, output = vllm_objects.packed_cache(batch, torch.float32), torch.empty_like(batch.q)
    layer = vllm_objects.layer_of(module, batch, CASES["softcap"])
    scales = vllm_objects.scales_of(CASES["softcap"])
    layer.forward(scales, batch.q, batch.k, batch.v, cache, metadata, output)


def sglang():
    module = importlib.import_module("flashtune.integrations.sglang_backend")
    batch, case = make_batch((*DECODING[:-1], (1, 1))), CASES["window"]
    pool = sglang_objects.KVPool(batch, torch.float32)
    backend = module.backend_class()(sglang_objects.runner_of(batch, pool))
    info, layer = sglang_objects.forward_batch(batch), sglang_objects.layer_of(batch, case)
    backend.init_forward_metadata(info)
    backend.forward_decode(batch.q.flatten(1), batch.k, batch.v, layer, info, False)


(recording,) = SESSION.recordings
known = set()
for call in (flash_attn, vllm, sglang):
    if call is not flash_attn:
        host_stubs.install(call.__name__, pytest.MonkeyPatch())
    call()
    problems = {problem for problem, _ in recording._tallies} - known
    assert {SESSION.callers[problem] for problem in problems} == {call.__name__}
    known |= problems
"""


def test_calls_of_servers_and_flash_attn_are_recorded_and_can_be_searched(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    recorded(SERVING, file)
    counts = read_counts(file)
    # Two of flash_attn, the decoding and the other sequences of vLLM's batch, and one of SGLang.
    assert [count.calls for count in counts] == [1] * 5
    assert {*searched(file)} == {count.problem.key for count in counts}
