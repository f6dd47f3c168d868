"""`flashtune render`: a kernel as a readable file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashtune.core.errors import UsageError
from flashtune.tuner.cli.command import flashtune_command
from flashtune.tuner.cli.options import database_option, kernel_options, problem_options, target_options
from flashtune.tuner.cli.output import note, write_result

if TYPE_CHECKING:
    from flashtune.core.problem import Problem
    from flashtune.core.target import Target


@flashtune_command(
    "render",
    'flashtune render --target h100 --shape "heads=32,seqlen=4096,head_dim=128" --out kernel.py',
)
@problem_options()
@target_options
@kernel_options
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File to write. Default: -, standard output.",
)
@database_option
def command(
    problems: tuple[Problem, ...],
    target: Target,
    device: int | None,
    family: str | None,
    config: str | None,
    out: Path | None,
    db: str | None,
) -> None:
    """Write the kernel of a shape as a stand-alone Python file.

    The kernel is the selection for the shape and GPU, or the default without a selection. --config and
    --family change it. The file imports only torch and triton.
    """
    from flashtune.templates.config_text import differing_axes
    from flashtune.templates.rendering import render
    from flashtune.tuner.tables.kernel_choice import choose

    del device  # rendering needs no device
    if len(problems) != 1:
        raise UsageError(f"render writes one kernel and was given {len(problems)} shapes: name one")
    chosen = choose(problems[0], target, db, family, config)
    kernel = render(chosen.family, chosen.problem, chosen.config, chosen.specialization)
    label = differing_axes(chosen.config.label(), chosen.family.default(chosen.problem, target).label())
    note(f"{chosen.family.name}, {label} ({chosen.source})")
    write_result(out, kernel.source.encode())
