"""Output on a terminal of eighty columns: sentences are folded at words, and no number is cut."""

import io

import click
import pytest
from rich.console import Console

from flashtune.core.problem import Dtype
from flashtune.tuner.analysis.doctor import Finding, Level
from flashtune.tuner.analysis.model_overview import Overview, Point, Way
from flashtune.tuner.cli.commands import doctor
from flashtune.tuner.cli.output import print_heading, say
from flashtune.tuner.cli.report.model_report import print_overview
from flashtune.tuner.workloads.model_sizes import Phase

WIDTH = 80
MEMORY = 2**40


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def printed(overview: Overview, width: int) -> str:
    out = io.StringIO()
    print_overview(Console(file=out, width=width), overview)
    return out.getvalue()


def an_overview() -> Overview:
    standard = Way(memory=5 * MEMORY, traffic=576 * MEMORY, bound_ms=189_123.456, bound_by="matrix units")
    flash = Way(memory=MEMORY, traffic=289 * MEMORY, bound_ms=4_553.789, bound_by="memory")
    point = Point(131_072, 16 * MEMORY, standard, flash, ("forward_hopper",), 41.5)
    return Overview("llama-3.1-405b", Phase.PREFILL, "nvidia-rtx-5090", 126, 16, Dtype.BF16, (point,))


def test_model_table_is_split_and_not_truncated() -> None:
    shown = printed(an_overview(), WIDTH)
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= WIDTH
    for cell in ("131,072", "16.0 TiB", "576.0 TiB", "189,123.456", "4,553.789", "matrix units", "41.5x"):
        assert cell in shown


def test_model_table_is_not_split_on_wide_terminals() -> None:
    lines = printed(an_overview(), 200).splitlines()
    assert any("16.0 TiB" in line and "189,123.456" in line for line in lines)


@pytest.mark.parametrize("title", ["short", "a title of several words " * 5])
def test_headings_are_not_truncated(title: str) -> None:
    out = io.StringIO()
    print_heading(Console(file=out, width=WIDTH), title)
    assert "…" not in out.getvalue()
    assert out.getvalue().split()[: len(title.split())] == title.split()


def test_sentences_are_wrapped_at_words(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = "a sentence of many words " * 8 + "and-a-word-that-is-longer-than-the-terminal" * 3
    say(sentence)
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines) == sentence
    assert all(len(line) <= WIDTH for line in lines[:-1])


def test_lines_have_80_columns_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS")
    say("word " * 40)
    assert 70 < max(map(len, capsys.readouterr().out.splitlines())) <= WIDTH


def test_findings_of_doctor_are_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    doctor._print(Finding("temporary folder", Level.WARN, "many words " * 12, "and advice"))
    first, *others = click.unstyle(capsys.readouterr().out).splitlines()
    assert first.startswith("warn  temporary folder  many words")
    assert others
    assert all(line.startswith(" " * 24 + "") and len(line) <= WIDTH for line in others)
