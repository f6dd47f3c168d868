"""`flashtune sram-audit`: how often the SRAM models are wrong, and how often they save a compilation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flashtune.errors import KernelError
from flashtune.tuner.cli.command import flashtune_command
from flashtune.tuner.cli.completion import complete_targets
from flashtune.tuner.cli.options import json_option, quiet_options
from flashtune.tuner.cli.output import console, print_json, progress_bars

if TYPE_CHECKING:
    from flashtune.target import Target
    from flashtune.tuner.audit import Audit

ALL = "all"
# An audit waits for every compilation: large tiles in float32 take a minute on idle cores.
COMPILE_SECONDS = 600.0
HEADINGS = (
    "family", "GPU", "arch", "points", "in band", "unaligned", "fit", "do not fit", "wrongly pruned",
    "caught", "over-estimates", "model / compiler",
)  # fmt: skip


@flashtune_command(
    "sram-audit",
    "flashtune sram-audit --target h100 --points 100",
)
@click.option(
    "--target",
    "target_names",
    multiple=True,
    metavar="GPU",
    shell_complete=complete_targets,
    help="A GPU to compile for, such as h100, or `all`: one of each architecture, the default. Repeatable.",
)
@click.option(
    "--points",
    type=click.IntRange(min=2),
    default=30,
    show_default=True,
    help="Configs to compare for each family and GPU, half of them near the capacity.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the random configs."
)
@click.option(
    "--jobs", type=click.IntRange(min=1), metavar="N", help="Compiler processes. One per core where left out."
)
@click.option("--markdown", is_flag=True, help="Print a Markdown table.")
@quiet_options
@json_option
def command(
    target_names: tuple[str, ...], points: int, seed: int, jobs: int | None, markdown: bool, as_json: bool
) -> None:
    """Compare the SRAM models with what the compiler asks for.

    Compiles random configs of every family and sets the models' figures against the compiler's. Needs no
    GPU. Exits with 1 where a config that fits would have been pruned, or where less than 90% of those
    that do not fit would have been.
    """
    from flashtune.tuner.audit import Request, run_audit
    from flashtune.tuner.compile_pool import CompilePool
    from flashtune.tuner.processes import usable_cores

    workers = jobs or usable_cores()
    request = Request(_targets(target_names), points, seed, in_flight=workers)
    with CompilePool(workers, COMPILE_SECONDS) as pool, progress_bars() as watch:
        audit = run_audit(request, pool, watch)
    if as_json:
        print_json(audit)
    elif markdown:
        click.echo(_markdown(audit))
    else:
        _print(audit)
    failures = audit.failures()
    if failures:
        raise KernelError(f"the SRAM models miss their bar: {'; '.join(failures)}")


def _targets(names: tuple[str, ...]) -> tuple[Target, ...]:
    from flashtune.target import find_target
    from flashtune.tuner.audit import audit_targets

    if not names or ALL in names:
        return audit_targets()
    return tuple(dict.fromkeys(find_target(name) for name in names))


def _cells(audit: Audit) -> list[tuple[str, ...]]:
    return [
        (
            row.family,
            row.target,
            row.arch,
            str(row.points),
            str(row.in_band),
            str(row.unaligned),
            str(row.fits),
            str(row.misfits),
            str(row.wrongly_pruned),
            f"{row.caught} ({row.caught / row.misfits:.0%})" if row.misfits else "0",
            str(row.overestimates),
            f"{row.median_ratio:.3f}",
        )
        for row in audit.rows
    ]


def _summary(audit: Audit) -> str:
    def total(name: str) -> int:
        return sum(getattr(row, name) for row in audit.rows)

    return (
        f"Triton {audit.triton}, seed {audit.seed}: {total('points')} points, {total('in_band')} of them "
        f"within 0.75 to 1.33 of the capacity; {total('wrongly_pruned')} of {total('fits')} that fit "
        f"wrongly pruned; {total('caught')} of {total('misfits')} that do not fit caught; {total('refused')} "
        "more did not compile"
    )


def _markdown(audit: Audit) -> str:
    rule = tuple("---" if index < 3 else "--:" for index in range(len(HEADINGS)))
    lines = [f"| {' | '.join(cells)} |" for cells in (HEADINGS, rule, *_cells(audit))]
    return "\n".join((_summary(audit) + ".", "", *lines))


def _print(audit: Audit) -> None:
    from rich.table import Table

    table = Table()
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if index < 3 else "right")
    for cells in _cells(audit):
        table.add_row(*cells)
    console().print(table)
    click.echo(_summary(audit))
