"""The C++ program of examples/engine on a GPU: it compares a kernel of a bundle with a reference itself."""

import subprocess
from pathlib import Path

import pytest
import torch

from flashtune import testing
from flashtune.bundle.bundle_file import dump_bundle
from flashtune.core.target import device_target
from flashtune.launch.binding import compile_binary
from flashtune.launch.bundle_entries import entry_of
from flashtune.launch.kernel_cache import kernel_of
from tests.gpu.marks import ON_HOPPER
from tests.support.engine import build
from tests.support.records import CONTIGUOUS, make_record

pytestmark = [pytest.mark.gpu, ON_HOPPER]


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("family", ["forward_q_outer", "forward_hopper"])
def test_results_are_those_of_the_reference(tmp_path: Path, family: str, causal: int) -> None:
    torch.cuda.init()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").split()
    libraries = next(Path(word).parent for word in maps if "/libcuda.so" in word)
    program = build(tmp_path, libraries)
    problem = testing.problem(f"heads=8,seqlen=1024,head_dim=128,dtype=bf16{',causal' * causal}")
    kernel = kernel_of(make_record(problem, family=family), CONTIGUOUS)
    entry, codes = entry_of(kernel, problem, compile_binary(kernel, device_target(0)), "12.8")
    (tmp_path / "kernels.bundle").write_bytes(dump_bundle("sm_90", "1", [entry], codes))
    words: list[str | Path] = [
        program,
        tmp_path / "kernels.bundle",
        entry.kernel,
        "8",
        "1024",
        "128",
        str(causal),
    ]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
