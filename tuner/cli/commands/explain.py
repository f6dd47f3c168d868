"""`flashtune explain`: reasons for a kernel's speed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashtune.core.errors import UsageError
from flashtune.tuner.cli.command import flashtune_command
from flashtune.tuner.cli.options import (
    WholeModels,
    database_option,
    file_option,
    json_option,
    kernel_options,
    shape_or_model_options,
    target_options,
)
from flashtune.tuner.cli.output import console, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from flashtune.core.problem import Problem
    from flashtune.core.target import Target


@flashtune_command(
    "explain",
    'flashtune explain --target h100 --shape "heads=32,kv_heads=8,seqlen=4096,head_dim=128,causal"',
    "flashtune explain --target h100 --model llama-3.1-8b --phase decode",
)
@shape_or_model_options
@target_options
@kernel_options
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Number of other candidates to list.",
)
@file_option("plot", "With --phase: also draw the figures to FILE, as a web page. Needs plotly.")
@database_option
@json_option
def command(
    problems: tuple[Problem, ...],
    models: WholeModels | None,
    target: Target,
    device: int | None,
    family: str | None,
    config: str | None,
    top: int,
    plot_file: Path | None,
    db: str | None,
    as_json: bool,
) -> None:
    """Explain the kernel of a shape: SRAM, roofline, HBM traffic, occupancy and candidates.

    Prints the SRAM budget line by line, the roofline, and HBM bytes of this and other loop orders. Prints
    also the resident blocks per SM, and the stored candidates, with counts of the failed ones.

    With --phase, prints the attention of a whole model over sequence length: memory, HBM traffic and
    smallest possible times, of unfused attention and of the kernel, and the size of the KV cache. Needs no
    GPU.
    """
    if models is not None:
        if family or config:
            raise UsageError("--family and --config name one kernel, and --phase explains whole models")
        _explain_models(models, target, db, plot_file, as_json)
        return
    if plot_file is not None:
        raise UsageError(
            "--plot draws whole models over sequence length: add --phase prefill, decode or training"
        )
    from flashtune.tuner.analysis.explain import explain
    from flashtune.tuner.cli.report.explanation import print_explanation
    from flashtune.tuner.tables.kernel_choice import choose
    from flashtune.tuner.tables.lookup import records_of

    del device  # no kernel is launched
    explanations = []
    for problem in problems:
        chosen = choose(problem, target, db, family, config)
        rivals = records_of(chosen.problem, target.name, db)
        explanations.append(explain(chosen, tuple(entry.record for entry in rivals)))
    if as_json:
        print_json(explanations)
        return
    out: Console = console()
    for explanation in explanations:
        print_explanation(out, explanation, top)


def _explain_models(
    models: WholeModels,
    target: Target,
    db: str | None,
    plot_file: Path | None,
    as_json: bool,
) -> None:
    """Prints whole models' attention, and plots it on request."""
    from flashtune.tuner.analysis.model_overview import overviews
    from flashtune.tuner.cli.report.chart_report import require_plotly
    from flashtune.tuner.cli.report.model_report import overview_page, print_overview
    from flashtune.tuner.tables.table_files import write_file

    if plot_file is not None:
        require_plotly()
    explained = [
        overview
        for attention in models.attentions
        for overview in overviews(attention, models.sizes, target, db)
    ]
    if plot_file is not None:
        write_file(plot_file, overview_page(explained).encode())
    if as_json:
        print_json(explained)
        return
    out = console()
    for overview in explained:
        print_overview(out, overview)
