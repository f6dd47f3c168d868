"""`flashtune db`: where databases are, their schema, and joining them."""

from __future__ import annotations

import click
import msgspec

from flashtune.tuner.cli.options import database_option, json_option
from flashtune.tuner.cli.output import print_counts, print_json


class Location(msgspec.Struct, frozen=True):
    """Where a database is: what messages call it, its URL without a password, and whether it exists.

    `exists` is None for a server, which is not asked.
    """

    database: str
    exists: bool | None


@click.group("db")
def command() -> None:
    """Locate, upgrade and merge databases."""


@command.command("path")
@database_option
@json_option
def path(db: str | None, as_json: bool) -> None:
    """Print where the database is: its file, or its URL without the password."""
    from flashtune.db.location import database_url, describe, sqlite_path

    url = database_url(db)
    file = sqlite_path(url)
    location = Location(describe(url), file.exists() if file else None)
    if as_json:
        print_json(location)
    else:
        click.echo(location.database)


@command.command("upgrade")
@database_option
@json_option
def upgrade(db: str | None, as_json: bool) -> None:
    """Bring the database to this version's schema; create it where there is none."""
    from flashtune.db import migrate
    from flashtune.db.location import database_url, describe

    done = migrate.upgrade(db)
    if as_json:
        print_json(done)
        return
    where = describe(database_url(db))
    if done.before == done.after:
        click.echo(f"{where} has schema {done.after} already")
    else:
        click.echo(f"{where} was brought from {done.before or 'nothing'} to schema {done.after}")


@command.command("merge")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@database_option
@json_option
def merge(sources: tuple[str, ...], db: str | None, as_json: bool) -> None:
    """Bring everything of other databases, paths or URLs, into the database.

    The sources are only read. The same record is kept once; where both sides have a selection, the
    faster measured one stays if the same versions made both, else the database's. A source comes in
    whole or, on an error, not at all.
    """
    from flashtune.db.store import MergeCounts, open_store

    with open_store(db) as store:
        counts = [store.merge_from(source) for source in sources]
    total = {name: sum(getattr(count, name) for count in counts) for name in MergeCounts.__struct_fields__}
    print_counts(MergeCounts(**total), as_json)
