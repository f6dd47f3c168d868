"""Output of `flashtune search` before, during and instead of a search."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from flashtune.tuner.cli.output import command_line, is_set, print_json, say, shows_progress

if TYPE_CHECKING:
    from rich.console import Console

    from flashtune.tuner.search.coverage import Expectation
    from flashtune.tuner.search.progress import Place
    from flashtune.tuner.search.request import Observer, Progress, SearchRequest


@contextlib.contextmanager
def observed(console: Console, place: Place, latest: list[Progress]) -> Iterator[Observer]:
    """Returns an observer that stores the latest progress, and shows it as the options require."""
    from flashtune.tuner.search.progress import finished_lines, shown

    with contextlib.ExitStack() as stack:
        show = stack.enter_context(shown(console, place)) if shows_progress() else None

        def observe(progress: Progress) -> None:
            latest[:] = [progress]
            if is_set("verbose"):
                for line in finished_lines(progress):
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
            if show is not None:
                show(progress)

        yield observe


def print_interrupted(latest: list[Progress]) -> None:
    """Prints the best kernel of the interrupted search, and the command that resumes it."""
    from flashtune.tuner.search.summary import describe_time

    for progress in latest:
        best = progress.best
        found = "nothing right was found yet"
        if best is not None and best.config is not None:
            found = f"best so far {describe_time(best)}, {best.family} {best.config.label()}"
        click.echo(f"{progress.problem.key}: {found}", err=True)
    click.echo(f"resume with: {command_line()}", err=True)


def expected_of(requests: tuple[SearchRequest, ...], db: str | None) -> tuple[Expectation, ...]:
    """Returns the estimate of each search without creating a database."""
    from flashtune.tuner.execution.backend import compilers_of
    from flashtune.tuner.search.coverage import expect, usual_compile_seconds
    from flashtune.tuner.tables.lookup import database_selections, existing_store, shipped_selections

    # This machine's compile times are a better estimate than those in the shipped tables.
    compile_seconds = usual_compile_seconds(
        [entry.record for entry in database_selections(db)], [entry.record for entry in shipped_selections()]
    )
    with existing_store(db) as store:
        return tuple(
            expect(request, store, compilers_of(request.device, request.jobs), compile_seconds)
            for request in requests
        )


def print_expected(expected: tuple[Expectation, ...], as_json: bool) -> None:
    """Prints a line for each search of a dry run, and their sum."""
    from flashtune.tuner.search.coverage import duration, outlook

    if as_json:
        print_json(expected)
        return
    for one in expected:
        spaces = ", ".join(f"{name} {count:,}" for name, count in one.families.items())
        say(
            f"{one.problem} on {one.target}: {one.candidates:,} candidates ({spaces}), {one.known:,} known "
            f"from before, about {one.tried:,} in about {duration(one.seconds)}"
        )
    click.echo(outlook(expected))
