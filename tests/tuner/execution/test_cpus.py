"""Tests of the number of available CPUs, with faked control groups."""

import os
from pathlib import Path

import pytest

from flashtune.tuner.execution.cpus import available_cpus
from tests.support.fakes import install

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


class Cpus:
    """The CPUs of a machine, and those that this process may use."""

    count = 64
    chosen = frozenset(range(64))

    def cpu_count(self) -> int:
        return self.count

    def sched_getaffinity(self, process: int) -> frozenset[int]:
        return self.chosen


@pytest.fixture(autouse=True)
def cpus(monkeypatch: pytest.MonkeyPatch) -> Cpus:
    fake = Cpus()
    install(monkeypatch, fake, os)
    return fake


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


def test_affinity_and_machine_limit_the_number(tmp_path: Path, cpus: Cpus) -> None:
    cpus.count = 5
    assert available_cpus(tmp_path) == 5
    cpus.chosen = frozenset({3})
    assert available_cpus(tmp_path) == 1
