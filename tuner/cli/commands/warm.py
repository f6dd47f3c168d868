"""`flashtune warm`: compiles the kernels of a program's first calls in advance."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashtune.core.errors import KernelError, UsageError, printable
from flashtune.core.machine import DATABASE_VARIABLE
from flashtune.tuner.cli.command import flashtune_command
from flashtune.tuner.cli.options import (
    database_option,
    file_option,
    json_option,
    problem_options,
    quiet_options,
    targets_options,
)
from flashtune.tuner.cli.output import is_set, note, print_json, progress_bars, say

if TYPE_CHECKING:
    from flashtune.core.problem import Problem
    from flashtune.core.target import Target
    from flashtune.db.table import TunedTable
    from flashtune.tuner.tables.warm import Call


MAX_SHOWN = 3


@flashtune_command(
    "warm",
    "flashtune warm --model llama-3.1-8b --seqlen 512..8192",
    "flashtune warm --from calls.jsonl",
    "flashtune warm --table h200.json",
    "flashtune warm --target h100 --model llama-3.1-8b --phase training",
)
@problem_options(recorded_file="--from", table_files="--table")
@file_option(
    "from",
    "Warm the calls of a program, from a file that flashtune.record_calls or FLASHTUNE_RECORD wrote.",
    "recorded_file",
)
@click.option(
    "--table",
    "table_files",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Warm every kernel of a tuned table. Import the table too. Repeatable.",
)
@targets_options
@quiet_options
@database_option
@json_option
def command(
    problems: tuple[Problem, ...],
    recorded_file: Path | None,
    table_files: tuple[Path, ...],
    target: Target,
    devices: tuple[int, ...],
    db: str | None,
    as_json: bool,
) -> None:
    """Compile, load and check the kernels of later calls.

    The first call of a new shape compiles its kernel, which takes seconds, unless a bundle has it. This
    command compiles on all cores the kernels that dispatch would choose and no bundle has: for contiguous
    tensors of the named shapes, and for recorded calls with their own strides. It includes the kernels of the
    integrations for torch and transformers, which round batches and lengths up. --phase training adds the
    forward pass with its log-sum-exp and the backward pass.

    Binaries go to Triton's cache, rendered kernels to flashtune's cache, and self-checks to the database. A
    program with the same caches and database does not compile. With --target, kernels are compiled but not
    loaded.
    """
    from flashtune.db.table import load_table
    from flashtune.dispatch.platform import PLATFORM
    from flashtune.tuner.search.coverage import duration
    from flashtune.tuner.tables.warm import calls_of, needs_of, tables_with, warm, with_buckets

    if db is not None:
        # Programs name their database by this variable.
        os.environ[DATABASE_VARIABLE] = db
    started = time.monotonic()
    tables = tuple(map(load_table, table_files))
    calls = (*calls_of(problems), *_recorded(recorded_file), *_of_tables(tables, target))
    if not calls:
        raise UsageError("the files contain no calls: record a program again, or name shapes")
    tuned = tables_with(target, tables)
    bundles = PLATFORM.bundles
    needs = with_buckets(needs_of(calls, target, tuned, bundles), calls, target, tuned, bundles)
    for sentence in dict.fromkeys(needs.left_out):
        note(f"left out: {sentence}")
    with progress_bars() as bars:
        results = warm(needs, target, devices, bars)
    if is_set("verbose"):
        for result in results:
            ready = f"from {result.bundle}" if result.bundle else f"compiled in {result.seconds:.1f} s"
            ending = result.failed or ready
            note(f"{result.problem}: {result.family} {result.config}: {printable(ending)}")
    failed = [result for result in results if result.failed]
    if as_json:
        print_json(results)
    else:
        done = "compiled, loaded and proven" if devices else "compiled"
        bundled = sum(bool(result.bundle) for result in results)
        if bundled:
            done = f"{done} ({bundled} of them from bundles)"
        took = duration(time.monotonic() - started)
        say(
            f"{len(results) - len(failed)} of {len(results)} kernels are {done} for {target.name}, "
            f"for {len(calls) - len(needs.left_out)} kinds of calls, in {took}"
        )
    if not results:
        raise KernelError("no kernel family computes any of these calls: name other shapes")
    if failed:
        words = "; ".join(f"{result.problem}: {result.failed}" for result in failed[:MAX_SHOWN])
        raise KernelError(
            f"{len(failed)} kernels cannot serve ({words}): search their shapes again, "
            "or run flashtune doctor"
        )


def _recorded(path: Path | None) -> tuple[Call, ...]:
    from flashtune.recording.recorder import read_counts

    if path is None:
        return ()
    return tuple((count.problem, count.specialization) for count in read_counts(path))


def _of_tables(tables: tuple[TunedTable, ...], target: Target) -> tuple[Call, ...]:
    """Returns the problems and the specializations of tables' kernels.

    Raises:
        UsageError: A table is of another GPU.
    """
    for table in tables:
        if table.target != target.name:
            raise UsageError(
                f"a table of {printable(table.target)} cannot be warmed for {target.name}: "
                "name its GPU by --target, or another table"
            )
    records = (record for table in tables for record in table.records)
    return tuple((record.problem, record.specialization) for record in records if record.config)
