"""Tests of sanitizer subjects, requests and reports."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.reports import read_report, write_report
from benchmarks.sanitizer.points import cases_of, subjects
from benchmarks.sanitizer.report import Finding, SanitizerReport, SanitizerRequest, report_lines
from benchmarks.sanitizer.sanitizing import (
    MEMCHECK,
    RACECHECK,
    Subject,
    command,
    find_sanitizer,
    is_warning,
    read_log,
    why_left_out,
)
from benchmarks.sanitizer.tensors import launch_once
from flashtune.core.errors import FlashtuneError, TableError
from flashtune.core.target import device_target, find_target
from tests.support.sanitized import TARGET, sanitized

DIGEST = "1a" * 16

CLEAN_LOG = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
INVALID_READ = f"""========= Invalid __global__ read of size 16 bytes
=========     at forward_q_outer+0x1a0 in forward_q_outer_{DIGEST}.py:12
=========     by thread (3,0,0) in block (7,0,0)
=========
"""
RACE = f"""========= Warning: Race reported between Write access at forward_hopper+0x10 in standard.py:290
=========     and Read access at forward_hopper+0x20 in forward_hopper_{DIGEST}.py:7 [4 hazards]
=========
========= Error: Race reported between Read access at forward_hopper+0x30 in standard.py:290
=========
"""
OLD, NEW = "Version 2025.3.1.0 (build 36400806)", "Version 2026.1.0.0 (build 1)"


@pytest.fixture(scope="module")
def listed() -> tuple[Subject, ...]:
    return sanitized()


@pytest.mark.slow
def test_families_alternate(listed: tuple[Subject, ...]) -> None:
    digests = [subject.digest for subject in listed]
    assert len(set(digests)) == len(digests)
    drawn = [subject.candidate.family for subject in listed if not subject.shipped]
    assert set(Counter(drawn).values()) == {2}
    assert set(drawn) == {
        "backward_fused", "backward_hopper", "backward_split", "decode_latent_hopper", "decode_split_kv",
        "forward_hopper", "forward_kv_outer", "forward_masked", "forward_q_outer",
    }  # fmt: skip
    kinds = [(subject.shipped, subject.candidate.family) for subject in listed]
    assert len(set(kinds[: len(set(kinds))])) == len(set(kinds))
    assert subjects(TARGET, 2, 1) == listed


@pytest.mark.slow
def test_subjects_have_features_and_plain_attention() -> None:
    drawn = [subject for subject in subjects(TARGET, 30, 1) if not subject.shipped]
    features = {feature for subject in drawn for feature in subject.problem.features}
    assert len(features) > 10
    assert any(not subject.problem.features for subject in drawn)


def test_subjects_include_only_supported_families() -> None:
    drawn = {subject.candidate.family for subject in subjects(find_target("a100"), 1, 1)}
    assert "forward_q_outer" in drawn
    assert "forward_hopper" not in drawn


@pytest.mark.slow
def test_launches_fill_the_gpu_or_are_small_and_ragged(
    listed: tuple[Subject, ...],
) -> None:
    for subject in listed:
        busy, quiet = (cases_of(subject, TARGET, busy=each) for each in (True, False))
        assert 1 <= len(busy) <= 2
        assert quiet
        for case in (*busy, *quiet):
            assert case.problem.minimal_bytes() <= 2**27
            # The same source serves: nothing differs but extents.
            assert case.problem.computation == subject.problem.computation
        plain = not subject.problem.features
        assert not plain or busy[0].problem.batch * busy[0].problem.heads >= 65


@pytest.mark.parametrize(
    ("log", "counted", "reports"),
    [
        (CLEAN_LOG, 0, 0),
        (f"{INVALID_READ}printed by a program\n========= ERROR SUMMARY: 1 error", 1, 1),
        (f"{RACE}========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)", 2, 2),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, 0),
    ],
)
def test_logs_are_read(log: str, counted: int, reports: int) -> None:
    read = read_log(log)
    assert read is not None
    assert (read.counted, len(read.reports)) == (counted, reports)
    assert len(read.of([DIGEST])) == min(1, reports)
    assert read.of(["2b" * 16]) == ()


@pytest.mark.parametrize("log", ["Segmentation fault", "", INVALID_READ])
def test_incomplete_log_is_not_read(log: str) -> None:
    assert read_log(log) is None


def test_reports_have_levels() -> None:
    read = read_log(f"{RACE}========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)")
    assert read is not None
    assert [is_warning(report) for report in read.reports] == [True, False]


def test_only_memcheck_uses_padding() -> None:
    memcheck, racecheck = (command(Path("cs"), tool, ["program"]) for tool in (MEMCHECK, RACECHECK))
    assert memcheck[-1] == racecheck[-1] == "program"
    assert "--padding" in memcheck
    assert "--padding" not in racecheck


@pytest.mark.parametrize(
    ("tool", "family", "version", "left_out"),
    [
        (RACECHECK, "forward_hopper", OLD, True),
        (RACECHECK, "backward_hopper", "unknown", True),
        (RACECHECK, "forward_hopper", NEW, False),
        (RACECHECK, "forward_q_outer", OLD, False),
        (MEMCHECK, "forward_hopper", OLD, False),
    ],
)
def test_racecheck_skips_unsupported_families(tool: str, family: str, version: str, left_out: bool) -> None:
    assert bool(why_left_out(tool, family, version)) is left_out


def test_missing_sanitizer_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr("benchmarks.sanitizer.sanitizing.USUAL_FOLDERS", ())
    with pytest.raises(FlashtuneError, match=r"install the CUDA toolkit"):
        find_sanitizer()
    found = tmp_path / "home" / "bin" / "compute-sanitizer"
    found.parent.mkdir(parents=True)
    found.write_text("#!/bin/sh\n")
    found.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert find_sanitizer() == found


FOUND = Finding(MEMCHECK, "0" * 32, "forward_hopper", "a kernel", True, 3, 0, "", "Invalid read")


def test_reports_round_trip(tmp_path: Path) -> None:
    report = SanitizerReport(
        "nvidia-h200", OLD, "3.6.0", (FOUND,), (SanitizerRequest(MEMCHECK, "forward_hopper", 2, 1),)
    )
    path = tmp_path / "deep" / "report.json.gz"
    write_report(report, path)
    assert read_report(path, SanitizerReport) == report
    content = path.read_bytes()
    write_report(msgspec.structs.replace(report), path)
    assert path.read_bytes() == content


@pytest.mark.slow
def test_report_resumes_with_current_subjects(listed: tuple[Subject, ...]) -> None:
    known = Finding(RACECHECK, listed[0].digest, listed[0].candidate.family, "a kernel", True)
    gone = msgspec.structs.replace(known, digest="f" * 32)
    report, left = SanitizerReport("nvidia-h200", OLD, "3.6.0", (known, gone, FOUND)).asking(
        RACECHECK, listed
    )
    assert report.findings == (known, FOUND)
    assert listed[0] not in left
    assert not {subject.candidate.family for subject in left} & {"forward_hopper", "backward_hopper"}
    assert sum(one.kernels for one in report.asked) == len(listed)


def test_table_lists_kernels_that_were_not_run() -> None:
    asked = (
        SanitizerRequest(MEMCHECK, "forward_hopper", 5, 2),
        SanitizerRequest(RACECHECK, "backward_hopper", 4, 1, "it is blind"),
        SanitizerRequest(RACECHECK, "forward_hopper", 5, 2, "it is blind"),
    )
    refused = msgspec.structs.replace(FOUND, digest="1" * 32, errors=0, first="", refused="no")
    lines = list(report_lines(SanitizerReport("nvidia-h200", OLD, "3.6.0", (FOUND, refused), asked)))
    assert "| memcheck | forward_hopper | 5 | 2 | 0 | 1 | 0 | 0 | 1 | 3 |" in lines
    assert "| racecheck | forward_hopper | 5 | 2 | 0 | 0 | 0 | 0 | 0 | 5 |" in lines
    assert "Left out of racecheck: backward_hopper, forward_hopper (it is blind)." in lines
    assert lines[-1] == "- Invalid read"


def test_report_without_request_has_a_table() -> None:
    lines = list(report_lines(SanitizerReport("nvidia-h200", OLD, "3.6.0", (FOUND,))))
    assert "| memcheck | forward_hopper | 1 | 1 | 0 | 1 | 0 | 0 | 0 | 0 |" in lines


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
    found = subjects(target, 1, 5)
    for subject in found[:: max(1, len(found) // 6)]:
        for case in cases_of(subject, target, busy=False):
            launch_once(subject.kernel, case, target, torch.device("cuda", 0))
