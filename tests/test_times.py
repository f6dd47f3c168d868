"""Tests of `pytest --times FILE` and `python -m tests.support.times FILES`."""

from pathlib import Path

import pytest

from tests import conftest
from tests.support.times import Times, read, summary

pytest_plugins = ["pytester"]
MODULE = """
import subprocess, sys, time

def test_busy():
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass

def test_child():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.2: pass"], check=True)

def test_sleep():
    time.sleep(0.2)
"""


def test_cpu_time_of_a_test_includes_its_children(pytester: pytest.Pytester) -> None:
    path = pytester.makepyfile(test_cases=MODULE)
    written = pytester.path / "out" / "times.tsv"
    pytester.inline_run("-q", f"--times={written}", path, plugins=[conftest]).assertoutcome(passed=3)

    times = {name.rpartition("::")[2]: seconds for seconds, name in read([written])}

    assert list(times) == ["test_busy", "test_child", "test_sleep"]
    assert times["test_busy"].cpu >= 0.15
    assert times["test_child"].cpu >= 0.15
    assert times["test_sleep"].cpu < 0.1 < times["test_sleep"].wall


def test_summary_sorts_by_cpu_time(tmp_path: Path) -> None:
    (tmp_path / "unit.tsv").write_text("1.0\t9.0\ttests/a.py::test_a\n3.0\t3.0\ttests/b.py::test_b[x y]\n")
    (tmp_path / "interpreter.tsv").write_text("2.0\t2.0\ttests/c.py::test_c\n")

    tests = read([tmp_path / "unit.tsv", tmp_path / "interpreter.tsv"])

    assert tests[0] == (Times(1.0, 9.0), "unit: tests/a.py::test_a")
    title, *rows = summary(tests, slowest=2).split("\n")
    assert title == "3 tests took 6 s of CPU time. The 2 slowest:"
    assert [row.partition(": ")[2] for row in rows] == ["tests/b.py::test_b[x y]", "tests/c.py::test_c"]
