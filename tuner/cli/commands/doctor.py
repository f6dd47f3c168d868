"""`flashtune doctor`: checks of this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from flashtune.core.errors import printable
from flashtune.core.machine import TARGET_VARIABLE
from flashtune.tuner.cli.command import flashtune_command
from flashtune.tuner.cli.options import database_option, json_option, quiet_options, target_option
from flashtune.tuner.cli.output import folded, print_json, shows_progress

if TYPE_CHECKING:
    from flashtune.tuner.analysis.doctor import Finding

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@flashtune_command(
    "doctor",
    "flashtune doctor",
    "flashtune doctor --target h100",
)
@target_option(
    envvar=TARGET_VARIABLE,
    help="Check the compiler and the shipped table for this GPU instead of this machine's.",
)
@quiet_options
@database_option
@json_option
@click.pass_context
def command(ctx: click.Context, target_name: str | None, db: str | None, as_json: bool) -> None:
    """Check this machine's installation, and print a remedy for each problem.

    Checks python, torch, triton, the GPUs, the compiler, the caches, the database and the shipped table.
    Exits with 1 if something that flashtune needs does not work.
    """
    from flashtune.core.target import find_target
    from flashtune.tuner.analysis.doctor import Level, examine

    target = find_target(target_name) if target_name else None
    findings = []
    with _shown_steps() as (watch, pause):
        for finding in examine(target, db, watch):
            findings.append(finding)
            if not as_json:
                pause()
                _print(finding)
    if as_json:
        print_json(findings)
    if any(finding.level is Level.FAIL for finding in findings):
        ctx.exit(1)


@contextlib.contextmanager
def _shown_steps() -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Returns a function that shows the current step on stderr, and one that hides it.

    They do nothing without a terminal or with progress switched off.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if not (console.is_terminal and shows_progress()):
        yield (lambda step: None), (lambda: None)
        return
    status = console.status("")

    def watch(step: str) -> None:
        status.update(f"{step} ...")
        status.start()

    try:
        yield watch, status.stop
    finally:
        status.stop()


def _print(finding: Finding) -> None:
    level, advice = finding.level.value, f": {finding.advice}" if finding.advice else ""
    line = f"{level:<4}  {finding.name:<16}  {printable(finding.message)}{advice}"
    shown = folded(line, " " * 24)
    click.echo(click.style(level, fg=COLOURS[level]) + shown.removeprefix(level))
