"""`flashtune import`: JSON tables into the database."""

from pathlib import Path

import click

from flashtune.tuner.cli.command import flashtune_command
from flashtune.tuner.cli.options import database_option, json_option, quiet_options
from flashtune.tuner.cli.output import print_counts, progress_bars


@flashtune_command(
    "import",
    "flashtune import h200.json",
)
@click.argument("tables", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="TABLE...")
@quiet_options
@database_option
@json_option
def command(tables: tuple[Path, ...], db: str | None, as_json: bool) -> None:
    """Read tables that `flashtune export` wrote into the database.

    All files are checked first. A failure leaves the database unchanged. If the database already has a
    selection for a shape, the faster one stays if both were measured under the same versions. Otherwise the
    database's selection stays.
    """
    from flashtune.tuner.tables.table_files import import_tables

    with progress_bars() as bars:
        counts = import_tables(tables, db, bars)
    print_counts(counts, as_json)
