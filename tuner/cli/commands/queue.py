"""`flashtune queue`: the searches that wait for workers, and how they ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from flashtune.core.errors import KernelError, UsageError, printable
from flashtune.tuner.cli.command import Group
from flashtune.tuner.cli.options import AnyCommand, apply_options, database_option, json_option
from flashtune.tuner.cli.output import folded, print_json, print_rows, say

if TYPE_CHECKING:
    from flashtune.db.queue import StateRow
    from flashtune.tuner.search.request import SearchRequest

STATES = ("queued", "running", "done", "failed", "cancelled")
WATCH_SECONDS = 5.0
MINUTE = 60.0
MAX_ID = 2**63 - 1


def enqueue_jobs(requests: Sequence[SearchRequest], priority: int, db: str | None, *, as_json: bool) -> None:
    """Queues searches, and prints the batch and the command that watches it."""
    from flashtune.db.location import describe
    from flashtune.db.queue import Queue
    from flashtune.tuner.fleet.jobs import queue_versions, request_of, spec_of
    from flashtune.tuner.search.executors.executor import longest_first

    specs, target = [spec_of(request) for request in longest_first(requests)], requests[0].target
    with Queue(db) as queue:
        for spec in specs:
            request_of(spec, target)
        batch, added = queue.enqueue(specs, queue_versions(), priority)
        where = f" --db {describe(queue.url)}" if db else ""
    known = len(specs) - added
    if as_json:
        print_json({"batch": batch, "jobs": added, "known": known})
        return
    say(f"{added} shapes for {target.name} are queued as batch {batch}, and {known} were queued before")
    if added:
        click.echo(f"watch with: flashtune queue status --batch {batch} --watch{where}")


@click.group("queue", cls=Group)
def command() -> None:
    """Show and change the searches that wait for workers."""


def queue_command(name: str, *examples: str) -> Callable[[AnyCommand], click.Command]:
    """Makes a function a command with --batch, --db and --json."""
    batch = click.option("--batch", metavar="NAME", help="Only the jobs of one flashtune search --enqueue.")
    options = batch, database_option, json_option
    return lambda function: command.command(name, examples=examples)(apply_options(options, function))


@queue_command("status", "flashtune queue status --watch")
@click.option("--watch", is_flag=True, help="Print again when a count changes, until every job ended.")
def status(batch: str | None, watch: bool, db: str | None, as_json: bool) -> None:
    """Count the jobs of each batch by state.

    With --watch, the exit code is 1 if a job failed.
    """
    from flashtune.db.queue import Queue

    rows: list[StateRow] = []
    with Queue(db) as queue:
        while True:
            latest, rows = rows, queue.batches(batch)
            _require(rows, batch)
            if rows != latest:
                print_json(rows) if as_json else _print_status(rows)
            if not watch or not any(row.is_open for row in rows):
                break
            time.sleep(WATCH_SECONDS)
    failed = sum(row.jobs for row in rows if row.state == "failed")
    if watch and failed:
        raise KernelError(f"{failed} jobs failed: flashtune queue list --state failed says why")


def _print_status(rows: list[StateRow]) -> None:
    groups: dict[tuple[str, str, str], dict[str, StateRow]] = {}
    for row in rows:
        groups.setdefault((row.batch, row.target, row.versions), {})[row.state] = row
    lines = []
    for (batch, target, _), states in groups.items():
        counts = {state: states[state].jobs if state in states else 0 for state in STATES}
        mean = states["done"].seconds if "done" in states else None
        left = ""
        if mean and counts["running"]:
            seconds = mean * (counts["queued"] + counts["running"]) / counts["running"]
            left = f"{seconds / MINUTE:.0f} min"
        lines.append((printable(batch), printable(target), *map(str, counts.values()), left))
    print_rows(("batch", "GPU", *STATES, "left"), lines)


@queue_command("list", "flashtune queue list --state failed")
@click.option(
    "--state", "states", type=click.Choice(STATES), multiple=True, help="Only jobs in this state. Repeatable."
)
def list_jobs(states: tuple[Any, ...], batch: str | None, db: str | None, as_json: bool) -> None:
    """List the latest thousand jobs with their workers, or the reasons of their ends."""
    from flashtune.db.queue import Queue

    with Queue(db) as queue:
        rows = queue.jobs(batch, states)
    if as_json:
        print_json(rows)
        return
    _require(rows, batch)
    for row in rows:
        words = row.reason or (row.worker if row.state == "running" and row.worker else "")
        attempts = f", attempt {row.attempts}" if row.attempts > 1 else ""
        line = f"{row.problem_key} on {row.target}{attempts}{': ' if words else ''}{words}"
        click.echo(folded(f"{row.id:>6}  {row.state:<9}  {printable(line)}", indent=" " * 19))


@queue_command("retry", "flashtune queue retry --batch 1f00a2b3", "flashtune queue retry 17")
@click.argument("ids", nargs=-1, type=click.IntRange(1, MAX_ID), metavar="[JOB]...")
def retry(ids: tuple[int, ...], batch: str | None, db: str | None, as_json: bool) -> None:
    """Queue failed and cancelled jobs again.

    Queued jobs are freed from the driver's version of their first attempt.
    """
    _change("retry", ids, batch, db, as_json=as_json)


@queue_command("cancel", "flashtune queue cancel --batch 1f00a2b3")
@click.argument("ids", nargs=-1, type=click.IntRange(1, MAX_ID), metavar="[JOB]...")
def cancel(ids: tuple[int, ...], batch: str | None, db: str | None, as_json: bool) -> None:
    """Cancel queued and running jobs. Finished results stay stored."""
    _change("cancel", ids, batch, db, as_json=as_json)


def _change(name: str, ids: tuple[int, ...], batch: str | None, db: str | None, *, as_json: bool) -> None:
    """Calls `Queue.retry` or `Queue.cancel`, and prints the number of jobs."""
    from flashtune.db.queue import Queue

    if batch is None and not ids:
        raise UsageError("name the jobs, by their numbers or by --batch: flashtune queue list prints both")
    with Queue(db) as queue:
        count = getattr(queue, name)(batch, ids)
    if as_json:
        print_json({"jobs": count})
    else:
        say(f"{count} jobs are {'queued again' if name == 'retry' else 'cancelled'}")


def _require(rows: list[Any], batch: str | None) -> None:
    if not rows:
        which = f"no job of batch {printable(batch)}" if batch else "no job"
        raise UsageError(f"the queue has {which}: flashtune search --enqueue adds shapes")
