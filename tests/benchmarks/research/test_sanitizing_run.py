"""Tests of sanitizer runs with a fake sanitizer: processes, findings and retries."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from benchmarks.sanitizer import runner
from benchmarks.sanitizer.report import Finding
from benchmarks.sanitizer.runner import Examination, examine
from benchmarks.sanitizer.sanitizing import MEMCHECK, Subject
from flashtune.core.errors import FlashtuneError
from flashtune.core.record import Outcome
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution.compile_pool import Compiled
from tests.support.sanitized import TARGET, sanitized


@pytest.fixture(scope="module")
def listed() -> tuple[Subject, ...]:
    return sanitized()


class Compilers:
    """Fake compilers that refuse the given kernels."""

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
        refused = (scope.problem, candidate) in REFUSED
        job.set_result(Compiled(Outcome.COMPILE_ERROR, message="no") if refused else Compiled(Outcome.OK))
        return job


REFUSED: list[tuple[object, Candidate]] = []

Script = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """A sanitizer that is a Python program: `number(subject)` is a kernel's place in the list."""
    monkeypatch.setattr(runner, "CompilePool", Compilers)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(runner, "MIN_SECONDS", 0.0)
    REFUSED.clear()

    def write(body: str) -> Path:
        path = tmp_path / "compute-sanitizer"
        path.write_text(
            f"#!{sys.executable}\n"
            "import os, sys, time\nfrom pathlib import Path\n"
            "from benchmarks.sanitizer import work as sanitizing_work\n"
            "from benchmarks.sanitizer.work import WorkQueue, work\n"
            "assert os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] == '1'\n"
            "sanitizing_work.IDLE_SECONDS = 0.2\n"
            "name, until, folder, order = sys.argv[-4:]\n"
            "order = order.split(',')\n"
            "errors = 0\n"
            "def number(subject):\n    return order.index(subject.digest)\n"
            "def report(where):\n"
            "    global errors\n"
            "    errors += 1\n"
            "    print(f'========= Invalid read\\n=========     at kernel+0x1 in {where}:9\\n=========')\n"
            "def launch(subject):\n    pass\n"
            f"{body}\n"
            "code = work(WorkQueue(Path(folder)), name, float(until), launch)\n"
            "print(f'========= ERROR SUMMARY: {errors} errors')\n"
            "sys.exit(code)\n"
        )
        path.chmod(0o755)
        return path

    return write


def run(path: Path, listed: tuple[Subject, ...], count: int, seconds: float = 60.0) -> dict[int, Finding]:
    some = listed[:count]
    order = [subject.digest for subject in some]

    def program(name: str, until: float, folder: Path) -> list[str]:
        return ["program", name, str(until), str(folder), ",".join(order)]

    how = Examination(path, MEMCHECK, program, time.time() + seconds, 2, 2, TARGET)
    found = [finding for findings in examine(how, some) for finding in findings]
    assert len({finding.digest for finding in found}) == len(found)
    return {order.index(finding.digest): finding for finding in found}


@pytest.mark.slow
def test_many_kernels_run_in_one_process(listed: tuple[Subject, ...], script: Script, tmp_path: Path) -> None:
    path = script(f"open({str(tmp_path / 'runs')!r}, 'a').write('x')")
    found = run(path, listed, 12)
    assert len(found) == 12
    assert {finding.outcome for finding in found.values()} == {"clean"}
    assert found[3].label == listed[3].label
    assert len((tmp_path / "runs").read_text()) <= 4


@pytest.mark.slow
def test_findings_are_attributed_to_the_named_kernel(listed: tuple[Subject, ...], script: Script) -> None:
    found = run(
        script("def launch(s):\n    number(s) == 5 and report(f'family_{s.files[-1]}.py')"), listed, 8
    )
    assert [found[number].errors for number in range(8)] == [0, 0, 0, 0, 0, 1, 0, 0]
    assert found[5].first.startswith("Invalid read at kernel+0x1 in family_")


@pytest.mark.slow
def test_kernels_run_alone_if_a_report_names_none(listed: tuple[Subject, ...], script: Script) -> None:
    found = run(script("def launch(s):\n    number(s) == 2 and report('standard.py')"), listed, 3)
    assert [found[number].errors for number in range(3)] == [0, 0, 1]


@pytest.mark.slow
def test_failed_launch_affects_only_its_kernel(listed: tuple[Subject, ...], script: Script) -> None:
    body = "def launch(s):\n    if number(s) == 1:\n        raise RuntimeError('no kernel\\nimage')"
    found = run(script(body), listed, 5)
    assert [found[number].failed for number in range(5)] == ["", "RuntimeError: no kernel image", "", "", ""]


@pytest.mark.slow
def test_dead_process_affects_only_its_kernel(listed: tuple[Subject, ...], script: Script) -> None:
    body = "def launch(s):\n    if number(s) == 3:\n        print('oh', flush=True)\n        os._exit(9)"
    found = run(script(body), listed, 6)
    assert [found[number].failed for number in range(6)] == ["", "", "", "exit code 9: oh", "", ""]


@pytest.mark.slow
def test_hang_affects_only_its_kernel(listed: tuple[Subject, ...], script: Script) -> None:
    body = (
        "sanitizing_work.KERNEL_SECONDS = 5\n"
        "def launch(s):\n    number(s) == 0 and time.sleep(60)\n    time.sleep(0.05)"
    )
    found = run(script(body), listed, 4)
    assert found[0].failed.startswith("exit code 1")
    assert [found[number].outcome for number in range(1, 4)] == ["clean"] * 3


@pytest.mark.slow
def test_compile_errors_are_a_separate_outcome(listed: tuple[Subject, ...], script: Script) -> None:
    path = script("")
    REFUSED.append((listed[1].problem, listed[1].candidate))
    found = run(path, listed, 3)
    assert [found[number].outcome for number in range(3)] == ["clean", "refused", "clean"]
    assert found[1].refused == "compile_error: no"


@pytest.mark.slow
def test_remaining_kernels_are_skipped_after_the_time_limit(
    listed: tuple[Subject, ...], script: Script
) -> None:
    assert run(script(""), listed, 6, seconds=0.0) == {}
    found = run(script("def launch(s):\n    time.sleep(0.5)"), listed, 20, seconds=3.0)
    assert len(found) < 20


@pytest.mark.slow
def test_repeated_failures_without_results_are_one_error(
    listed: tuple[Subject, ...], script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MAX_MUTE", 2)
    with pytest.raises(FlashtuneError, match=r"come to nothing: exit code 7: no device"):
        run(script("print('no device')\nsys.exit(7)"), listed, 3)
