"""`flashtune db`: locations, schemas and merges of databases, and deletion."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from flashtune.core.errors import FlashtuneError, StoreError, UsageError, VerificationError, printable
from flashtune.core.record import Outcome, Record
from flashtune.tuner.cli.command import Group
from flashtune.tuner.cli.options import (
    database_option,
    family_option,
    file_option,
    json_option,
    optional_problem_options,
    quiet_options,
    target_filter_option,
    target_option,
)
from flashtune.tuner.cli.output import (
    print_counts,
    print_json,
    print_rows,
    progress_bars,
    say,
    write_result,
)

if TYPE_CHECKING:
    from flashtune.core.problem import Problem
    from flashtune.db import forgetting

AGE = re.compile(r"(\d{1,6})([mhdw])")
UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


class Location(msgspec.Struct, frozen=True):
    """Location of a database: its name in messages, its URL without a password, and whether it exists.

    `exists` is None for a server, which is not contacted.
    """

    database: str
    exists: bool | None


@click.group("db", cls=Group)
def command() -> None:
    """Locate, create and merge databases."""


@command.command("path", examples=("flashtune db path",))
@database_option
@json_option
def path(db: str | None, as_json: bool) -> None:
    """Print the location of the database: its file, or its URL without the password."""
    from flashtune.db.limits import file_exists
    from flashtune.db.location import database_url, describe, sqlite_path

    url = database_url(db)
    file = sqlite_path(url)
    location = Location(describe(url), file_exists(file) if file else None)
    if as_json:
        print_json(location)
    else:
        click.echo(location.database)


@command.command("upgrade", examples=("flashtune db upgrade --db results.sqlite",))
@database_option
@json_option
def upgrade(db: str | None, as_json: bool) -> None:
    """Create the database if there is none, and check that it has this version's schema."""
    from flashtune.db import creation
    from flashtune.db.location import database_url, describe

    done = creation.upgrade(db)
    if as_json:
        print_json(done)
        return
    where = describe(database_url(db))
    say(f"{where} {'has' if done.before else 'was created with'} schema {done.after}")


@command.command("merge", examples=("flashtune db merge other.sqlite",))
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@database_option
@json_option
def merge(sources: tuple[str, ...], db: str | None, as_json: bool) -> None:
    """Copy everything of other databases into the database.

    Sources are paths or URLs, and are only read. Duplicate records are stored once. If both sides have a
    selection, the faster one stays if both were measured under the same versions. Otherwise the database's
    selection stays. On an error, nothing of that source is copied.
    """
    from flashtune.db.store import MergeCounts, open_store
    from flashtune.tuner.tables.admission import why_refused

    with open_store(db) as store:
        counts = [store.merge_from(source, why_refused) for source in sources]
    total = {name: sum(getattr(count, name) for count in counts) for name in MergeCounts.__struct_fields__}
    print_counts(MergeCounts(**total), as_json)


@command.command("pull", examples=("flashtune db pull postgresql+psycopg://reader@host/tuning",))
@click.argument("source", metavar="SOURCE")
@target_option(help="Copy the selections of this GPU, such as h200. Default: the GPU of this machine.")
@quiet_options
@database_option
@json_option
def pull(source: str, target_name: str | None, db: str | None, as_json: bool) -> None:
    """Copy the selections of one GPU from another database, with their machine code.

    SOURCE is a path or URL, and is only read. Records are checked as by flashtune import, and those that may
    not be used are left out. If both sides have a selection, the faster one stays if both were measured under
    the same versions. Otherwise the database's selection stays.
    """
    from flashtune.tuner.tables.pull import pull as pull_selections

    with progress_bars() as bars:
        pulled = pull_selections(source, target_name, db, bars)
    if as_json:
        print_json(pulled)
        return
    print_counts(pulled.counts, as_json)
    say(f"{printable(pulled.target)}: machine code of {pulled.kernels} kernels is new")


class Forgotten(msgspec.Struct, frozen=True):
    """Records that `db forget` deleted, or would delete."""

    deleted: bool  # Whether they were deleted.
    records: int
    groups: tuple[forgetting.Group, ...]  # The records by target, problem and outcome.
    selections: tuple[forgetting.TakenBack, ...]  # Deleted selections, and the new ones.


@command.command(
    "forget",
    examples=(
        "flashtune db forget --outcome timeout --newer-than 2h",
        "flashtune db forget --target h100 --older-than 30d --yes",
    ),
)
@optional_problem_options
@target_filter_option
@click.option(
    "--outcome",
    "outcomes",
    multiple=True,
    type=click.Choice([outcome.value for outcome in Outcome]),
    help="Only records with this outcome. Repeatable.",
)
@family_option(help="Only this kernel family.")
@click.option("--older-than", metavar="AGE", help="Only records stored longer ago: 90m, 12h, 30d, 8w.")
@click.option("--newer-than", metavar="AGE", help="Only records stored more recently.")
@click.option("--yes", is_flag=True, help="Delete without confirmation.")
@database_option
@json_option
def forget(
    problems: tuple[Problem, ...],
    target_name: str | None,
    outcomes: tuple[str, ...],
    family: str | None,
    older_than: str | None,
    newer_than: str | None,
    yes: bool,
    db: str | None,
    as_json: bool,
) -> None:
    """Delete the records that match all filters, after a confirmation.

    Later searches try these candidates again. If a selection is deleted, the best remaining record of its
    shape is selected, if one may be.
    """
    from flashtune.db.forgetting import Forgettable
    from flashtune.db.limits import file_exists
    from flashtune.db.location import database_url, describe, sqlite_path
    from flashtune.db.store import open_store
    from flashtune.tuner.search.selection import next_best
    from flashtune.tuner.tables.lookup import resolved_target

    address = database_url(db)
    path = sqlite_path(address)
    if path is not None and not file_exists(path):
        raise StoreError(f"there is no database {describe(address)}: nothing is stored yet")
    with open_store(db) as store:
        targets = {record.target for record in store.preview(Forgettable())[0]}
        meant = Forgettable(
            problems=tuple(problem.key for problem in problems),
            target=resolved_target(target_name, targets),
            family=family,
            outcomes=outcomes,
            before=moment(older_than) if older_than else None,
            since=moment(newer_than) if newer_than else None,
        )
        if meant == Forgettable():
            raise UsageError(
                "name what to delete, by --shape, --target, --outcome, --family, --older-than or --newer-than"
            )
        groups, lost = store.preview(meant)
        count = sum(group.records for group in groups)
        for group in groups:
            line = f"{group.records:>6}  {group.outcome:<13}  {group.problem} on {group.target}"
            say("  " + printable(line), indent=" " * 23, err=as_json)
        if count and not yes and not _agreed(count, len(lost)):
            raise FlashtuneError("nothing was deleted: answer y, or pass --yes")
        taken = store.forget(meant, next_best) if count else []
    done = Forgotten(bool(count), count, tuple(groups), tuple(taken))
    if as_json:
        print_json(done)
        return
    say(f"{count} records were deleted, and {len(taken)} selections taken back")
    for selection in taken:
        now = (
            f"{selection.family} {selection.config or ''} is selected"
            if selection.family
            else "nothing is selected"
        )
        say(f"  {printable(f'{selection.problem} on {selection.target}: {now} now')}", indent="    ")


def _agreed(count: int, selections: int) -> bool:
    """Returns whether the user confirms a deletion; False without a terminal."""
    question = f"Delete {count} records and take back {selections} selections?"
    try:
        return click.confirm(question, err=True)
    except click.Abort:
        return False


def moment(age: str, now: datetime | None = None) -> str:
    """Returns the time before an age such as `30d`, in ISO 8601 and UTC as in records.

    Raises:
        UsageError: The text is not an age.
    """
    match = AGE.fullmatch(age)
    if match is None:
        raise UsageError(f"{age!r} is not an age: write a number and a unit, such as 90m, 12h, 30d or 8w")
    try:
        past = (now or datetime.now(UTC)) - timedelta(**{UNITS[match[2]]: int(match[1])})
    except OverflowError as error:
        raise UsageError(f"{age!r} reaches before year 1: write a smaller number") from error
    return past.isoformat(timespec="microseconds")


@command.command(
    "compare",
    examples=(
        "flashtune db compare old.json new.json",
        "flashtune db compare old.json new.json --retime kept.json",
    ),
)
@click.argument("old", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("new", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--limit",
    type=click.FloatRange(0, 100),
    default=2.0,
    show_default=True,
    metavar="PERCENT",
    help="Largest loss of speed that passes, relative to the peers in the same run.",
)
@file_option(
    "retime",
    "Time both kernels of each loss on this GPU, and write a table of the faster ones to FILE.",
    "retime",
)
@json_option
def compare_tables(old: Path, new: Path, limit: float, retime: Path | None, as_json: bool) -> None:
    """Compare the tables OLD and NEW of one GPU, before NEW replaces OLD.

    Times are compared relative to the peers that were timed in both runs. The exit code is 1 if NEW lacks a
    problem, loses more than --limit, or has no peer in common with OLD. With --retime, both kernels of such a
    problem are timed again, interleaved on the same inputs, and the faster one stays.
    """
    from flashtune.db.table import load_table
    from flashtune.tuner.tables.table_compare import Retimed, compare, losses, retime_losses

    before, after = load_table(old), load_table(new)
    changes = compare(before, after)
    lost = losses(changes, limit / 100)
    retimed: tuple[Retimed, ...] = ()
    if retime is not None:
        retimed, merged = retime_losses(lost, after)
        write_result(retime, merged)
    if as_json:
        print_json({"changes": len(changes), "losses": lost, "retimed": retimed})
    elif lost:
        rows = [(change.problem, _ms(change.old), _ms(change.new), change.words) for change in lost]
        print_rows(("problem", "old ms", "new ms", "new speed over old"), rows)
    unknown = sum(change.ratio is None for change in lost)
    summary = (
        f"{len(lost) - unknown} problems lose more than {limit:g}%, {unknown} are lost or not comparable"
    )
    if not as_json:
        say(f"{len(changes)} records differ; {summary}")
    if lost and retime is None:
        raise VerificationError(f"{summary}: time them again with --retime")


def _ms(record: Record | None) -> str:
    return f"{record.ms:.4f}" if record and record.ms else "-"
