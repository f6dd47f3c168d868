"""Tests of `pytest --sample`."""

from itertools import product

import pytest

from tests import conftest
from tests.support.sampling import covering

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
