"""Generates the command-line reference from the commands, and the tables of features and of keys.

`python -m scripts.reference > docs/cli.md` writes the reference. `python -m benchmarks.documents --write`
writes the tables to docs/features.md and docs/shapes.md.
"""

import inspect
from collections.abc import Iterable, Iterator

import click

from flashtune.core.features.table import FEATURES
from flashtune.templates.registry import families
from flashtune.tuner.cli import COMMANDS, EPILOG, main
from flashtune.tuner.cli.command import Command
from flashtune.tuner.cli.options import optional_problem_options
from flashtune.tuner.workloads.models import MODEL_HEADS, model_row
from flashtune.tuner.workloads.presets import MODELS
from flashtune.tuner.workloads.shape_keys import shape_keys

TITLE = """# The command line

This page is generated from the commands' own help: `python -m scripts.reference > docs/cli.md`.

"""


def reference() -> str:
    """Returns the whole page in Markdown."""
    ctx = click.Context(main, info_name="flashtune")
    parts = [TITLE, f"{_prose(main.help)}\n\n", _table(("command", "purpose"), _overview())]
    parts += ["\n```text\n", inspect.cleandoc(EPILOG.replace("\b\n", "")), "\n```\n"]
    for name, command, inner in commands(ctx):
        parts.append(_section(name, command, inner))
    parts += [
        (
            "\n## Shapes\n\nCommands that work on shapes accept any combination of these options. "
            "[Shapes](shapes.md) has the keys of `--shape`.\n\n"
        ),
        _options(*_shapes()),
    ]
    parts += [
        (
            "\n## Models\n\nThe names that `--model` knows. For other models, use `--hf-config` with their "
            "`config.json`.\n\n"
        )
    ]
    parts.append(_table(MODEL_HEADS, map(model_row, MODELS)))
    return "".join(parts)


def feature_table() -> str:
    """Returns the features, an example of each in a shape, and the families that compute it."""
    passes = ("forward", "decode", "backward")
    ordered = sorted(families(), key=lambda family: passes.index(family.name.split("_")[0]))
    rows = (
        (
            entry.title,
            f"`{entry.example}`",
            ", ".join(f"`{family.name}`" for family in ordered if feature in family.features)
            or "the unfused computation",
        )
        for feature, entry in FEATURES.items()
    )
    return _table(("feature", "in a shape", "computed by"), rows).rstrip("\n")


def key_table() -> str:
    """Returns the keys of shapes and their meanings."""
    rows = ((f"`{key}`", text) for key, text in shape_keys().items())
    return _table(("key", "meaning"), rows).rstrip("\n")


def commands(ctx: click.Context) -> Iterator[tuple[str, click.Command, click.Context]]:
    """Yields every command with its full name and context, groups before their commands."""
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
    shared, _ = _shapes()
    # Batches of jobs have an option of the same name as those of tensors.
    common = {(option.name, option.help) for option in shared}
    options = [param for param in command.get_params(ctx) if isinstance(param, click.Option)]
    own = [
        param for param in options if (param.name, param.help) not in common and "--help" not in param.opts
    ]
    if len(options) > len(own) + 1:
        text += "\nTakes [shapes](#shapes).\n"
    if own:
        text += f"\n{_options(own, ctx)}"
    if isinstance(command, Command) and command.examples:
        lines = "".join(f"$ {line}\n" for line in command.examples)
        text += f"\n```console\n{lines}```\n"
    return text


def _shapes() -> tuple[list[click.Option], click.Context]:
    """Returns the options that name shapes, which many commands share."""

    @click.command(add_help_option=False)
    @optional_problem_options
    def bearer() -> None:
        """Carries the options; never called."""

    options = [param for param in bearer.params if isinstance(param, click.Option)]
    return options, click.Context(bearer)


def _options(options: Iterable[click.Option], ctx: click.Context) -> str:
    rows = (option.get_help_record(ctx) or ("", "") for option in options)
    return _table(("option", "meaning"), ((f"`{names}`", meaning) for names, meaning in rows))


def _prose(help_text: str | None) -> str:
    """Returns a help text as Markdown paragraphs, each on one line."""
    paragraphs = inspect.cleandoc(help_text or "").replace("\b\n", "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [_row(heads), "|" + "---|" * len(heads), *map(_row, rows)]
    return "\n".join(lines) + "\n"


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    click.echo(reference(), nl=False)
