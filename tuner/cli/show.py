"""`flashtune show`: what is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from flashtune.errors import UsageError
from flashtune.tuner.cli.options import (
    database_option,
    json_option,
    optional_problem_options,
    target_filter_option,
)
from flashtune.tuner.cli.output import console, note, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from flashtune.problem import Problem
    from flashtune.tuner.listing import Listed
    from flashtune.tuner.stored import Found


@click.command("show")
@optional_problem_options
@target_filter_option
@click.option(
    "--records", "all_records", is_flag=True, help="Every record of the named shapes, failed ones too."
)
@click.option(
    "--shipped", is_flag=True, help="The tables that ship with flashtune, in place of the database."
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Most rows of a table; JSON has all.",
)
@database_option
@json_option
def command(
    problems: tuple[Problem, ...],
    target_name: str | None,
    all_records: bool,
    shipped: bool,
    limit: int,
    db: str | None,
    as_json: bool,
) -> None:
    """List what is stored: the selected kernel of each shape, or with --records all that was tried.

    The last columns say what a selection is worth here: `timed` was verified and measured by these
    versions, `verified` is right but not timed at this shape, `unproven` has to pass a self-check
    before it serves. Below a selection that cannot address every tensor stands the kernel that
    serves the others.
    """
    from flashtune.tuner.stored import database_selections, narrowed, place, records_of, shipped_selections

    if all_records:
        if not problems or shipped:
            raise UsageError(
                "--records lists what a database holds of a shape: name one by --shape or --model"
            )
        found = tuple(row for problem in problems for row in records_of(problem, None, db))
        rows: tuple[msgspec.Struct, ...]
        rows, table = _records(narrowed(found, target_name, ()), limit)
    else:
        found = shipped_selections() if shipped else database_selections(db)
        rows, table = _selections(narrowed(found, target_name, problems), limit)
    if as_json:
        print_json(rows)
    elif rows:
        console().print(table)
        if len(rows) > limit:
            note(f"{len(rows) - limit} more rows: raise --limit, or name a shape or --target")
    else:
        note(f"nothing is stored for this in {place(db, shipped)}: run flashtune search first")


def _records(found: tuple[Found, ...], limit: int) -> tuple[tuple[Found, ...], Table]:
    from flashtune.tuner.cli.listing import records_table
    from flashtune.tuner.listing import ranked

    rows = ranked(found)
    return rows, records_table(rows[:limit])


def _selections(found: tuple[Found, ...], limit: int) -> tuple[tuple[Listed, ...], Table]:
    from flashtune.tuner.cli.listing import selections_table
    from flashtune.tuner.listing import list_selections

    rows = list_selections(found)
    return rows, selections_table(rows[:limit])
