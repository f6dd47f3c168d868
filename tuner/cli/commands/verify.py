"""`flashtune verify`: verification of a table's kernels, with or without a GPU."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashtune.core.errors import UsageError, VerificationError, printable
from flashtune.tuner.cli.command import flashtune_command
from flashtune.tuner.cli.options import (
    database_option,
    devices_option,
    file_option,
    find_gpus,
    json_option,
    quiet_options,
    target_filter_option,
)
from flashtune.tuner.cli.output import is_set, note, print_json, progress_bars, say, write_result

if TYPE_CHECKING:
    from flashtune.core.record import Record
    from flashtune.core.target import Target
    from flashtune.db.codec import Check
    from flashtune.db.table import TunedTable
    from flashtune.tuner.tables.admission import Receipt
    from flashtune.tuner.verify.on_gpu import OnGpu
    from flashtune.tuner.verify.record_checks import Report

MAX_SHOWN = 20


@flashtune_command(
    "verify",
    "flashtune verify --table h200.json",
    "flashtune verify --db results.sqlite --target h200",
    "flashtune verify --table h100.json --allow-unproven",
)
@click.option(
    "--table",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Tuned table to verify. Default without --db: the shipped tables.",
)
@target_filter_option
@click.option("--require-gpu", is_flag=True, help="Fail kernels that were not run on their GPU here.")
@click.option(
    "--sample",
    "sampled",
    is_flag=True,
    help="Check one kernel for each architecture, family, dtype, head dim, mask and set of features.",
)
@click.option(
    "--allow-unproven",
    is_flag=True,
    help="Pass kernels without a receipt, or that render differently since, if they compile and fit.",
)
@file_option("write", "Write the table with the verdicts of the GPU here as receipts.", "written")
@click.option(
    "--time",
    "timed",
    is_flag=True,
    help="With --write: time the kernels that passed, if their records are of other versions or lack times "
    "with shared masks. Records of other versions take the kernel, verdict and time of this machine.",
)
@click.option(
    "--missing",
    is_flag=True,
    help="With --write: skip checks that the table has under the versions here.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Stop after S seconds. With --write the results so far are written; --missing continues.",
)
@devices_option()
@quiet_options
@database_option
@json_option
def command(
    table: Path | None,
    target_name: str | None,
    require_gpu: bool,
    sampled: bool,
    allow_unproven: bool,
    written: Path | None,
    timed: bool,
    missing: bool,
    seconds: float | None,
    devices: str | None,
    db: str | None,
    as_json: bool,
) -> None:
    """Check that selected kernels compile, fit the GPU and match the reference.

    Kernels for this machine's GPU run on it, or on the GPUs of --devices. The verdicts are stored, so that
    dispatch needs no self-check. Kernels for other GPUs need a receipt: a verdict from such a GPU, stored
    with the record and bound to the kernel's digest. Kernels in plain Triton also run under Triton's
    interpreter, in float32 at small sizes.

    A table that was made without a GPU has no receipts, and changed templates make receipts stale. With
    --allow-unproven such kernels pass if they compile, fit, and match the reference under the interpreter
    where it can run them. Dispatch checks them before their first use.

    With --write, Ctrl-C and SIGTERM write the results so far.
    """
    from flashtune.tuner.verify.record_checks import remember, sample, verify_records
    from flashtune.tuner.verify.verify_jobs import Runs, stopped_by_signals

    if require_gpu and allow_unproven:
        raise UsageError("--require-gpu and --allow-unproven exclude each other: use one of them")
    if (timed or missing) and not written:
        raise UsageError("--time and --missing go with --write: name the file to write")
    gpu = _gpu() if devices is None else find_gpus(devices)
    whole = _written_table(table, db, gpu) if written else None
    tables = _tables(table, db)
    selected = _records(tables, target_name, table, db)
    here = gpu[1].name if gpu else ""
    records = sample(selected, here) if sampled else selected
    with progress_bars() as progress:
        runs = Runs(seconds, progress, hold_errors=written is not None)
        with stopped_by_signals(runs) if written else contextlib.nullcontext():
            report = verify_records(
                records,
                gpu=gpu,
                require_gpu=require_gpu,
                allow_unproven=allow_unproven,
                table=whole if missing else None,
                timed=timed,
                runs=runs,
            )
    if written and whole:
        _write(written, whole, report.on_gpu)
    if report.on_gpu.checks:
        remember(report.on_gpu.checks, db)
    if runs.error is not None:
        raise runs.error
    # A written table omits them.
    strays = () if written else _strays(tables, selected)
    _print(report, left_out=len(selected) - len(records), strays=len(strays), as_json=as_json)
    _raise_failures(report, strays, stopped=runs.stopped, written=written)


def _write(path: Path, table: TunedTable, done: OnGpu) -> None:
    """Writes a table with the verdicts and times of the GPU here."""
    from flashtune.db.table import dump_table
    from flashtune.tuner.tables.table_receipts import with_receipts

    failed = [check for check in done.checks if not check.verdict.passed]
    completed = with_receipts(table, done.passed, done.receipts, done.times, failed, done.resources)
    write_result(path, dump_table(completed))


def _strays(tables: tuple[TunedTable, ...], selected: tuple[Record, ...]) -> tuple[Check, ...]:
    """Returns the receipts of the selected records' tables that are of kernels that no record has."""
    from flashtune.tuner.tables.table_receipts import stray_receipts

    targets = {record.target for record in selected}
    return tuple(receipt for table in tables if table.target in targets for receipt in stray_receipts(table))


def _raise_failures(
    report: Report, strays: tuple[Check, ...], *, stopped: bool, written: Path | None
) -> None:
    """Raises an error if a kernel failed, a receipt is of no record, or the run ended early."""
    if report.failures:
        raise VerificationError(
            f"{len(report.failures)} of {len(report.results)} kernels failed: search their shapes again, "
            "on their GPU"
        )
    if strays:
        raise VerificationError(
            f"{len(strays)} receipts are of kernels that no record has, the first of {strays[0].digest}: "
            "--write leaves them out"
        )
    if stopped:
        raise KeyboardInterrupt
    if report.missed:
        raise VerificationError(
            f"{report.missed} kernels were not reached: allow more --seconds"
            f"{f', or continue with --missing --table {written}' if written else ''}"
        )


def _written_table(
    table: Path | None, db: str | None, gpu: tuple[tuple[int, ...], Target] | None
) -> TunedTable:
    """Returns the table for --write: that of --table, or the one that ships for the GPU here."""
    from flashtune.db.table import load_table, shipped_table

    if gpu is None or db is not None:
        raise UsageError("--write needs the table's GPU and a table: run it there, without --db")
    whole = load_table(table) if table else shipped_table(gpu[1].name)
    if whole is None or whole.target != gpu[1].name:
        raise UsageError(f"--write needs a table of {gpu[1].name}, the GPU here: name one with --table")
    return whole


def _tables(table: Path | None, db: str | None) -> tuple[TunedTable, ...]:
    """Returns the tables to verify: that of --table, or the shipped ones; none with --db."""
    from flashtune.db.table import load_table
    from flashtune.tuner.tables.admission import require_sound_evidence
    from flashtune.tuner.tables.lookup import shipped_tables

    if table is not None and db is not None:
        raise UsageError("--table and --db each name what to verify: give one of the two")
    if table is not None:
        loaded = load_table(table)
        require_sound_evidence(loaded, str(table))
        return (loaded,)
    return shipped_tables() if db is None else ()


def _records(
    tables: tuple[TunedTable, ...], target_name: str | None, table: Path | None, db: str | None
) -> tuple[Record, ...]:
    from flashtune.tuner.tables.lookup import Found, database_selections, narrowed, place

    entries = tuple(Found(record, "table") for each in tables for record in each.records)
    if db is not None:
        entries = database_selections(db)
    records = tuple(entry.record for entry in narrowed(entries, target_name, ()))
    if not records:
        where = str(table) if table else place(db, shipped=db is None)
        raise UsageError(f"{where} holds nothing to verify: search first, or name another --table or --db")
    return records


def _gpu() -> tuple[tuple[int, ...], Target] | None:
    import torch

    from flashtune.core.target import device_target

    return ((0,), device_target(0)) if torch.cuda.is_available() else None


def counts_of(report: Report) -> dict[str, int]:
    """Returns the number of kernels by kind of comparison, and of those that failed or were missed."""
    from flashtune.tuner.verify.record_checks import CheckMethod

    counts = {method.value: report.count(method) for method in CheckMethod}
    return {
        "kernels": len(report.results),
        **counts,
        "failed": len(report.failures),
        "missed": report.missed,
        "peers": report.baselines,
    }


def _source(receipt: Receipt) -> str:
    versions = f"Triton {receipt.triton}, ptxas {receipt.ptxas}, torch {receipt.torch}"
    return printable(f"{receipt.device}, driver {receipt.driver}, {versions}")


def _print(report: Report, *, left_out: int, strays: int, as_json: bool) -> None:
    """Prints a report. `left_out` is the number of kernels that a sample omits."""
    if as_json:
        counts = {**counts_of(report), "left_out": left_out, "unused_receipts": strays}
        print_json({**counts, "results": report.results})
        return
    print_report(report)
    if left_out:
        say(f"{left_out} more kernels were left out: --sample checks one of each class")


def print_report(report: Report) -> None:
    """Prints the counts, the receipts and the failures."""
    from flashtune.templates.registry import find_family
    from flashtune.tuner.verify.record_checks import CheckMethod

    counts = counts_of(report)
    total = counts["kernels"]
    say(
        f"of {total} selected kernels {counts['gpu'] + counts['interpreter']} were checked here "
        f"({counts['gpu']} on the GPU, {counts['interpreter']} under the interpreter), "
        f"{counts['receipt']} by receipt alone and {counts['none']} not at all; {counts['failed']} failed"
    )
    by_receipt = {result.family for result in report.results if result.method is CheckMethod.RECEIPT}
    alone = sorted(name for name in by_receipt if not find_family(name).interpreted)
    if alone:
        say(f"no interpreter runs {' or '.join(alone)}: without its GPU a receipt is all there is")
    receipts = Counter(_source(result.receipt) for result in report.results if result.receipt)
    for source, count in sorted(receipts.items()):
        say(f"{count} of {total} have a receipt: {source}")
    if report.missed:
        say(f"{report.missed} more were not reached before the run ended")
    if report.baselines:
        say(f"{report.baselines} selections are torch's own and were not checked")
    if is_set("verbose"):
        for result in report.results:
            note(f"{result.problem} on {result.target}: {result.failed or 'passed'} ({result.method.value})")
    for result in report.failures[:MAX_SHOWN]:
        say(f"failed: {result.problem} on {result.target}: {result.failed}")
    if len(report.failures) > MAX_SHOWN:
        note(f"{len(report.failures) - MAX_SHOWN} more failed: --json lists them all")
