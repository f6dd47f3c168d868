"""The number of CPUs that this process may use, which is the default number of worker processes.

A container may see all CPUs of its host, and have a quota of time on them. The quota is that of its control
group, or of a group around it (https://docs.kernel.org/admin-guide/cgroup-v2.html).
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROCESS = Path("/proc/self")


def available_cpus(process: Path = PROCESS) -> int:
    """Returns the number of CPUs by affinity and quotas, rounded up; at least 1.

    `process` is the folder of the process in /proc.
    """
    # Python's `-X cpu_count` changes the second one.
    counts = [len(os.sched_getaffinity(0)), os.cpu_count() or 1]
    return max(1, min(*counts, *(math.ceil(quota) for quota in _quotas(process))))


def _quotas(process: Path) -> Iterator[float]:
    """Yields the quotas of the groups of a process, in CPUs. Groups that cannot be read are left out."""
    try:
        mounts, lines = ((process / name).read_text(encoding="utf-8") for name in ("mountinfo", "cgroup"))
    except OSError:
        return
    groups = [line.split(":", 2) for line in lines.splitlines()]
    for mount in mounts.splitlines():
        fields, _, rest = mount.partition(" - ")
        kind, *_, options = rest.split()  # the source in between may be empty
        if kind == "cgroup2":
            paths = [path for _, controllers, path in groups if not controllers]
        elif kind == "cgroup" and "cpu" in options.split(","):
            paths = [path for _, controllers, path in groups if "cpu" in controllers.split(",")]
        else:
            continue
        root, point = fields.split()[3:5]
        for path in paths:
            for folder in _folders(PurePosixPath(root), Path(point), PurePosixPath(path)):
                quota = _quota(folder)
                if quota is not None:
                    yield quota


def _folders(root: PurePosixPath, point: Path, path: PurePosixPath) -> Iterator[Path]:
    """Yields the folders of a group and of those around it, down to where `root` is mounted."""
    is_inside = path.is_relative_to(root) and ".." not in path.parts
    inner = path.relative_to(root) if is_inside else PurePosixPath()
    for part in (inner, *inner.parents):
        yield point / part


def _quota(folder: Path) -> float | None:
    """Returns the quota of a group, of version 2 or 1. None if it has none."""
    try:
        limit = (folder / "cpu.max").read_text(encoding="ascii").split()
    except OSError:
        try:
            files = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
            limit = [file.read_text(encoding="ascii") for file in files]
        except OSError:
            return None
    try:
        time, period = map(int, limit)
    except ValueError:
        return None  # "max"
    return time / period if time > 0 and period > 0 else None
