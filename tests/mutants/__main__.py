"""Verifies mutants or sampled correct kernels, and reports the outcomes."""

import functools
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import triton

from flashtune.core.errors import FlashtuneError
from flashtune.core.target import device_target
from flashtune.launch.compilation import interpreting
from flashtune.verification.cases import Level
from flashtune.verification.check import INTERPRETER
from tests.mutants.catalogue import gpu_mutants, interpreted_mutants, runs_on
from tests.mutants.interpreted import interpreted
from tests.mutants.pages import pages_runs, texts
from tests.mutants.portable.pools import WORKERS, Plan
from tests.mutants.results import CAUGHT, Control, Fate, Found, Run, save, summary, tally
from tests.mutants.right import sampled_subjects, shipped_subjects, verify_right
from tests.mutants.runner import run_mutants

SEED = 7

Command = Callable[..., Any]


def run_options(command: Command) -> Command:
    """Adds the options that all runs on the GPU have."""
    for option in (
        click.option("--seconds", default=500.0, show_default=True, help="Stop after this long."),
        click.option("--seed", type=int, help="Seed of the inputs; fixed where left out, 0 draws one."),
        click.option("--workers", default=WORKERS, show_default=True, help="Processes that share the GPU."),
        click.option("--out", type=click.Path(path_type=Path), help="Where to save what was found."),
    ):
        command = option(command)
    return command


@click.group(help=__doc__)
def main() -> None:
    """The commands."""


@main.command()
@click.option("--family", help="One family's mutants alone.")
@click.option(
    "--only", multiple=True, help="Mutants with one of these in their name, behind the family's, alone."
)
@click.option("--verbose", is_flag=True, help="Show those that a probe refused as well.")
@run_options
def run(
    family: str | None,
    only: tuple[str, ...],
    verbose: bool,
    seconds: float,
    seed: int | None,
    workers: int,
    out: Path | None,
) -> None:
    """Verifies every mutant on the GPU; fails where one that changes results is accepted."""
    start = time.monotonic()
    plan = _plan(seed, seconds, workers)
    mutants = [
        mutant
        for mutant in gpu_mutants()
        if runs_on(mutant, plan.target)
        and family in {None, mutant.subject.family}
        and (not only or any(part in mutant.id for part in only))
    ]
    controls, results = run_mutants(mutants, plan, functools.partial(_show, verbose=verbose))
    for control in controls:
        if not control.passed:
            click.echo(f"refused though unmodified: {control.label}: {control.failed}")
    click.echo(tally(results))
    _finish(plan, start, out, controls, results)
    if any(result.fate not in {*CAUGHT, Fate.DELAYED, Fate.EQUIVALENT} for result in results) or not all(
        control.passed for control in controls
    ):
        sys.exit(1)


@main.command()
@click.option("--samples", default=40, show_default=True, help="Configs of each family.")
@click.option("--shipped", is_flag=True, help="Shipped kernels with barriers of their own.")
@run_options
def right(
    samples: int, shipped: bool, seconds: float, seed: int | None, workers: int, out: Path | None
) -> None:
    """Verifies sampled configs; fails where one is refused that a ten times stricter check accepts."""
    start = time.monotonic()
    plan = _plan(seed, seconds, workers)
    drawn = shipped_subjects(plan.target) if shipped else sampled_subjects(samples, plan.seed, plan.target)
    controls = verify_right(drawn, plan, _show_control)
    _finish(plan, start, out, controls, ())
    if any(control.wrongly_refused for control in controls):
        sys.exit(1)


@main.command()
@click.option("--seed", default=SEED, show_default=True, help="Seed of the inputs.")
@click.option("--out", type=click.Path(path_type=Path), help="Where to save what was found.")
def interpret(seed: int, out: Path | None) -> None:
    """Verifies what Triton's interpreter can run of them; wants TRITON_INTERPRET=1."""
    if not interpreting():
        raise click.UsageError("set TRITON_INTERPRET=1: without it nothing is interpreted")
    start = time.monotonic()
    results = tuple(map(functools.partial(interpreted, seed=seed), interpreted_mutants()))
    for result in results:
        _show(result, verbose=True)
    made = Run(INTERPRETER, *_versions(), Level.QUICK.value, seed, _since(start), (), results)
    click.echo(summary(made))
    if out is not None:
        save(made, out)


@main.command()
@click.argument("runs", nargs=-1, type=click.Path(exists=True, path_type=Path))
def table(runs: tuple[Path, ...]) -> None:
    """Prints the tables of docs/proof.md."""
    for text in texts(pages_runs(runs)).values():
        click.echo(f"{text}\n")


def _plan(seed: int | None, seconds: float, workers: int) -> Plan:
    drawn = SEED if seed is None else seed or secrets.randbits(30)
    try:
        target = device_target(0)
    except FlashtuneError as error:
        raise click.ClickException("no GPU is visible here, and mutants are run on one") from error
    return Plan(target, drawn, time.monotonic() + seconds, workers)


def _finish(
    plan: Plan, start: float, out: Path | None, controls: tuple[Control, ...], results: tuple[Found, ...]
) -> None:
    device = torch.cuda.get_device_name(0)
    made = Run(device, *_versions(), Level.FULL.value, plan.seed, _since(start), controls, results)
    click.echo(summary(made))
    if out is not None:
        save(made, out)


def _versions() -> tuple[str, str]:
    return str(torch.__version__), str(triton.__version__)


def _since(start: float) -> float:
    return round(time.monotonic() - start, 1)


def _show(result: Found, *, verbose: bool) -> None:
    if result.fate is Fate.REFUSED and not verbose:
        return
    racy = " (racy)" if result.racy else ""
    click.echo(
        f"{result.fate.value:12} {result.seconds:6.1f} s  {result.family}: {result.name}{racy}  "
        f"{result.caught_by[:90]}"
    )


def _show_control(control: Control) -> None:
    if not control.passed:
        click.echo(f"refused, {control.standing}: {control.label}: {control.failed}")


if __name__ == "__main__":
    main()
