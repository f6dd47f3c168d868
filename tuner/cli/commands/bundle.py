"""`flashtune bundle`: files of compiled kernels."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from flashtune.core.errors import KernelError, UsageError, VerificationError, printable
from flashtune.tuner.cli.command import Group
from flashtune.tuner.cli.options import (
    devices_option,
    file_option,
    find_gpus,
    json_option,
    optional_problem_options,
    quiet_options,
    target_options,
)
from flashtune.tuner.cli.output import (
    note,
    print_json,
    print_rows,
    progress_bars,
    quantity,
    say,
    write_result,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flashtune.bundle.records import Entry
    from flashtune.core.problem import Problem
    from flashtune.core.target import Target
    from flashtune.db.table import TunedTable
    from flashtune.tuner.cli.options import AnyCommand
    from flashtune.tuner.tables.warm import Call

out_option = click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("kernels.bundle"),
    show_default=True,
    metavar="FILE",
    help="The file to write.",
)


class Verification(msgspec.Struct, frozen=True):
    """The result of a verification, in numbers of kernels."""

    file: str  # The file with the receipts.
    verified: int  # That got a receipt in this run.
    earlier: int  # With a receipt of this GPU before, or without need of one.
    failed: dict[str, str]  # Why, by the kernel's digest.
    unused: int  # Not verified, because dispatch chooses them for no known call.
    left: int  # Not reached.
    seconds: float


def bundle_table_option(help_text: str) -> Callable[[AnyCommand], AnyCommand]:
    """`--table`: tuned tables as `table_files`."""
    return click.option(
        "--table",
        "table_files",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help=f"{help_text} Repeatable.",
    )


@click.group("bundle", cls=Group)
def command() -> None:
    """Build, verify, list and merge files of compiled kernels."""


@command.command(
    "build",
    examples=(
        "flashtune bundle build --target h200",
        "flashtune bundle build --target h200 --table h200.json --out tuned.bundle",
        "flashtune bundle build --target h100 --model llama-3.1-8b --seqlen 2048",
    ),
)
@optional_problem_options
@bundle_table_option("Build the kernels of a tuned table.")
@click.option(
    "--base",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A bundle. Its kernels are taken, and not compiled again.",
)
@target_options
@out_option
@quiet_options
def build_bundle(
    problems: tuple[Problem, ...],
    table_files: tuple[Path, ...],
    base: Path | None,
    target: Target,
    device: int | None,
    out: Path,
) -> None:
    """Compile kernels for a GPU into one file. No GPU is needed.

    The kernels are those that dispatch would choose for the named shapes and tables. By default, they are
    those of the shipped table, and of untuned shapes with each head dim, type and single feature. There are
    also kernels that split many keys of few queries, and batch-invariant ones. They get the receipts of
    `db/receipts` for the same machine code.

    Two builds by the same Triton give the same bytes, except for some float32 kernels. Triton does not
    reproduce their machine code.
    """
    from flashtune.bundle.bundle_file import open_bundle
    from flashtune.tuner.tables.bundles import build
    from flashtune.tuner.tables.warm import tables_with

    del device  # Nothing runs on a GPU.
    if base:
        open_bundle(base)  # Reports errors before the work.
    tables = _tables(table_files, target)
    calls = _named_calls(problems, tables) if problems or tables else _usual_calls(target)
    with progress_bars() as bars:
        built = build(calls, target, tables_with(target, tables), base=base, watch=bars)
    for sentence in built.left_out:
        note(f"left out: {sentence}")
    if not built.entries:
        raise KernelError("no kernel family computes any of these calls: name other shapes")
    _write(out, target.arch, built.entries, built.codes)


@command.command(
    "verify",
    examples=(
        "flashtune bundle verify kernels.bundle",
        "flashtune bundle verify kernels.bundle --out verified.bundle --devices 0,1 --seconds 480",
        "flashtune bundle verify llama.bundle --model llama-3.1-8b --seqlen 2048",
    ),
)
@click.argument("file", type=click.Path(path_type=Path))
@optional_problem_options
@bundle_table_option("Also verify kernels that dispatch takes from a tuned table.")
@devices_option(default="all", show_default=True)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes for each GPU. Default: by the cores and the free GPU memory.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Start no kernel after S seconds.",
)
@file_option("out", "The file to write. Default: the same file.", "out")
@quiet_options
@json_option
def verify_bundle(
    file: Path,
    problems: tuple[Problem, ...],
    table_files: tuple[Path, ...],
    devices: str,
    processes: int | None,
    seconds: float | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Verify the kernels without a receipt of this GPU, and write the file with receipts.

    A kernel is verified at a problem that dispatch chooses it for: of the shipped table, of `build`'s untuned
    shapes, or of the named shapes and tables. Several processes share each GPU.

    The file is written every 30 seconds and at the end, also after Ctrl-C and SIGTERM. Run the command on the
    written file to continue.
    """
    from flashtune.bundle.bundle_file import open_bundle
    from flashtune.tuner.execution.processes import start_server
    from flashtune.tuner.tables.warm import tables_with
    from flashtune.tuner.verify.bundle_verification import process_count, unverified, uses_of, verify
    from flashtune.tuner.verify.verify_jobs import Runs, stopped_by_signals

    start = time.monotonic()
    indexes, target = find_gpus(devices)
    tables = _tables(table_files, target)
    out = out or file
    bundle = open_bundle(file)
    if out.exists() and not out.samefile(file):
        raise UsageError(f"{out} exists: verify it to continue, or name another file by --out")
    with progress_bars() as bars:
        runs = Runs(seconds, bars)
        start_server()
        kernels = unverified(bundle, target)
        calls = [*_usual_calls(target), *_named_calls(problems, tables)]
        uses = uses_of(bundle, kernels, calls, target, tables_with(target, tables), bars)
        processes = processes or process_count(indexes)
        with stopped_by_signals(runs):
            results = verify(file, out, uses, indexes, processes, runs, bars)
    failed = {kernel: result for kernel, result in results.items() if isinstance(result, str)}
    report = Verification(
        file=str(out),
        verified=len(results) - len(failed),
        earlier=len(bundle.index.entries) - len(kernels),
        failed={kernel: f"{uses[kernel].record.family}: {why}" for kernel, why in failed.items()},
        unused=len(kernels) - len(uses),
        left=len(uses) - len(results),
        seconds=time.monotonic() - start,
    )
    _report(report, as_json=as_json)
    if runs.stopped:
        raise KeyboardInterrupt
    if report.failed or report.left:
        raise VerificationError(
            f"{len(report.failed)} kernels failed and {report.left} were not reached: "
            f"run `flashtune bundle verify {out}` to verify those without a receipt"
        )


def _tables(files: Iterable[Path], target: Target) -> list[TunedTable]:
    """Returns the tables of some files. All must be of one GPU."""
    from flashtune.db.table import load_table

    tables = [*map(load_table, files)]
    for table in tables:
        if table.target != target.name:
            raise UsageError(
                f"a table of {printable(table.target)} cannot be used for {target.name}: "
                "name its GPU by --target, or another table"
            )
    return tables


def _named_calls(problems: Iterable[Problem], tables: Iterable[TunedTable]) -> list[Call]:
    """Returns the calls of shapes and tables."""
    from flashtune.tuner.tables.bundles import table_calls
    from flashtune.tuner.tables.warm import calls_of

    return [*calls_of(problems), *(call for table in tables for call in table_calls(table))]


def _usual_calls(target: Target) -> list[Call]:
    """Returns the calls of the shipped table and of untuned shapes."""
    from flashtune.db.table import shipped_table
    from flashtune.tuner.tables.bundles import coverage_calls

    shipped = shipped_table(target.name)
    return [*_named_calls((), (shipped,) if shipped else ()), *coverage_calls()]


def _report(report: Verification, *, as_json: bool) -> None:
    """Prints the result of a verification."""
    for kernel, reason in report.failed.items():
        note(printable(f"{kernel}: {reason}"))
    if as_json:
        print_json(report)
        return
    say(
        f"{report.file} has {report.verified} new receipts and {report.earlier} kernels that needed none; "
        f"{len(report.failed)} failed and {report.left} are left, after {report.seconds:.0f} s"
    )
    if report.unused:
        say(
            f"{report.unused} kernels are not verified, because dispatch chooses them for no known call: "
            "name their shapes"
        )


@command.command(
    "list",
    examples=(
        "flashtune bundle list kernels.bundle",
        "flashtune bundle list kernels.bundle --receipts db/receipts",
    ),
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--receipts",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Also add its receipts to the files of a folder, one for each GPU.",
)
@json_option
def list_bundle(file: Path, receipts: Path | None, as_json: bool) -> None:
    """Check a file, and list its kernels."""
    from flashtune.bundle.bundle_file import open_bundle
    from flashtune.db.machine_receipts import files_with
    from flashtune.tuner.tables.bundles import listed

    bundle = open_bundle(file)
    rows = listed(bundle)
    if receipts:
        for path, content in files_with(bundle.entries(), receipts).items():
            write_result(path, content)
    if as_json:
        print_json(rows)
        return
    columns = (
        (
            *(row.family, row.kernel[:12], " ".join(row.functions), quantity(row.code_bytes)),
            *(" ".join(row.verified) or "-", row.triton),
        )
        for row in rows
    )
    print_rows(("family", "kernel", "functions", "code", "verified on", "Triton"), columns)


@command.command("merge", examples=("flashtune bundle merge a.bundle b.bundle --out both.bundle",))
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=click.Path(path_type=Path))
@out_option
def merge_bundles(sources: tuple[Path, ...], out: Path) -> None:
    """Write the kernels of several files into one.

    Files are of one architecture. If two have different machine code for a kernel, that of the first stays.
    """
    from flashtune.bundle.bundle_file import merged, open_bundle

    bundles = [*map(open_bundle, sources)]
    _write(out, bundles[0].index.arch, *merged(bundles))


def _write(out: Path, arch: str, entries: list[Entry], codes: dict[str, bytes]) -> None:
    """Writes a bundle, and reports its size."""
    from flashtune.bundle.bundle_file import dump_bundle
    from flashtune.core import VERSION

    content = dump_bundle(arch, VERSION, entries, codes)
    write_result(out, content)
    verified = sum(bool(entry.verified_on) for entry in entries)
    say(
        f"{out} has {len(entries)} kernels for {arch}, of which {verified} have a receipt, in "
        f"{quantity(len(content))}"
    )
