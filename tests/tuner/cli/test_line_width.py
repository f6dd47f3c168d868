"""No line of a command's output is longer than 80 columns, except words that cannot be divided."""

import io
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from rich.console import Console

from benchmarks.saved import RESULTS, content
from flashtune.core.problem import Dtype
from flashtune.core.record import Record
from flashtune.tuner.analysis.doctor import Finding, Level
from flashtune.tuner.analysis.model_overview import Overview, Point, Way
from flashtune.tuner.cli import main
from flashtune.tuner.cli.commands import doctor
from flashtune.tuner.cli.output import print_heading, say
from flashtune.tuner.cli.report.model_report import print_overview
from flashtune.tuner.workloads.model_sizes import Phase
from tests.tuner.cli.conftest import Run

WIDTH = 80
SHAPE = "heads=8,kv_heads=2,seqlen=1024,head_dim=64,causal,batch=2"


@pytest.fixture(autouse=True)
def narrow(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def command_names(group: click.Group = main, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield before
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from command_names(command, (*before, name))
        else:
            yield (*before, name)


def too_long(text: str) -> list[str]:
    """Returns the long lines that a space divides."""
    lines = (line.rstrip() for line in click.unstyle(text).splitlines())
    return [line for line in lines if len(line) > WIDTH and re.search(r"\S\s+\S", line.strip())]


@pytest.mark.parametrize("name", list(command_names()), ids="-".join)
def test_help_fits(run: Run, name: tuple[str, ...]) -> None:
    result = run(*name, "--help")
    assert result.exit_code == 0
    assert too_long(result.output) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("models",),
        ("targets",),
        ("families",),
        ("show",),
        ("show", "--wide"),
        ("show", "--shipped", "--limit", "1000"),
        ("show", "--shipped", "--wide", "--limit", "1000"),
        ("show", "--records", "--shape", SHAPE),
        ("show", "--records"),
        ("search",),
        ("search", "--shape", SHAPE, "--target", "h100", "--dry-run"),
        ("search", "--shape", SHAPE, "--family", "hopper", "--target", "h100"),
        ("search", "--model", "llama", "--target", "h100"),
        ("explain", "--shape", SHAPE, "--target", "h200"),
        ("explain", "--model", "gemma-3-27b", "--phase", "decode", "--target", "h200"),
        ("bench", "--peer", "nothing", "--shape", SHAPE),
        ("db", "path"),
        ("db", "upgrade"),
        ("db", "forget", "--target", "h200", "--yes"),
        ("db", "merge", "missing.sqlite"),
        ("import", "missing.json"),
        ("verify", "--table", "missing.json"),
        ("export", "--model", "phi-2"),
        ("db", "frgoet"),
        ("wram",),
    ],
    ids=" ".join,
)
def test_output_fits(run: Run, stored: tuple[Record, ...], arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.output
    assert "…" not in result.output
    assert too_long(result.output) == []


def test_loaded_report_fits(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_bytes(content(RESULTS / "nvidia-h200-bench.json.gz"))
    result = run("bench", "--load", str(path))
    assert result.exit_code == 0
    assert too_long(result.output) == []


MEMORY = 2**40


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
