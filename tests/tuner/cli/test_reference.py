from pathlib import Path

import click
import pytest

from flashtune.tuner.cli import COMMANDS, main
from scripts.reference import commands, reference

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"
ALL = list(commands(click.Context(main, info_name="flashtune")))


def test_reference_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), (
        "write it anew: python -m scripts.reference > docs/cli.md"
    )


def test_reference_contains_every_command() -> None:
    names = {name for name, _, _ in ALL}
    assert {f"flashtune {name}" for name in COMMANDS} <= names
    assert {"flashtune db path", "flashtune db upgrade", "flashtune db merge"} <= names


@pytest.mark.parametrize(("name", "command", "ctx"), ALL, ids=[name for name, _, _ in ALL])
def test_every_command_and_option_has_help(name: str, command: click.Command, ctx: click.Context) -> None:
    assert command.help, name
    assert command.name == name.rpartition(" ")[2]
    for param in command.get_params(ctx):
        if isinstance(param, click.Option):
            assert param.help, f"{name} {param.name}"


PRINTERS = ("search", "show", "explain", "verify", "bench", "import", "sram-audit", "doctor", "db path")


@pytest.mark.parametrize("name", PRINTERS)
def test_commands_that_print_data_print_json(name: str) -> None:
    command, ctx = next((command, ctx) for full_name, command, ctx in ALL if full_name == f"flashtune {name}")
    assert "--json" in {text for param in command.get_params(ctx) for text in param.opts}
