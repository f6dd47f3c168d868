"""Tests of sanitizer runs of kernels: their subjects and their logs."""

import os
from collections import Counter

import msgspec
import pytest
import torch

from benchmarks.sanitizer import points as kernel_points
from benchmarks.sanitizer.launch import launch_once
from benchmarks.sanitizer.points import cases_of, subjects
from benchmarks.sanitizer.runner import read_log
from flashtune.core.target import device_target, find_target
from flashtune.templates.registry import families
from tests.support.records import shipped_table_of

TARGET = find_target("h200")
RACE = """========= Warning: Race reported between Write access at forward_hopper+0x10 in standard.py:290
=========     and Read access at forward_hopper+0x20 in forward_hopper.py:7 [4 hazards]
=========
========= Error: Race reported between Read access at forward_hopper+0x30 in standard.py:290
=========
"""


@pytest.mark.slow
def test_families_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    table = shipped_table_of(TARGET.name)
    some = msgspec.structs.replace(table, records=table.records[::40])
    monkeypatch.setattr(kernel_points, "shipped_table", lambda name: some if name == TARGET.name else None)
    listed = subjects(TARGET, 2, 1)
    digests = [subject.digest for subject in listed]
    assert len(set(digests)) == len(digests)
    drawn = Counter(subject.candidate.family for subject in listed if not subject.shipped)
    assert drawn == dict.fromkeys((family.name for family in families()), 2)
    kinds = [(subject.shipped, subject.candidate.family) for subject in listed]
    assert len(set(kinds[: len(set(kinds))])) == len(set(kinds))
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


@pytest.mark.gpu
def test_subjects_launch() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    target = device_target(0)
    drawn = subjects(target, 1, 5)
    for subject in drawn[:: max(1, len(drawn) // 6)]:
        for case in cases_of(subject, target, busy=False):
            launch_once(subject.kernel, case, target, torch.device("cuda", 0))
