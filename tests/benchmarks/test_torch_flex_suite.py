"""Tests of the run of PyTorch's own tests of `flex_attention`, in the interpreter of another process."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.integrations import torch_flex_suite as suite
from benchmarks.saved import ROOT, load

FILE = """
import unittest

import torch
from torch.nn.attention.flex_attention import flex_attention

from flashtune import testing
from flashtune.runtime import prepare


SHAPE = "heads=2,kv_heads=2,seqlen_q=40,seqlen_kv=40,head_dim=16"


class TestThings(unittest.TestCase):
    def results(self, score_mod):
        q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
        compiled = torch.compile(flex_attention, backend="eager")
        return compiled(q, k, v, score_mod), flex_attention(q, k, v, score_mod)

    def test_served(self):
        prepare.warn_of_failure(RuntimeError("out of memory"), "another config", testing.problem(SHAPE))
        torch.testing.assert_close(*self.results(lambda s, b, h, q, k: s * 2), atol=1e-4, rtol=1e-3)

    def test_refused(self):
        out, _ = self.results(lambda s, b, h, q, k: torch.lgamma(s.abs() + 1))
        self.assertEqual(out.shape, (1, 2, 40, 16))

    def test_eager(self):
        q = torch.randn(1, 2, 40, 16)
        flex_attention(q, q, q)

    def test_fails_with_flashtune(self):
        name = flex_attention.__module__
        self.results(lambda s, b, h, q, k: s * 2)
        self.assertTrue(name.startswith("torch"), "as expected")

    def test_skips_itself_with_flashtune(self):
        self.results(lambda s, b, h, q, k: s * 2)
        if not flex_attention.__module__.startswith("torch"):
            self.skipTest("inaccurate")

    def run_graph(self):
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        self.results(lambda s, b, h, q, k: s * 2)
        self.assertEqual(flex_attention.__module__, "torch.nn.attention.flex_attention", counters)

    def test_counts_graphs(self):
        self.run_graph()

    @unittest.expectedFailure
    def test_expected_to_fail(self):
        self.fail()

    def test_fails(self):
        self.fail()

    def test_skipped(self):
        self.skipTest("not here")
"""


def test_outcomes_are_counted(tmp_path: Path) -> None:
    file, out = tmp_path / "test_flex.py", tmp_path / "out.json"
    file.write_text(FILE)
    command = [sys.executable, "-m", "benchmarks.integrations.torch_flex_suite", str(file)]
    command += ["--on-cpu", "--save", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    report = load(out, suite.Report).rows
    names = ("passed", "refused", "failed without flashtune", "expected to fail", "skipped")
    assert report.outcomes == {**dict.fromkeys(names, 1), "not reached": 2, "failed": 2}
    assert "inaccurate" in report.failures["TestThings.test_skips_itself_with_flashtune"]
    assert ["lgamma" in sentence for sentence in report.refusals] == [True]
    assert "as expected" in report.failures["TestThings.test_fails_with_flashtune"]
    assert report.fallbacks.keys() == {"TestThings.test_served"}
    assert report.fallbacks["TestThings.test_served"].startswith("out of memory, so another config serves ")
    assert report.served == 4
