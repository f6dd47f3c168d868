"""Tests of exported files in a new process with only torch and triton."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Direction, Problem
from flashtune.core.record import Outcome, Provenance, Record
from flashtune.core.target import find_target
from flashtune.dispatch.versions import current_versions
from flashtune.templates.family import Family
from flashtune.templates.registry import families
from flashtune.tuner.tables.kernel_choice import change_config
from flashtune.tuner.tables.table_files import kernel_files
from flashtune.tuner.workloads.shapes import parse_shape

LOADING = """
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
"""
FORWARD = """
torch.manual_seed(0)
q, k, v = torch.randn(2, 4, 48, 64), torch.randn(2, 2, 48, 64), torch.randn(2, 2, 48, 64)
out, lse = module.attention(q, k, v)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
assert lse.shape == (2, 4, 48) and lse.isfinite().all()
"""
BACKWARD = """
torch.manual_seed(0)
shapes = (2, 4, 48, 64), (2, 2, 48, 64), (2, 2, 48, 64)
q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
dout = torch.randn_like(out)
expected = torch.autograd.grad(out, (q, k, v), dout)
q, k, v, out = (tensor.detach() for tensor in (q, k, v, out))
scores = (q @ k.repeat_interleave(2, 1).mT / 8).masked_fill(torch.ones(48, 48).triu(1).bool(), -torch.inf)
found = module.attention_backward(q, k, v, out, scores.logsumexp(-1), dout)
for one, other in zip(found, expected, strict=True):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
"""


(PROBLEM,) = parse_shape("heads=4,kv_heads=2,seqlen=48,head_dim=64,dtype=fp32,causal,batch=2")
SCRIPTS = {Direction.FORWARD: LOADING + FORWARD, Direction.BACKWARD: LOADING + BACKWARD}


def posed(family: Family) -> Problem:
    """The problem of a family's pass."""
    return msgspec.structs.replace(PROBLEM, direction=family.direction)


INTERPRETED = [
    family
    for family in families()
    if family.interpreted and family.supports(posed(family), find_target("h200")) is None
]


@pytest.mark.tritons
@pytest.mark.parametrize("family", INTERPRETED, ids=lambda family: family.name)
def test_an_exported_file_computes_attention_without_flashtune(family: Family, tmp_path: Path) -> None:
    problem = posed(family)
    config = change_config(family.default(problem, find_target("h200")), "block_m=32,block_n=32,num_warps=4")
    record = Record(
        problem=problem,
        target="nvidia-h200",
        family=family.name,
        config=config,
        specialization=Specialization(lse=family.direction is Direction.FORWARD),
        kernel=None,
        outcome=Outcome.OK,
        provenance=Provenance.PREDICTED,
        versions=current_versions(family.name),
    )
    (file,) = kernel_files((record,))
    path = tmp_path / file.name
    path.write_text(file.text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPTS[family.direction], str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
