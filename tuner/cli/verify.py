"""`flashtune verify`: the check that a table's kernels are right, with or without a GPU."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashtune.errors import UsageError, VerificationError
from flashtune.tuner.cli.options import database_option, json_option, target_filter_option
from flashtune.tuner.cli.output import note, print_json, printable

if TYPE_CHECKING:
    from flashtune.record import Record
    from flashtune.target import Target
    from flashtune.tuner.receipts import Receipt
    from flashtune.tuner.verify import Progress
    from flashtune.tuner.verify_report import Report

MOST_SHOWN = 20


@click.command("verify")
@click.option(
    "--table",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A tuned table. The tables that ship with flashtune where neither this nor --db is given.",
)
@target_filter_option
@click.option("--require-gpu", is_flag=True, help="Fail what was not compared on its GPU here.")
@click.option("--same-triton", is_flag=True, help="Fail receipts of another Triton than the installed one.")
@database_option
@json_option
def command(
    table: Path | None,
    target_name: str | None,
    require_gpu: bool,
    same_triton: bool,
    db: str | None,
    as_json: bool,
) -> None:
    """Check that every selected kernel compiles for its GPU, fits, and computes what it should.

    A kernel of this machine's GPU runs on it, and the verdict is remembered, so that dispatch need
    not check again. Any other runs under Triton's interpreter at small sizes and in float32, if it
    is in plain Triton, and needs a receipt: the verdict of a GPU, stored with the record and bound to
    the kernel's digest.
    """
    from flashtune.tuner.verify import remember, verify_records

    records = _records(table, target_name, db)
    with _progress() as progress:
        report = verify_records(
            records, gpu=_gpu(), require_gpu=require_gpu, same_triton=same_triton, progress=progress
        )
    if report.checks:
        remember(report.checks, db)
    if as_json:
        print_json({**_counts(report), "results": report.results})
    else:
        _print(report)
    if report.failures:
        raise VerificationError(
            f"{len(report.failures)} of {len(report.results)} kernels failed: search their shapes again, "
            "on their GPU"
        )


def _records(table: Path | None, target_name: str | None, db: str | None) -> tuple[Record, ...]:
    from flashtune.db.table import load_table
    from flashtune.tuner.stored import Found, database_selections, narrowed, place, shipped_selections

    if table is not None and db is not None:
        raise UsageError("--table and --db each name what to verify: give one of the two")
    if table is not None:
        found = tuple(Found(record, "table") for record in load_table(table).records)
    else:
        found = shipped_selections() if db is None else database_selections(db)
    records = tuple(entry.record for entry in narrowed(found, target_name, ()))
    if not records:
        where = str(table) if table else place(db, shipped=db is None)
        raise UsageError(f"{where} holds nothing to verify: search first, or name another --table or --db")
    return records


def _gpu() -> tuple[int, Target] | None:
    import torch

    from flashtune.target import device_target

    return (0, device_target(0)) if torch.cuda.is_available() else None


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """A bar for each phase, on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    tasks: dict[str, TaskID] = {}
    with Bars(console=Console(stderr=True), transient=True) as bars:

        def show(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase)
            bars.update(tasks[phase], completed=done, total=total)

        yield show


def _counts(report: Report) -> dict[str, int]:
    from flashtune.tuner.verify_report import Means

    counts = {means.value: report.count(means) for means in Means}
    return {
        "kernels": len(report.results),
        **counts,
        "failed": len(report.failures),
        "baselines": report.baselines,
    }


def _source(receipt: Receipt) -> str:
    return (
        f"{printable(receipt.device)}, driver {printable(receipt.driver)}, Triton {printable(receipt.triton)}"
    )


def _print(report: Report) -> None:
    from flashtune.tuner.verify_report import Means

    counts = _counts(report)
    total = counts["kernels"]
    click.echo(
        f"of {total} selected kernels {counts['gpu'] + counts['interpreter']} were checked here "
        f"({counts['gpu']} on the GPU, {counts['interpreter']} under the interpreter), "
        f"{counts['receipt']} by receipt alone and {counts['none']} not at all; {counts['failed']} failed"
    )
    alone = sorted({result.family for result in report.results if result.means is Means.RECEIPT})
    if alone:
        click.echo(f"no interpreter runs {' or '.join(alone)}: without its GPU a receipt is all there is")
    receipts = Counter(_source(result.receipt) for result in report.results if result.receipt)
    for source, count in sorted(receipts.items()):
        click.echo(f"{count} of {total} have a receipt: {source}")
    if report.baselines:
        click.echo(f"{report.baselines} selections are torch's own and were not checked")
    for result in report.failures[:MOST_SHOWN]:
        click.echo(f"failed: {result.problem} on {result.target}: {result.failed}")
    if len(report.failures) > MOST_SHOWN:
        note(f"{len(report.failures) - MOST_SHOWN} more failed: --json lists them all")
