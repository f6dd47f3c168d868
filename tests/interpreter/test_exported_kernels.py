"""Exported files work on their own: a fresh process runs them with torch and triton alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashtune.kernel import Specialization
from flashtune.record import Outcome, Provenance, Record
from flashtune.target import find_target
from flashtune.templates.family import Family
from flashtune.templates.registry import families
from flashtune.tuner.config_text import change_config
from flashtune.tuner.export import kernel_files
from flashtune.tuner.shapes import parse_shape
from flashtune.versions import current_versions

SCRIPT = """
import importlib.util, sys
import torch

class Forbidden:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("flashtune", "jinja2", "msgspec"):
            raise ImportError(name)

sys.meta_path.insert(0, Forbidden())
spec = importlib.util.spec_from_file_location("exported", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
torch.manual_seed(0)
q, k, v = torch.randn(2, 4, 48, 64), torch.randn(2, 2, 48, 64), torch.randn(2, 2, 48, 64)
out, lse = module.attention(q, k, v)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
assert lse.shape == (2, 4, 48) and lse.isfinite().all()
"""


(PROBLEM,) = parse_shape("heads=4,kv_heads=2,seqlen=48,head_dim=64,dtype=fp32,causal,batch=2")
INTERPRETED = [
    family
    for family in families()
    if family.interpreted and family.supports(PROBLEM, find_target("h200")) is None
]


@pytest.mark.parametrize("family", INTERPRETED, ids=lambda family: family.name)
def test_an_exported_file_computes_attention_without_flashtune(family: Family, tmp_path: Path) -> None:
    problem = PROBLEM
    config = change_config(family.default(problem, find_target("h200")), "block_m=32,block_n=32")
    record = Record(
        problem=problem,
        target="nvidia-h200",
        family=family.name,
        config=config,
        specialization=Specialization(lse=True),
        kernel=None,
        outcome=Outcome.OK,
        provenance=Provenance.PREDICTED,
        versions=current_versions(family.name),
    )
    (file,) = kernel_files((record,))
    path = tmp_path / file.name
    path.write_text(file.text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
