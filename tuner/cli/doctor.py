"""`flashtune doctor`: what this machine has and lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flashtune.tuner.cli.options import database_option, json_option
from flashtune.tuner.cli.output import print_json, printable

if TYPE_CHECKING:
    from flashtune.tuner.finding import Finding

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command("doctor")
@click.option(
    "--target",
    "target_name",
    metavar="GPU",
    help="Check the compiler and the shipped table for this GPU, in place of this machine's.",
)
@database_option
@json_option
@click.pass_context
def command(ctx: click.Context, target_name: str | None, db: str | None, as_json: bool) -> None:
    """Check what this machine has, and say what to do about what it lacks.

    Looks at python, torch, triton, the GPUs and their facts, the compiler, the caches, the database
    and the shipped table. Exits with 1 if something that flashtune needs does not work.
    """
    from flashtune.target import find_target
    from flashtune.tuner.doctor import examine
    from flashtune.tuner.finding import Level

    target = find_target(target_name) if target_name else None
    findings = []
    for finding in examine(target, db):
        findings.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        print_json(findings)
    if any(finding.level is Level.FAIL for finding in findings):
        ctx.exit(1)


def _print(finding: Finding) -> None:
    mark = click.style(f"{finding.level.value:<4}", fg=COLOURS[finding.level.value])
    advice = f": {finding.advice}" if finding.advice else ""
    click.echo(f"{mark}  {finding.name:<13}  {printable(finding.said)}{advice}")
