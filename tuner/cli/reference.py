"""The command-line reference, made from the commands themselves.

`python -m flashtune.tuner.cli.reference > docs/cli.md` writes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator

import click

from flashtune.tuner.cli import COMMANDS, EPILOG, main
from flashtune.tuner.cli.options import optional_problem_options
from flashtune.tuner.known_models import MODELS
from flashtune.tuner.models import Layers, ModelAttention

TITLE = """# The command line

This page is generated from the commands' own help: `python -m flashtune.tuner.cli.reference > docs/cli.md`.

"""


def reference() -> str:
    """The whole page, in Markdown."""
    ctx = click.Context(main, info_name="flashtune")
    parts = [TITLE, f"{_prose(main.help)}\n\n", _table(("command", "what it does"), _overview())]
    parts += ["\n```text\n", inspect.cleandoc(EPILOG.replace("\b\n", "")), "\n```\n"]
    for name, command, inner in commands(ctx):
        parts.append(_section(name, command, inner))
    parts += ["\n## Shapes\n\nCommands that work on shapes take any mix of these.\n\n", _options(*_shapes())]
    parts += [
        "\n## Models\n\nWhat `--model` knows; any other model's `config.json` is taken by `--hf-config`.\n\n"
    ]
    parts.append(
        _table(("model", "layers", "heads, KV heads, head dim", "type", "from"), map(_model_row, MODELS))
    )
    return "".join(parts)


def _model_row(model: ModelAttention) -> tuple[str, ...]:
    width = str(model.head_dim)
    if model.value_head_dim != model.head_dim:
        width += f" (values {model.value_head_dim})"
    mask = "" if model.causal else ", not causal"
    sizes = f"{model.heads}, {model.kv_heads}, {width}{mask}"
    if model.latent:
        sizes += f"; decode {model.heads}, 1, {model.latent.width} (values {model.latent.values})"
    layers = " and ".join(map(_kind, model.kinds))
    return model.name, layers, sizes, model.dtype.value, model.source


def _kind(kind: Layers) -> str:
    """Layers of one kind: how many, and what they ask for."""
    words = (
        f"window {kind.window}" if kind.window else "",
        f"chunk {kind.chunk}" if kind.chunk else "",
        "softcap" if kind.softcap else "",
        "sinks" if kind.sinks else "",
    )
    asked = ", ".join(word for word in words if word)
    return f"{kind.count} with {asked}" if asked else str(kind.count)


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
    shared, _ = _shapes()
    shared_names = {option.name for option in shared}
    options = [param for param in command.get_params(ctx) if isinstance(param, click.Option)]
    own = [option for option in options if option.name not in shared_names and "--help" not in option.opts]
    if len(options) > len(own) + 1:
        text += "\nTakes [shapes](#shapes).\n"
    return text + (f"\n{_options(own, ctx)}" if own else "")


def _shapes() -> tuple[list[click.Option], click.Context]:
    """The options that name shapes, which many commands share."""

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
    """A help text as Markdown paragraphs, each on one line."""
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
