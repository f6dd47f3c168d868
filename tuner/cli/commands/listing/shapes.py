"""`flashtune shapes`: the keys of `--shape`."""

import click

from flashtune.tuner.cli.command import Command
from flashtune.tuner.cli.options import json_option
from flashtune.tuner.cli.output import print_json
from flashtune.tuner.workloads.shape_keys import EXAMPLES, GRAMMAR, PLAIN_KEYS, shape_keys


class ShapesCommand(Command):
    """A command whose help lists the keys of shapes."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the keys before the options."""
        meanings = {key: text.replace("`", "") for key, text in shape_keys().items()}
        for title, is_plain in (("Keys", True), ("Keys of features", False)):
            with formatter.section(title):
                formatter.write_dl(
                    [(key, text) for key, text in meanings.items() if (key in PLAIN_KEYS) is is_plain]
                )
        super().format_options(ctx, formatter)


@click.command(
    "shapes",
    cls=ShapesCommand,
    help=f"List the keys of --shape.\n\n{GRAMMAR} heads, head_dim and seqlen are required.",
    examples=("flashtune shapes", *(f'flashtune search --shape "{shape}"' for shape in EXAMPLES)),
)
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Prints the help, or the keys and their meanings as JSON."""
    if as_json:
        print_json(shape_keys())
    else:
        click.echo(ctx.get_help())
