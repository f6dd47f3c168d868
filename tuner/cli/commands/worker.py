"""`flashtune worker`: searches the shapes of a queue."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click
import msgspec

from flashtune.tuner.cli.command import flashtune_command
from flashtune.tuner.cli.options import (
    database_option,
    jobs_option,
    json_option,
    quiet_options,
    targets_options,
)
from flashtune.tuner.cli.output import line_width, note, shows_progress, warn

if TYPE_CHECKING:
    from flashtune.core.target import Target

# Seconds between lines of progress of one search. A fleet writes many logs.
PLAIN_SECONDS = 30.0


@flashtune_command(
    "worker",
    "flashtune worker --db postgresql+psycopg://me@host/tuning",
    "flashtune worker --devices all --exit-when-empty",
)
@targets_options
@click.option(
    "--exit-when-empty", is_flag=True, help="End when no job for this GPU is queued or runs. Default: wait."
)
@click.option(
    "--compile-only",
    is_flag=True,
    help="Compile kernels for the jobs of other workers, without a GPU. --target names their GPU.",
)
@jobs_option
@quiet_options
@database_option
@json_option
def command(
    target: Target,
    devices: tuple[int, ...],
    exit_when_empty: bool,
    compile_only: bool,
    jobs: int | None,
    db: str | None,
    as_json: bool,
) -> None:
    """Search the shapes of a queue on this machine's GPUs.

    The worker claims jobs for exactly this model of GPU, of the same versions of flashtune, Triton and the
    templates. The results go to the same database. Ctrl-C and SIGTERM give the job back at once, and another
    worker continues it. --json prints a line for each job. With --target, the worker uses no GPU and claims
    only jobs of search --enqueue --predicted.
    """
    from rich.console import Console

    from flashtune.core.machine import use_own_triton_folder
    from flashtune.db.location import describe
    from flashtune.db.queue import Lease, Queue
    from flashtune.tuner.execution.backend import open_host
    from flashtune.tuner.fleet.worker import run_workers
    from flashtune.tuner.search.progress import plain
    from flashtune.tuner.search.request import Progress
    from flashtune.tuner.search.summary import summary_lines

    console = Console(stderr=True)
    show = plain(
        lambda line: console.print(line, markup=False, highlight=False),
        lambda progress: f"{progress.worker} {progress.problem.key}: {progress.phase}".lstrip(),
        PLAIN_SECONDS,
    )
    noted = ""
    use_own_triton_folder()
    if compile_only:
        from flashtune.tuner.execution.backend import compilers_of
        from flashtune.tuner.fleet.compile_ahead import compile_ahead

        with Queue(db) as queue:
            for job, count in compile_ahead(
                queue, target, compilers_of((), jobs), exit_when_empty=exit_when_empty
            ):
                note(f"job {job}: {count} kernels are compiled")
        return
    with Queue(db) as queue, open_host(devices, jobs) as host:
        events = run_workers(queue, target, host.compiler, host.measurers, exit_when_empty=exit_when_empty)
        with contextlib.closing(events):
            for event in events:
                if isinstance(event, Progress):
                    if shows_progress():
                        show(event)
                elif isinstance(event, Lease):
                    noted = ""
                    note(f"job {event.job} of batch {event.batch}, attempt {event.attempt}")
                elif isinstance(event, str):
                    if event != noted:
                        note(event)
                    noted = event
                else:
                    lease = event.lease
                    if as_json:
                        line = {"job": lease.job, "batch": lease.batch, "attempt": lease.attempt}
                        line |= {"reason": event.reason, "result": event.result}
                        click.echo(msgspec.json.encode(line))
                    elif event.result is not None:
                        lines = summary_lines(event.result, describe(queue.url), db, line_width())
                        click.echo("\n".join(lines))
                    if event.reason:
                        warn(f"job {lease.job}: {event.reason}")
