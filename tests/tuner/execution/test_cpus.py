"""Tests of the number of available CPUs, with faked control groups."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashtune.tuner.execution.cpus import available_cpus

# Mounts: the number, the root inside of the hierarchy, the point, then type and options.
SECOND = "41 31 0:28 {root} {point} rw - cgroup2 cgroup2 rw\n"
FIRST = "32 31 0:29 {root} {point} rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"


def counted(folder: Path, mount: str, group: str, files: dict[str, str], root: str = "/") -> int:
    """The number of CPUs of a process in a group, whose limits are in files below the mount point."""
    point = folder / "cgroup"
    for name, text in files.items():
        (point / name).parent.mkdir(parents=True, exist_ok=True)
        (point / name).write_text(text)
    process = folder / "process"
    process.mkdir()
    mounts = "1 1 0:1 / / rw - ext4 /dev/root rw\n" + mount.format(root=root, point=point)
    (process / "mountinfo").write_text(mounts)
    (process / "cgroup").write_text(group)
    return available_cpus(process)


@pytest.fixture(autouse=True)
def cpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The number of CPUs of the machine, and those that this process may use."""
    cpus = SimpleNamespace(count=64, chosen=set(range(64)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus.chosen)
    monkeypatch.setattr(os, "cpu_count", lambda: cpus.count)
    return cpus


@pytest.mark.parametrize(
    ("limit", "count"), [("max 100000", 64), ("200000 100000", 2), ("1 100000", 1), ("150000 100000", 2)]
)
def test_a_quota_of_version_2(tmp_path: Path, limit: str, count: int) -> None:
    assert counted(tmp_path, SECOND, "0::/\n", {"cpu.max": limit}) == count


@pytest.mark.parametrize(("limit", "count"), [("-1", 64), ("400000", 4)])
def test_a_quota_of_version_1(tmp_path: Path, limit: str, count: int) -> None:
    files = {"jobs/7/cpu.cfs_quota_us": limit, "jobs/7/cpu.cfs_period_us": "100000"}
    assert counted(tmp_path, FIRST, "3:cpuset:/x\n4:cpu,cpuacct:/jobs/7\n0::/\n", files) == count


def test_the_least_quota_of_nested_groups_counts(tmp_path: Path) -> None:
    files = {
        "a/cpu.max": "300000 100000\n",
        "a/b/cpu.max": "max 100000\n",
        "a/b/c/cpu.max": "800000 100000\n",
    }
    assert counted(tmp_path, SECOND, "0::/a/b/c\n", files) == 3


@pytest.mark.parametrize("group", ["/docker/7/inner", "/../other"])
def test_a_mounted_part_of_the_hierarchy(tmp_path: Path, group: str) -> None:
    files = {"cpu.max": "200000 100000"}
    assert counted(tmp_path, SECOND, f"0::{group}\n", files, root="/docker/7") == 2


def test_affinity_and_machine_limit_the_number(tmp_path: Path, cpus: SimpleNamespace) -> None:
    cpus.count = 5
    assert available_cpus(tmp_path) == 5
    cpus.chosen = {3}
    assert available_cpus(tmp_path) == 1
