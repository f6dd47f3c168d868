"""Tests of the options of these tests: `--sample`, `--times` and FLASHTUNE_FUZZ."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests import conftest
from tests.support.sampling import covering
from tests.support.times import Times, read, summary

pytest_plugins = ["pytester"]
MODULE = """
import pytest

@pytest.mark.sampled
@pytest.mark.parametrize("width", [{8}, {16}, {32}], ids=str)
@pytest.mark.parametrize(("causal", "lengths"), [(False, 1), (True, 2)])
def test_grid(width, causal, lengths):
    pass

@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("pair", range(9))
def test_list(pair):
    pass

@pytest.mark.parametrize("pair", range(9))
def test_cheap(pair):
    pass
"""


@pytest.mark.parametrize("sizes", [(1,), (5,), (3, 4), (2, 3, 5)])
def test_cover_contains_every_value_with_minimal_length(sizes: tuple[int, ...]) -> None:
    axes = [[f"value {value}" for value in range(size)] for size in sizes]
    cases = [dict(zip("abc", values, strict=False)) for values in product(*axes)]

    chosen = covering(cases)

    assert {value for position in chosen for value in cases[position].items()} == {
        value for case in cases for value in case.items()
    }
    assert len(chosen) == max(sizes)


def collect(pytester: pytest.Pytester, source: str, *options: str) -> tuple[list[str], int]:
    """Returns the names of the tests that a run with this suite's conftest selects, and its exit status."""
    path = pytester.makepyfile(test_cases=source)
    ended = pytester.inline_run("--collect-only", "-q", *options, path, plugins=[conftest])
    finished = ended.getcalls("pytest_collection_finish")
    return [item.name for call in finished for item in call.session.items], ended.ret or 0


def test_sample_covers_marked_tests_and_keeps_all_others(pytester: pytest.Pytester) -> None:
    everything, _ = collect(pytester, MODULE)
    sampled, _ = collect(pytester, MODULE, "--sample")

    assert len(everything) == 6 + 9 + 9
    assert [name for name in sampled if "grid" in name] == [
        "test_grid[False-1-{8}]",
        "test_grid[False-1-{32}]",
        "test_grid[True-2-{16}]",
    ]
    assert [name for name in sampled if "list" in name] == ["test_list[0]", "test_list[4]", "test_list[8]"]
    assert sum("cheap" in name for name in sampled) == 9


@pytest.mark.parametrize(
    ("marker", "words"),
    [("sampled(every=1)", "N above 1"), ("sampled(3)", "N above 1"), ("sampled", "test without parameters")],
)
def test_a_marker_that_selects_nothing_is_refused(
    pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str], marker: str, words: str
) -> None:
    case = "" if marker == "sampled" else '@pytest.mark.parametrize("n", range(9))\n'
    argument = "n" if case else ""
    source = f"import pytest\n\n@pytest.mark.{marker}\n{case}def test_one({argument}):\n    pass\n"

    _, status = collect(pytester, source, "--sample")

    assert status == pytest.ExitCode.USAGE_ERROR
    assert words in "\n".join(capsys.readouterr())


TIMED = """
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
    path = pytester.makepyfile(test_cases=TIMED)
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


def test_fuzz_count_is_chosen_by_the_environment(
    fuzz_count: Callable[[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASHTUNE_FUZZ", raising=False)
    assert fuzz_count(3, 500) == 3
    for size, expected in (("small", 3), ("large", 500)):
        monkeypatch.setenv("FLASHTUNE_FUZZ", size)
        assert fuzz_count(3, 500) == expected
    monkeypatch.setenv("FLASHTUNE_FUZZ", "huge")
    with pytest.raises(ValueError, match="FLASHTUNE_FUZZ is 'huge': set it to small or large"):
        fuzz_count(3, 500)
