"""`flashtune explain`: why a kernel is as fast as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flashtune.tuner.cli.options import (
    database_option,
    json_option,
    kernel_options,
    problem_options,
    target_options,
)
from flashtune.tuner.cli.output import console, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from flashtune.problem import Problem
    from flashtune.target import Target


@click.command("explain")
@problem_options
@target_options
@kernel_options
@click.option(
    "--top", type=click.IntRange(min=1), default=8, show_default=True, help="How many rivals to list."
)
@database_option
@json_option
def command(
    problems: tuple[Problem, ...],
    target: Target,
    device: int | None,
    family: str | None,
    config: str | None,
    top: int,
    db: str | None,
    as_json: bool,
) -> None:
    """Explain the kernel of a shape: what it takes, what bounds it, and what it was chosen over.

    Shown are the SRAM budget item by item against the capacity; the roofline; HBM bytes of its order
    of loops against other orders and the standard computation; how many blocks share a
    multiprocessor; and the stored rivals, failed ones counted by outcome. Needs no GPU.
    """
    from flashtune.tuner.chosen import choose
    from flashtune.tuner.cli.explanation import print_explanation
    from flashtune.tuner.explain import explain
    from flashtune.tuner.stored import records_of

    del device  # nothing is launched
    explanations = []
    for problem in problems:
        chosen = choose(problem, target, db, family, config)
        rivals = records_of(chosen.problem, target.name, db)
        explanations.append(explain(chosen, tuple(found.record for found in rivals)))
    if as_json:
        print_json(explanations)
        return
    out: Console = console()
    for explanation in explanations:
        print_explanation(out, explanation, top)
