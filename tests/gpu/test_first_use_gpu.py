"""Tests of self-checks on a GPU: once, quickly, and not during a capture."""

import sqlite3
import subprocess
import sys
import time
import warnings
from contextlib import closing
from pathlib import Path

import pytest
import torch

import flashtune
from flashtune import testing
from flashtune.core.errors import KernelError, VerificationError
from flashtune.core.notices import FlashtuneWarning
from flashtune.core.record import Verdict
from flashtune.runtime.kernel_loader import KernelLoader
from flashtune.runtime.self_check import SelfChecks
from tests.gpu.calls import forget, generated, reference, tensors
from tests.gpu.marks import SERVED
from tests.support.runtime import using

pytestmark = SERVED


LIMIT_SECONDS = 0.3


class Refusing:
    """A check that refuses every kernel, and counts its calls."""

    calls = 0

    def __call__(self, *_: object, **__: object) -> Verdict:
        self.calls += 1
        return Verdict(False, 9.0, 1, "forced", "test")


def test_kernel_that_fails_its_self_check_does_not_serve() -> None:
    with using(loader=KernelLoader(SelfChecks(Refusing()))):
        q, k, v = tensors()
        with pytest.warns(FlashtuneWarning, match="failed its self-check"):
            testing.close(flashtune.attention(q, k, v, causal=True), reference(q, k, v, True).out)
        assert flashtune.explain(q, k, v, causal=True).backend == "sdpa"
        out, lse = flashtune.attention(q, k, v, causal=True, return_lse=True)
        testing.close(out, reference(q, k, v, True).out)
        assert lse.isfinite().all()
        with pytest.raises(VerificationError, match="failed its self-check"):
            generated(q, k, v)


def test_passed_self_check_is_cached() -> None:
    q, k, v = tensors()
    assert flashtune.explain(q, k, v, causal=True, prefer="generated").standing == "unproven"
    generated(q, k, v)
    forget()
    assert flashtune.explain(q, k, v, causal=True, prefer="generated").standing == "verified"
    refusing = Refusing()
    with using(loader=KernelLoader(SelfChecks(refusing))):
        testing.close(generated(q, k, v), reference(q, k, v, True).out)
        assert refusing.calls == 0


def test_new_shape_during_capture_error_suggests_plan() -> None:
    q, k, v = tensors(77, 78)
    flashtune.attention(*tensors(), causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(KernelError, match=r"flashtune\.plan"):
        flashtune.attention(q, k, v, causal=True)


def test_one_warning_reports_many_failures() -> None:
    with using(loader=KernelLoader(SelfChecks(Refusing()))):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for length in (300, 301, 302):
                q, k, v = tensors(length, 400)
                testing.close(flashtune.attention(q, k, v, causal=True), reference(q, k, v, True).out)
        ours = [warning for warning in told if warning.category is FlashtuneWarning]
        assert ["self-check" in str(warning.message) for warning in ours] == [True]


def test_plan_runs_the_self_check_before_a_capture() -> None:
    q, k, v = tensors(333, 444)
    planned = flashtune.plan(q, k, v, causal=True, prefer="generated")
    assert flashtune.explain(q, k, v, causal=True, prefer="generated").standing == "verified"
    refusing = Refusing()
    with using(loader=KernelLoader(SelfChecks(refusing))):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = planned(q, k, v)
            with pytest.raises(KernelError, match=r"flashtune\.plan"):
                flashtune.attention(q.float(), k.float(), v.float())
        graph.replay()
        testing.close(out, reference(q, k, v, True).out)
        assert refusing.calls == 0


@pytest.mark.alone
@pytest.mark.parametrize(
    ("dtype", "head_dim", "lengths"),
    [
        (torch.bfloat16, 128, (4096, 4096)),
        (torch.float16, 256, (512, 8192)),
        (torch.float32, 64, (300, 400)),
        (torch.bfloat16, 96, (1, 65536)),
    ],
)
def test_self_check_takes_under_300_ms(dtype: torch.dtype, head_dim: int, lengths: tuple[int, int]) -> None:
    generated(*tensors(64, 64, head_dim=32))  # loads torch's own kernels, so that the check does not
    q, k, v = tensors(*lengths, head_dim=head_dim, dtype=dtype)
    generated(q, k, v)
    told = flashtune.explain(q, k, v, causal=True, prefer="generated")
    assert told.check_seconds is not None
    assert told.check_seconds < LIMIT_SECONDS
    assert "self-check on this machine took" in str(told)


FIRST_CALL = """
import sys, time, torch, flashtune
torch.manual_seed(1)
q = torch.randn(1, 8, 700, 80, dtype=torch.float16, device="cuda")
k, v = (torch.randn(1, 2, 900, 80, dtype=torch.float16, device="cuda") for _ in range(2))
time.sleep(max(0.0, float(sys.argv[1]) - time.time()))
out = flashtune.attention(q, k, v, causal=True, prefer="generated")
told = flashtune.explain(q, k, v, causal=True, prefer="generated")
print(told.standing, out.double().abs().sum().item())
"""


@pytest.mark.alone
def test_concurrent_processes_check_a_kernel_a_few_times_at_most(own_database: Path) -> None:
    start = str(time.time() + 20.0)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", FIRST_CALL, start],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    said = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, said
    answers = {out for out, _ in said}
    assert len(answers) == 1, answers
    assert answers.pop().startswith("verified")
    assert not any("database" in errors or "locked" in errors for _, errors in said)
    with closing(sqlite3.connect(own_database)) as connection:
        assert connection.execute("SELECT count(*), min(passed) FROM checks").fetchone() == (1, 1)
