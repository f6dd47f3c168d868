"""`flashtune import`: JSON tables into the database."""

from __future__ import annotations

from pathlib import Path

import click

from flashtune.tuner.cli.options import database_option, json_option
from flashtune.tuner.cli.output import print_counts


@click.command("import")
@click.argument("tables", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="TABLE...")
@database_option
@json_option
def command(tables: tuple[Path, ...], db: str | None, as_json: bool) -> None:
    """Read tables that flashtune export wrote into the database.

    Every file is checked before anything is written, and a failure leaves the database as it was.
    Where the database has a selection already, the faster measured one stays if the same versions
    made both, else the database's.
    """
    from flashtune.tuner.importing import import_tables

    print_counts(import_tables(tables, db), as_json)
