"""`flashtune sram-audit`: accuracy of the SRAM models, and the compilations that they save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from flashtune.core.errors import KernelError
from flashtune.tuner.cli.command import flashtune_command
from flashtune.tuner.cli.options import family_option, json_option, quiet_options, target_option
from flashtune.tuner.cli.output import (
    console,
    grid,
    note,
    print_json,
    print_table,
    progress_bars,
    say,
    table,
)

if TYPE_CHECKING:
    from flashtune.core.target import Target
    from flashtune.tuner.sram_audit.audit import Audit, Row

ALL = "all"
# An audit needs every compilation: large tiles in float32 take a minute on idle cores.
COMPILE_SECONDS = 600.0
NAMES = ("family", "GPU", "arch")
# Fields of a row, by the headings of their columns.
COUNTS = {
    "points": "points",
    "in band": "in_band",
    "unaligned": "unaligned",
    "fit": "fits",
    "do not fit": "misfits",
    "wrongly pruned": "wrongly_pruned",
    "caught": "caught",
    "over-estimates": "overestimates",
    "not compiled": "refused",
}


@flashtune_command(
    "sram-audit",
    "flashtune sram-audit --target h100 --points 100",
)
@target_option(
    "target_names",
    multiple=True,
    help="GPU to compile for, such as h100, or `all`: one of each architecture. Default: all. Repeatable.",
)
@family_option("chosen", multiple=True, help="Audit only this kernel family. Repeatable.")
@click.option(
    "--points",
    type=click.IntRange(min=2),
    default=30,
    show_default=True,
    help="Configs for each family and GPU. Half of them need nearly all SRAM.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the random configs."
)
@click.option(
    "--jobs", type=click.IntRange(min=1), metavar="N", help="Compiler processes. Default: one per core."
)
@click.option("--markdown", is_flag=True, help="Print Markdown tables.")
@quiet_options
@json_option
def command(
    target_names: tuple[str, ...],
    chosen: tuple[str, ...],
    points: int,
    seed: int,
    jobs: int | None,
    markdown: bool,
    as_json: bool,
) -> None:
    """Compare the SRAM models with the compiler's figures.

    Compiles random configs of every family. Prints totals for each family and GPU, and a row for each pair
    of them. JSON has only the rows. Needs no GPU. Exits with 1 if the models reject a config that fits, or
    accept more than 10% of a GPU's configs that do not fit. Fewer than 20 of these are not judged.
    """
    from flashtune.templates.registry import family_names, find_family
    from flashtune.tuner.execution.compile_pool import CompilePool
    from flashtune.tuner.execution.cpus import available_cpus
    from flashtune.tuner.sram_audit.audit import Request, run_audit

    workers = jobs or available_cpus()
    names = tuple(find_family(name).name for name in chosen) or family_names()
    request = Request(_targets(target_names), points, seed, in_flight=workers, families=names)
    with CompilePool(workers, COMPILE_SECONDS, sizes_only=True) as pool, progress_bars() as watch:
        audit = run_audit(request, pool, watch)
    if as_json:
        print_json(audit)
    elif markdown:
        click.echo(as_markdown(audit))
    else:
        _print(audit)
    for sentence in audit.unjudged():
        note(f"{sentence}: ask for more --points")
    failures = audit.failures()
    if failures:
        raise KernelError(f"the SRAM models exceed their error limit: {'; '.join(failures)}")


def _targets(names: tuple[str, ...]) -> tuple[Target, ...]:
    from flashtune.core.target import find_target
    from flashtune.tuner.sram_audit.audit import audit_targets

    if not names or ALL in names:
        return audit_targets()
    return tuple(dict.fromkeys(find_target(name) for name in names))


def as_markdown(audit: Audit) -> str:
    """Returns the summary and the tables of an audit in Markdown."""
    return "\n\n".join(markdown_parts(audit))


def markdown_parts(audit: Audit) -> tuple[str, ...]:
    """Returns the summary, the sums by family, the sums by GPU, and the rows of every family and GPU."""
    tables = ("\n".join(table(heads, rows)) for heads, rows in _tables(audit))
    return (f"{_summary(audit)}.", *tables)


def _print(audit: Audit) -> None:
    for heads, rows in _tables(audit):
        print_table(console(), grid(heads, rows, [head for head in heads if head not in NAMES], framed=True))
    say(_summary(audit))


def _tables(audit: Audit) -> Iterator[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """Yields headings and rows: sums by family, sums by GPU, and every family on every GPU."""
    for head, key in (("family", "family"), ("GPU", "target")):
        groups: dict[str, list[Row]] = {}
        for row in audit.rows:
            groups.setdefault(getattr(row, key), []).append(row)
        sums = [(name, *_counts(rows)) for name, rows in {**groups, "all": list(audit.rows)}.items()]
        yield (head, *COUNTS), sums
    rows = [
        (row.family, row.target, row.arch, *_counts([row]), f"{row.median_ratio:.3f}") for row in audit.rows
    ]
    yield (*NAMES, *COUNTS, "model / compiler"), rows


def _counts(rows: Sequence[Row]) -> list[str]:
    """Returns the sums of some rows, column by column."""
    sums = _sums(rows)
    share = f" ({sums['caught'] / sums['misfits']:.0%})" if sums["misfits"] else ""
    return [f"{count}{share if name == 'caught' else ''}" for name, count in sums.items()]


def _sums(rows: Sequence[Row]) -> dict[str, int]:
    return {name: sum(getattr(row, name) for row in rows) for name in COUNTS.values()}


def _summary(audit: Audit) -> str:
    sums = _sums(audit.rows)
    return (
        f"Triton {audit.triton}, seed {audit.seed}: {sums['points']} points, {sums['in_band']} of them "
        f"within 0.75 to 1.33 of the capacity. Wrongly pruned: {sums['wrongly_pruned']} of {sums['fits']} "
        f"that fit. Caught: {sums['caught']} of {sums['misfits']} that do not fit. "
        f"Not compiled: {sums['refused']} more"
    )
