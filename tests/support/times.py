"""Records the CPU time of each test: `pytest --times FILE`.

`python -m tests.support.times FILES` prints a summary.
CPU time includes the processes that a test started and waited for. Unlike wall time, it hardly depends on
the load of the machine.
"""

import argparse
import resource
import sys
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

SLOWEST = 10


class Times(NamedTuple):
    """Seconds that a test took, its fixtures included."""

    cpu: float
    wall: float


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of its finished children, until now."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Recorder:
    """Measures each phase of each test, and writes a line for each test that has ended."""

    def __init__(self, path: Path | None) -> None:
        """Args: path: The file to write; None in a process of pytest-xdist, which only measures."""
        self.path = path
        self.spent: dict[str, Times] = {}
        self.last = cpu_seconds()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")

    def pytest_runtest_logstart(self) -> None:
        """Leaves out the time between tests, such as that of their collection."""
        self.last = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attaches the CPU seconds since the phase before to the report of a phase."""
        report = yield
        now = cpu_seconds()
        report.user_properties = [("cpu", now - self.last)]
        self.last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds up the phases of a test and writes the sum after its last phase."""
        if self.path is None:
            return
        before = self.spent.pop(report.nodeid, Times(0.0, 0.0))
        # The report of a test that ended its process has none.
        spent = dict(report.user_properties).get("cpu", 0.0)
        assert isinstance(spent, float)
        times = Times(before.cpu + spent, before.wall + report.duration)
        if report.when != "teardown":
            self.spent[report.nodeid] = times
            return
        with self.path.open("a") as file:
            file.write(f"{times.cpu:.3f}\t{times.wall:.3f}\t{report.nodeid}\n")


def read(paths: Iterable[Path]) -> list[tuple[Times, str]]:
    """Returns the times and names of all tests in some files, in the files' order.

    Raises:
        ValueError: A line does not have the three fields that `Recorder` writes.
    """
    times = []
    for path in paths:
        for line in path.read_text().splitlines():
            cpu, wall, name = line.split("\t", 2)
            times.append((Times(float(cpu), float(wall)), f"{path.stem}: {name}"))
    return times


def summary(tests: Sequence[tuple[Times, str]], slowest: int = SLOWEST) -> str:
    """Returns the slowest tests, by CPU time, and the sum of all, as lines of text."""
    worst = sorted(tests, key=lambda test: test[0].cpu, reverse=True)[:slowest]
    rows = [f"{times.cpu:8.1f} s CPU {times.wall:8.1f} s  {name}" for times, name in worst]
    total = sum(times.cpu for times, _ in tests)
    title = f"{len(tests)} tests took {total:.0f} s of CPU time. The {len(rows)} slowest:"
    return "\n".join([title, *rows])


def main() -> None:
    """Prints the slowest tests of the files that are named."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    sys.stdout.write(summary(read(parser.parse_args().files)) + "\n")


if __name__ == "__main__":
    main()
