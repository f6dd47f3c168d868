"""`flashtune bundle`: files of compiled kernels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from flashtune.core.errors import KernelError, UsageError, printable
from flashtune.tuner.cli.command import Group
from flashtune.tuner.cli.options import json_option, optional_problem_options, quiet_options, target_options
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
    from flashtune.bundle.records import Entry
    from flashtune.core.problem import Problem
    from flashtune.core.target import Target

out_option = click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("kernels.bundle"),
    show_default=True,
    metavar="FILE",
    help="The file to write.",
)


class Written(msgspec.Struct, frozen=True):
    """A bundle that was written."""

    file: str
    arch: str  # The architecture of its machine code.
    kernels: int
    verified: int  # Kernels with a receipt.
    codes: int  # Different pieces of machine code.
    size: int  # Bytes of the file.
    left_out: tuple[str, ...] = ()  # Reasons why calls have no kernel in it.


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
@click.option(
    "--table",
    "table_files",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Build the kernels of a tuned table. Repeatable.",
)
@click.option(
    "--base",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A bundle whose kernels are not compiled again.",
)
@target_options
@out_option
@quiet_options
@json_option
def build_bundle(
    problems: tuple[Problem, ...],
    table_files: tuple[Path, ...],
    base: Path | None,
    target: Target,
    device: int | None,
    out: Path,
    as_json: bool,
) -> None:
    """Compile kernels for a GPU into one file. No GPU is needed.

    The kernels are those that dispatch would choose for the named shapes and tables. By default, they are
    those of the shipped table, and of untuned shapes with each head dim, type and single feature. Receipts of
    tables are kept for kernels that the installed Triton compiled.

    Two builds by the same Triton give the same bytes.
    """
    from flashtune.bundle.bundle_file import open_bundle
    from flashtune.db.table import load_table, shipped_table
    from flashtune.tuner.tables.bundles import build, coverage_calls, table_calls
    from flashtune.tuner.tables.warm import calls_of, tables_with

    del device  # Nothing runs on a GPU.
    tables = [*map(load_table, table_files)]
    for table in tables:
        if table.target != target.name:
            raise UsageError(
                f"a table of {printable(table.target)} cannot be built for {target.name}: "
                "name its GPU by --target, or another table"
            )
    shipped = [table for table in (shipped_table(target.name),) if table]
    calls = [*calls_of(problems), *(call for table in tables for call in table_calls(table))]
    if not problems and not tables:
        calls = [*(call for table in shipped for call in table_calls(table)), *coverage_calls()]
    with progress_bars() as bars:
        built = build(
            calls,
            target,
            tables_with(target, tables),
            (*shipped, *tables),
            open_bundle(base) if base else None,
            bars,
        )
    for sentence in built.left_out:
        note(f"left out: {sentence}")
    if not built.entries:
        raise KernelError("no kernel family computes any of these calls: name other shapes")
    _write(out, target.arch, built.entries, built.codes, built.left_out, as_json=as_json)


@command.command(
    "verify",
    examples=(
        "flashtune bundle verify kernels.bundle --out verified.bundle",
        "flashtune bundle verify kernels.bundle --level quick --part 0/4 --out part0.bundle",
    ),
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--level",
    type=click.Choice(["quick", "full"]),
    default="full",
    show_default=True,
    help="quick: as the self-check of a first call. full: as a search.",
)
@click.option("--part", default="0/1", show_default=True, metavar="I/N", help="Verify every N-th kernel.")
@target_options
@out_option
@quiet_options
@json_option
def verify_bundle(
    file: Path, level: str, part: str, target: Target, device: int | None, out: Path, as_json: bool
) -> None:
    """Verify the kernels without a receipt on this GPU, and write the file with receipts.

    Kernels are those that `build` chooses by default. Several GPUs can verify parts, whose files `merge`
    joins.
    """
    import torch

    from flashtune.bundle.bundle_file import open_bundle
    from flashtune.db.table import shipped_table
    from flashtune.dispatch.tables import tuned_records
    from flashtune.tuner.tables.bundle_verification import uses_of, verified
    from flashtune.tuner.tables.bundles import coverage_calls, table_calls
    from flashtune.verification.cases import Level

    first, _, step = part.partition("/")
    if not (first.isdigit() and step.isdigit() and int(first) < int(step)):
        raise UsageError(f"--part is {printable(part)}: write I/N, such as 0/4")
    if device is None:
        raise UsageError("kernels are verified on a GPU, and none is chosen: run it on a machine with one")
    bundle = open_bundle(file)
    table = shipped_table(target.name)
    calls = [*(table_calls(table) if table else ()), *coverage_calls()]
    uses = uses_of(bundle, calls, target, tuned_records(target.name))
    entries, reasons = [], []
    gpu = torch.device("cuda", device)
    try:
        with progress_bars() as bars:
            for entry, reason in verified(
                bundle, uses, target, gpu, Level[level.upper()], (int(first), int(step)), bars
            ):
                entries.append(entry)
                reasons += [reason] if reason else []
    finally:
        for reason in reasons:
            note(printable(reason))
        if len(entries) == len(bundle.index.entries):
            codes = {sha256: bundle.code(sha256) for sha256 in bundle.index.codes}
            _write(out, bundle.index.arch, entries, codes, tuple(reasons), as_json=as_json)


@command.command("list", examples=("flashtune bundle list kernels.bundle",))
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def list_bundle(file: Path, as_json: bool) -> None:
    """Check a file, and list its kernels."""
    from flashtune.bundle.bundle_file import open_bundle
    from flashtune.tuner.tables.bundles import listed

    rows = listed(open_bundle(file))
    if as_json:
        print_json(rows)
        return
    heads = ("family", "kernel", "functions", "code", "verified on", "Triton")
    print_rows(
        heads,
        (
            (
                row.family,
                row.kernel[:12],
                " ".join(row.functions),
                quantity(row.code_bytes),
                " ".join(row.verified) or "-",
                row.triton,
            )
            for row in rows
        ),
    )


@command.command("merge", examples=("flashtune bundle merge a.bundle b.bundle --out both.bundle",))
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=click.Path(path_type=Path))
@out_option
@json_option
def merge_bundles(sources: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Write the kernels of several files into one.

    Files are of one architecture. If two have different machine code for a kernel, that of the first stays.
    """
    from flashtune.bundle.bundle_file import merged, open_bundle

    bundles = [*map(open_bundle, sources)]
    entries, codes = merged(bundles)
    _write(out, bundles[0].index.arch, entries, codes, (), as_json=as_json)


def _write(
    out: Path,
    arch: str,
    entries: list[Entry],
    codes: dict[str, bytes],
    left_out: tuple[str, ...],
    *,
    as_json: bool,
) -> None:
    """Writes a bundle, and reports its size."""
    from flashtune.bundle.bundle_file import dump_bundle
    from flashtune.core import VERSION

    content = dump_bundle(arch, VERSION, entries, codes)
    write_result(out, content)
    verified = sum(any(receipt.machine == entry.machine for receipt in entry.receipts) for entry in entries)
    written = Written(str(out), arch, len(entries), verified, len(codes), len(content), left_out)
    if as_json:
        print_json(written)
        return
    say(
        f"{out} has {len(entries)} kernels for {arch}, of which {verified} have a receipt, in "
        f"{quantity(len(content))}"
    )
