"""Kernels under a sanitizer that is made up: what is run, what its reports come to, and what is run again."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest
import torch

from flashtune.errors import FlashtuneError, TableError
from flashtune.kernel import Alignment, specialization_of
from flashtune.target import device_target, find_target
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner import sanitizing_run
from flashtune.tuner.reports import read_report, write_report
from flashtune.tuner.sanitizing import (
    FOUND,
    KERNELS,
    MEMCHECK,
    RACECHECK,
    Finding,
    SanitizerReport,
    Subject,
    command,
    find_sanitizer,
    read_log,
    row_stride,
    subjects,
)
from flashtune.tuner.sanitizing_run import Examination, examine, launch_once

TARGET = find_target("h200")

CLEAN_LOG = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
MEMCHECK_LOG = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at forward_q_outer+0x1a0
=========     by thread (3,0,0) in block (7,0,0)
=========
========= ERROR SUMMARY: 12 errors
"""
RACECHECK_LOG = """========= COMPUTE-SANITIZER
========= Warning: Race reported between Write access at forward_hopper+0x10
========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)
"""
INVALID_READ = (
    "Invalid __global__ read of size 16 bytes at forward_q_outer+0x1a0 "
    "by thread (3,0,0) in block (7,0,0) ERROR SUMMARY: 12 errors"
)
RACE = (
    "Warning: Race reported between Write access at forward_hopper+0x10 "
    "RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)"
)


@pytest.fixture(scope="module")
def listed() -> tuple[Subject, ...]:
    return subjects(TARGET, 4, 1, busy=True)


def test_every_shipped_kernel_and_samples_of_every_family(listed: tuple[Subject, ...]) -> None:
    shipped = [subject for subject in listed if subject.shipped]
    assert len({subject.digest for subject in shipped}) == len(shipped) > 40
    drawn = [subject.candidate.family for subject in listed if not subject.shipped]
    assert {name: drawn.count(name) for name in drawn} == dict.fromkeys(drawn, 8)
    forward = {name for name in drawn if name.startswith("forward_")}
    assert forward == {"forward_hopper", "forward_kv_outer", "forward_masked", "forward_q_outer"}
    assert set(drawn) - forward >= {"backward_split"}
    assert subjects(TARGET, 4, 1, busy=True) == listed
    quiet = subjects(TARGET, 4, 1, busy=False)
    assert [subject.digest for subject in quiet] == [subject.digest for subject in listed]


def test_every_kernel_of_a_backward_pass_is_looked_at(listed: tuple[Subject, ...]) -> None:
    for subject in listed:
        if subject.problem.is_backward:
            family = find_family(subject.candidate.family)
            kernel = render(family, subject.problem, subject.candidate.config, subject.specialization)
            entries = [step.entry for step in (kernel, kernel.prologue, kernel.epilogue) if step]
            assert all(any(name in entry for name in KERNELS) for entry in entries), entries


def test_shapes_are_small_and_ragged(listed: tuple[Subject, ...]) -> None:
    for subject in listed:
        problem = subject.problem
        assert problem.minimal_bytes() < 2**28
        assert problem.seqlen_kv % 16 == 1
        tiles = problem.batch * problem.heads * math.ceil(problem.seqlen_q / 128)
        assert tiles > TARGET.sm_count / 4
    assert max(subject.problem.batch for subject in subjects(TARGET, 2, 1, busy=False)) == 1


@pytest.mark.parametrize("alignment", list(Alignment))
@pytest.mark.parametrize("width", [1, 40, 64, 96, 257])
def test_rows_are_of_their_class_and_of_no_better_one(alignment: Alignment, width: int) -> None:
    row = row_stride(width, alignment)
    assert width <= row <= width + 2 * alignment
    tensor = torch.empty(2 * 3 * 5 * row).as_strided((2, 3, 5, width), (15 * row, 5 * row, row, 1))
    assert specialization_of((tensor,), False).alignment is alignment


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (CLEAN_LOG, (0, 0, "")),
        (MEMCHECK_LOG, (12, 0, INVALID_READ)),
        (RACECHECK_LOG, (1, 2, RACE)),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", (0, 0, "")),
        ("Segmentation fault", None),
        ("", None),
    ],
)
def test_logs_are_read(log: str, expected: tuple[int, int, str] | None) -> None:
    assert read_log(log) == expected


def test_padding_is_memchecks_alone() -> None:
    memcheck, racecheck = (command(Path("cs"), tool, ["program"]) for tool in (MEMCHECK, RACECHECK))
    assert memcheck[-1] == racecheck[-1] == "program"
    assert "--padding" in memcheck
    assert "--padding" not in racecheck
    assert str(FOUND) in racecheck


def test_no_sanitizer_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr("flashtune.tuner.sanitizing.USUAL_FOLDERS", ())
    with pytest.raises(FlashtuneError, match=r"install the CUDA toolkit"):
        find_sanitizer()
    found = tmp_path / "home" / "bin" / "compute-sanitizer"
    found.parent.mkdir(parents=True)
    found.write_text("#!/bin/sh\n")
    found.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert find_sanitizer() == found


Script = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """A sanitizer that is a Python program; `numbers` are those of the kernels that it is to run."""

    def write(body: str) -> Path:
        path = tmp_path / "compute-sanitizer"
        path.write_text(
            f"#!{sys.executable}\nimport os, sys, time\n"
            "numbers = [int(number) for number in sys.argv[-1].split(',')]\n"
            f"assert os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] == '1'\n{body}"
        )
        path.chmod(0o755)
        return path

    return write


def run(path: Path, listed: tuple[Subject, ...], count: int, seconds: float = 60.0) -> dict[str, Finding]:
    digests = {number: f"{number:032x}" for number in range(count)}

    def program(numbers: Iterable[int]) -> list[str]:
        return ["program", ",".join(map(str, numbers))]

    how = Examination(path, MEMCHECK, program, time.monotonic() + seconds, 2)
    found = [finding for findings in examine(how, listed, digests) for finding in findings]
    assert len({finding.digest for finding in found}) == len(found)
    return {finding.digest: finding for finding in found}


def test_clean_batches_are_run_once(listed: tuple[Subject, ...], script: Script, tmp_path: Path) -> None:
    path = script(f"print({CLEAN_LOG!r})\nopen({str(tmp_path / 'runs')!r}, 'a').write('x')\n")
    found = run(path, listed, 30)
    assert len(found) == 30
    assert not any(finding.errors or finding.failed for finding in found.values())
    assert len((tmp_path / "runs").read_text()) == 3


def test_what_is_found_is_told_of_its_kernel(listed: tuple[Subject, ...], script: Script) -> None:
    body = (
        f"wrong = 5 in numbers\nprint({MEMCHECK_LOG!r} if wrong else {CLEAN_LOG!r})\n"
        f"sys.exit({FOUND} if wrong else 0)\n"
    )
    found = run(script(body), listed, 14)
    assert len(found) == 14
    [wrong] = [finding for finding in found.values() if finding.errors]
    assert (wrong.digest, wrong.errors) == (f"{5:032x}", 12)
    assert wrong.label == listed[5].label
    assert wrong.first.startswith("Invalid __global__ read")


def test_a_program_that_fails_is_told_too(listed: tuple[Subject, ...], script: Script) -> None:
    body = f"print({CLEAN_LOG!r})\nif 1 in numbers:\n    print('no kernel image')\n    sys.exit(7)\n"
    found = run(script(body), listed, 3)
    assert [finding.failed for finding in found.values()] == ["", "exit code 7: no kernel image", ""]


def test_a_hang_is_no_verdict(
    listed: tuple[Subject, ...], script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanitizing_run, "START_SECONDS", 0.5)
    monkeypatch.setattr(sanitizing_run, "KERNEL_SECONDS", 0.1)
    body = f"time.sleep(30 if 0 in numbers else 0)\nprint({CLEAN_LOG!r})\n"
    found = run(script(body), listed, 2)
    assert [finding.failed for finding in found.values()] == ["did not end within its time limit", ""]


def test_when_time_is_up_nothing_is_said(listed: tuple[Subject, ...], script: Script) -> None:
    assert run(script(f"print({CLEAN_LOG!r})"), listed, 20, seconds=0.0) == {}


def test_an_interruption_begins_no_more_batches(
    listed: tuple[Subject, ...], script: Script, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    path = script(f"open({str(runs)!r}, 'a').write('x')\ntime.sleep(0.5)\nprint({CLEAN_LOG!r})\n")
    digests = {number: f"{number:032x}" for number in range(len(listed))}
    assert len(digests) > 4 * sanitizing_run.BATCH
    how = Examination(path, MEMCHECK, lambda _: ["program", "0"], time.monotonic() + 60.0, 1)
    found = examine(how, listed, digests)
    next(found)
    found.close()
    assert len(runs.read_text()) <= 2


def test_reports_come_back(tmp_path: Path) -> None:
    finding = Finding(MEMCHECK, "0" * 32, "forward_hopper", "a kernel", True, 3, 0, "", "Invalid read")
    report = SanitizerReport("nvidia-h200", "Version 2025.4", "3.6.0", (finding,))
    path = tmp_path / "deep" / "report.json.gz"
    write_report(report, path)
    assert read_report(path, SanitizerReport) == report
    content = path.read_bytes()
    write_report(msgspec.structs.replace(report), path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("spoil", [lambda data: data[:-9], lambda data: data[:10] + b"\xff" + data[11:]])
def test_damaged_reports_are_refused(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "report.json.gz"
    write_report(SanitizerReport("nvidia-h200", "Version 2025.4", "3.6.0", ()), path)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(TableError, match="make it anew"):
        read_report(path, SanitizerReport)


@pytest.mark.gpu
def test_subjects_launch() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    target = device_target(0)
    found = subjects(target, 1, 5, busy=False)
    for subject in found[:: max(1, len(found) // 6)]:
        launch_once(subject, target, torch.device("cuda", 0))
