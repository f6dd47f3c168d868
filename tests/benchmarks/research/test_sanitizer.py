"""Tests of sanitizer runs with a fake sanitizer: subjects, processes and findings."""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import pytest
import torch

from benchmarks.sanitizer import points as kernel_points
from benchmarks.sanitizer import runner
from benchmarks.sanitizer.launch import launch_once
from benchmarks.sanitizer.points import Subject, cases_of, subjects
from benchmarks.sanitizer.report import Finding
from benchmarks.sanitizer.runner import MEMCHECK, Examination, examine, read_log
from flashtune.core.record import Outcome
from flashtune.core.target import device_target, find_target
from flashtune.templates.registry import families
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution.compile_pool import Compiled
from tests.support.records import shipped_table_of

TARGET = find_target("h200")
OLD, NEW = "Version 2025.3.1.0 (build 36400806)", "Version 2026.1.0.0 (build 1)"
RACE = """========= Warning: Race reported between Write access at forward_hopper+0x10 in standard.py:290
=========     and Read access at forward_hopper+0x20 in forward_hopper.py:7 [4 hazards]
=========
========= Error: Race reported between Read access at forward_hopper+0x30 in standard.py:290
=========
"""
# A sanitizer that "launches" the kernels of its command line; a test adds the body of the loop.
FAKE = """#!{python}
import os, sys
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1" and "--padding" in sys.argv
order = {order}
errors = 0
for count, digest in enumerate([word for word in sys.argv if word in order], 1):
    number = order.index(digest)
    {body}
    print(f"launched {{count}}", flush=True)
print(f"========= ERROR SUMMARY: {{errors}} errors")
"""


@pytest.fixture(scope="module")
def listed() -> Iterator[tuple[Subject, ...]]:
    """Some kernels of the shipped table, and two drawn ones of each family."""
    table = shipped_table_of(TARGET.name)
    some = msgspec.structs.replace(table, records=table.records[::40])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_points, "shipped_table", lambda name: some if name == TARGET.name else None)
        yield subjects(TARGET, 2, 1)


class Compilers:
    """Compilers that compile nothing."""

    def __init__(self, workers: int) -> None:
        del workers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def submit(self, scope: SearchTask, candidate: Candidate) -> Future[Compiled]:
        job: Future[Compiled] = Future()
        job.set_result(Compiled(Outcome.OK))
        return job


def run(
    some: tuple[Subject, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> dict[int, Finding]:
    """Examines kernels under the fake sanitizer, and returns the findings by the number of the kernel."""
    monkeypatch.setattr(runner, "CompilePool", Compilers)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    order = [subject.digest for subject in some]
    path = tmp_path / "compute-sanitizer"
    path.write_text(FAKE.format(python=sys.executable, order=order, body=body))
    path.chmod(0o755)
    how = Examination(path, MEMCHECK, TARGET, 2, time.time() + 60.0)
    findings = list(examine(how, some))
    assert len({finding.digest for finding in findings}) == len(findings)
    return {order.index(finding.digest): finding for finding in findings}


@pytest.mark.slow
def test_families_alternate(listed: tuple[Subject, ...]) -> None:
    digests = [subject.digest for subject in listed]
    assert len(set(digests)) == len(digests)
    drawn = Counter(subject.candidate.family for subject in listed if not subject.shipped)
    assert drawn == dict.fromkeys((family.name for family in families()), 2)
    kinds = [(subject.shipped, subject.candidate.family) for subject in listed]
    assert len(set(kinds[: len(set(kinds))])) == len(set(kinds))
    assert subjects(TARGET, 2, 1) == listed
    assert "forward_hopper" not in {
        subject.candidate.family for subject in subjects(find_target("a100"), 1, 1)
    }


def test_logs_are_read() -> None:
    log = read_log(f"{RACE}========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)")
    assert log is not None
    assert log.counted == 2
    assert [report.split(":")[0] for report in log.reports] == ["Warning", "Error"]
    assert log.reports[0].endswith("forward_hopper.py:7 [4 hazards]")
    assert read_log("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n") == (0, ())
    assert read_log(RACE) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "outcome", "message"),
    [
        (
            "if number == 5: errors += 1; print('========= Invalid read\\n=========')",
            "errors",
            "Invalid read",
        ),
        ("if number == 5: print('oh', flush=True); os._exit(9)", "failed", "exit code 9: oh"),
    ],
    ids=["error", "crash"],
)
def test_findings_are_of_their_kernel(
    listed: tuple[Subject, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    outcome: str,
    message: str,
) -> None:
    findings = run(listed[:20], tmp_path, monkeypatch, body)
    assert [findings[number].outcome for number in range(20)] == ["clean"] * 5 + [outcome] + ["clean"] * 14
    assert message in (findings[5].first, findings[5].failed)
    assert findings[5].label == listed[5].label


@pytest.mark.gpu
def test_subjects_launch() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    target = device_target(0)
    drawn = subjects(target, 1, 5)
    for subject in drawn[:: max(1, len(drawn) // 6)]:
        for case in cases_of(subject, target, busy=False):
            launch_once(subject.kernel, case, target, torch.device("cuda", 0))
