"""No line of a command's output is longer than 80 columns, except words that cannot be divided."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import Result

from benchmarks.saved import RESULTS, content
from flashtune.core.record import Record
from flashtune.tuner.cli import main

Run = Callable[..., Result]
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
