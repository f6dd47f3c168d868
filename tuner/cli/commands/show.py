"""`flashtune show`: lists stored records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from flashtune.core.errors import UsageError
from flashtune.tuner.cli.command import flashtune_command
from flashtune.tuner.cli.options import (
    database_option,
    json_option,
    optional_problem_options,
    target_filter_option,
)
from flashtune.tuner.cli.output import console, note, print_json, print_table

if TYPE_CHECKING:
    from rich.table import Table

    from flashtune.core.problem import Problem
    from flashtune.tuner.tables.listing import Listed
    from flashtune.tuner.tables.lookup import Found

    # Each table with its title.
    Tables = tuple[tuple[str, Table], ...]


@flashtune_command(
    "show",
    "flashtune show",
    "flashtune show --shipped --target h200 --model llama-3.1-8b --wide",
    'flashtune show --records --shape "heads=32,kv_heads=8,seqlen=4096,head_dim=128,causal"',
)
@optional_problem_options
@target_filter_option
@click.option(
    "--records", "all_records", is_flag=True, help="Every record of the named shapes, including failed ones."
)
@click.option("--shipped", is_flag=True, help="The tables that ship with flashtune, instead of the database.")
@click.option(
    "--wide",
    is_flag=True,
    help="Also show the problem key, the family and the config. On a narrow terminal, each selection has a "
    "block of lines.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Largest number of rows of a table. JSON has all rows.",
)
@database_option
@json_option
def command(
    problems: tuple[Problem, ...],
    target_name: str | None,
    all_records: bool,
    shipped: bool,
    wide: bool,
    limit: int,
    db: str | None,
    as_json: bool,
) -> None:
    """List the selected kernel of each shape, or with --records all records.

    A line has the shape, the time (~ if predicted), the speed, and the speed relative to the best SDPA
    backend in the same run. `h32/8 d128 s4096 b1 causal` means 32 query heads, 8 KV heads, head dim 128,
    4096 queries and keys, batch 1, bf16.

    The last column is the state under the installed versions. `timed`: verified and measured. `verified`:
    verified, not timed at this shape. `unproven`: needs a self-check before use. "other strides" marks the
    kernel for tensors that the selection above it cannot address.
    """
    from flashtune.tuner.tables.lookup import (
        database_selections,
        narrowed,
        place,
        records_of,
        shipped_selections,
    )

    if all_records:
        if not problems or shipped:
            raise UsageError(
                "--records lists what a database holds of a shape: name one by --shape or --model"
            )
        entries = tuple(row for problem in problems for row in records_of(problem, None, db))
        rows: tuple[msgspec.Struct, ...]
        rows, tables = _records(narrowed(entries, target_name, ()), limit)
    else:
        entries = shipped_selections() if shipped else database_selections(db)
        rows, tables = _selections(narrowed(entries, target_name, problems), limit, wide)
    if as_json:
        print_json(rows)
    elif rows:
        _print(tables)
        if len(rows) > limit:
            note(f"{len(rows) - limit} more rows: raise --limit, or name a shape or --target")
    else:
        note(f"nothing is stored for this in {place(db, shipped)}: run flashtune search first")


def _records(entries: tuple[Found, ...], limit: int) -> tuple[tuple[Found, ...], Tables]:
    from flashtune.tuner.cli.report.listing import records_tables
    from flashtune.tuner.tables.listing import ranked

    rows = ranked(entries)
    return rows, tuple(records_tables(rows[:limit]))


def _selections(entries: tuple[Found, ...], limit: int, wide: bool) -> tuple[tuple[Listed, ...], Tables]:
    from flashtune.tuner.cli.report.listing import selections_tables, wide_selections_table
    from flashtune.tuner.tables.listing import list_selections

    rows = list_selections(entries)
    if wide:
        return rows, (("", wide_selections_table(rows[:limit])),)
    return rows, tuple(selections_tables(rows[:limit]))


def _print(tables: Tables) -> None:
    """Prints tables under their titles."""
    shown = console()
    for title, table in tables:
        if title:
            shown.print(title, style="bold", highlight=False)
        shown.print(table) if title else print_table(shown, table)
