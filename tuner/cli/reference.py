"""The command-line reference, made from the commands themselves.

`python -m flashtune.tuner.cli.reference > docs/cli.md` writes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from flashtune.tuner.cli import COMMANDS, EPILOG, main

TITLE = """# The command line

This page is generated from the commands' own help: `python -m flashtune.tuner.cli.reference > docs/cli.md`.

"""


def reference() -> str:
    """The whole page, in Markdown."""
    ctx = click.Context(main, info_name="flashtune")
    parts = [TITLE, f"{_prose(main.help)}\n", _table(("command", "what it does"), _overview())]
    parts += ["\n```text\n", inspect.cleandoc(EPILOG.replace("\b\n", "")), "\n```\n"]
    for name, command, inner in commands(ctx):
        parts.append(_section(name, command, inner))
    return "".join(parts)


def commands(ctx: click.Context) -> Iterator[tuple[str, click.Command, click.Context]]:
    """Every command with its full name and context, groups before what they hold."""
    group = ctx.command
    assert isinstance(group, click.Group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=ctx)
        yield inner.command_path, command, inner
        if isinstance(command, click.Group):
            yield from commands(inner)


def _overview() -> Iterator[tuple[str, str]]:
    for name, sentence in COMMANDS.items():
        yield f"[{name}](#flashtune-{name})", sentence


def _section(name: str, command: click.Command, ctx: click.Context) -> str:
    usage = " ".join(command.collect_usage_pieces(ctx))
    text = f"\n## {name}\n\n```text\n{name} {usage}\n```\n\n{_prose(command.help)}\n"
    options = [param for param in command.get_params(ctx) if isinstance(param, click.Option)]
    rows = [_option_row(option, ctx) for option in options if option.name != "help"]
    return text + (f"\n{_table(('option', 'meaning'), rows)}" if rows else "")


def _option_row(option: click.Option, ctx: click.Context) -> tuple[str, str]:
    names, meaning = option.get_help_record(ctx) or ("", "")
    return f"`{names}`", meaning


def _prose(help_text: str | None) -> str:
    """A help text as Markdown paragraphs, each on one line."""
    paragraphs = inspect.cleandoc(help_text or "").replace("\b\n", "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _table(heads: tuple[str, str], rows: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> str:
    lines = [f"| {heads[0]} | {heads[1]} |", "|---|---|"]
    lines += [f"| {_cell(left)} | {_cell(right)} |" for left, right in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    click.echo(reference(), nl=False)
