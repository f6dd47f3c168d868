"""Tests that every measured number in the documentation comes from a saved result."""

import datetime
import re
from pathlib import Path

import pytest

from benchmarks import charts, documents, figures, headline, numbers, saved
from benchmarks.numbers import Exemption, Kind, unbacked
from flashtune.core.errors import TableError, UsageError

EXEMPTIONS = numbers.read_exemptions(numbers.EXEMPTIONS)


# Mutants are rendered once, for the tests of one process.
@pytest.mark.xdist_group("mutants")
@pytest.mark.slow
def test_generated_text_matches_the_saved_results() -> None:
    differing = [
        path.relative_to(numbers.ROOT).as_posix()
        for path, text in documents.generated().items()
        if path.read_text(encoding="utf-8") != text
    ]
    differing += [
        path.name for path, figure in documents.pictures().items() if not charts.is_current(figure, path)
    ]
    assert not differing, "python -m benchmarks.documents --write"


@pytest.mark.parametrize("page", numbers.pages())
def test_every_measured_number_is_generated_or_exempt(page: str) -> None:
    text = (numbers.ROOT / page).read_text(encoding="utf-8")
    missing = [
        f"{page}:{number.line}: {number.number!r}: {number.around}"
        for number in unbacked(page, text, EXEMPTIONS)
    ]
    assert not missing, (
        "bind each to a saved result, or exempt it with a reason: python -m benchmarks.numbers"
    )


@pytest.mark.parametrize("page", numbers.pages())
def test_no_line_starts_with_a_figure(page: str) -> None:
    # Markdown takes such a line for a block of HTML, which ends the paragraph.
    assert not re.findall(r"(?m)^ *<!-- figure.*", (numbers.ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", sorted({*numbers.pages(), "CHANGELOG.md", "CONTRIBUTING.md"}))
def test_commands_name_modules_that_exist(page: str) -> None:
    lines = (numbers.ROOT / page).read_text(encoding="utf-8").splitlines()
    # The commands in the table of results are those of the time of the run.
    text = "\n".join(line for line in lines if not line.startswith("| ["))
    names = re.findall(r"python -m ((?:benchmarks|examples|flashtune|scripts|tests)[\w.]*\w)", text)
    for name in names:
        path = numbers.ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), name


def test_every_exemption_matches_a_number_of_its_page() -> None:
    assert numbers.unused(EXEMPTIONS) == []


def test_every_result_has_command_date_gpu_and_versions() -> None:
    sources = saved.sources()
    assert set(sources) == set(saved.result_files())
    for name, source in sources.items():
        assert all((source.command, source.gpu, source.torch, source.triton, source.driver)), name
        assert datetime.date(2026, 1, 1) < source.date, name


@pytest.mark.parametrize(
    "sentence",
    [
        "It takes 3.5 ms.",
        "It takes 12 ms.",
        "It is 1.06 to 1.28 of its speed.",
        "It runs at 700 TFLOP/s.",
        "525 of 548 pass.",
        "Of 862 mutants none is left.",
        "It saves 20%.",
        "It costs 15 µs of the host.",
        "2,796 rows were right.",
        "It takes a minute for four shapes.",
        "Times are predicted for nine GPUs.",
        "All cells have sequence length 8192.",
    ],
)
def test_measured_number_without_a_saved_result_is_found(sentence: str) -> None:
    assert {one.line for one in unbacked("docs/a.md", f"# A\n\n{sentence}\n", ())} == {3}


@pytest.mark.parametrize(
    "sentence",
    [
        "torch 2.11, Triton 3.6 and 3.9, Python 3.12",
        "head dim 128, S=8192, 16k tokens, D64",
        "`0.95 ms` is code",
        "```console\n$ run --seconds 3.5\n```",
        "[a page](a.md#2.5-times)",
        "<!-- table a: written by b -->\n| 1.5 ms |\n<!-- end of table a -->",
        "<!-- figure a -->1.5<!-- end --> ms",
    ],
)
def test_versions_shapes_code_and_generated_text_are_not_measured_numbers(sentence: str) -> None:
    assert unbacked("docs/a.md", f"{sentence}\n", ()) == []


def test_exemption_applies_only_to_its_words_on_its_page() -> None:
    exemption = Exemption("docs/a.md", Kind.LIMIT, "a limit of the code", ("at most 5 s",))
    text = "It takes at most\n5 s. It took 5 s.\n"
    assert [number.line for number in unbacked("docs/a.md", text, (exemption,))] == [2]
    assert len(unbacked("docs/b.md", text, (exemption,))) == 2


def test_unused_exemption_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("It takes 5 s.\n", encoding="utf-8")
    kept = Exemption("a.md", Kind.LIMIT, "a limit", ("takes 5 s",))
    gone = Exemption("a.md", Kind.LIMIT, "a limit", ("takes 6 s",))
    assert numbers.unused((kept, gone), tmp_path) == ["a.md: takes 6 s"]


def test_stale_figure_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(figures.FIGURES, "answer", lambda: "42")
    page = "It is <!-- figure answer -->41<!-- end --> of <!-- figure answer -->42<!-- end -->."
    assert figures.with_figures(page) == page.replace("41", "42")


def test_unknown_figure_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no figure nonsense"):
        figures.with_figures("<!-- figure nonsense -->1<!-- end -->")


@pytest.mark.parametrize("name", ["rows.json", "rows.json.gz"])
def test_saved_rows_have_the_run_and_round_trip(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    saved.save(path, {"ms": 1.5})
    result = saved.load(path, dict[str, float])
    assert result.rows == {"ms": 1.5}
    assert result.source.date == datetime.datetime.now(datetime.UTC).date()
    with pytest.raises(TableError, match="holds no such results"):
        saved.load(path, list[str])


@pytest.mark.slow
def test_front_page_was_measured_with_the_current_kernels() -> None:
    assert headline.changed() == [], "measure these cases again, then: python -m benchmarks.headline --write"
