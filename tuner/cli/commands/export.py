"""`flashtune export`: selections as files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashtune.core.errors import FlashtuneError, UsageError, printable
from flashtune.tuner.cli.command import flashtune_command
from flashtune.tuner.cli.options import (
    database_option,
    optional_problem_options,
    quiet_options,
    target_filter_option,
)
from flashtune.tuner.cli.output import note, progress_bars, write_result

if TYPE_CHECKING:
    from flashtune.core.problem import Problem
    from flashtune.core.record import Record
    from flashtune.tuner.tables.table_files import Watch

# A target's name becomes a file name, and a database may be of any origin.
FILE_STEM = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")


@flashtune_command(
    "export",
    "flashtune export --format json --out h200.json",
    "flashtune export --format python --out kernels/ --model llama-3.1-8b",
    "flashtune export --format bundle --out kernels.bundle --target h200",
    "flashtune export --format hf-kernel --out package/ --shipped",
)
@optional_problem_options
@target_filter_option
@click.option(
    "--format",
    "kind",
    type=click.Choice(["json", "python", "triton-config", "bundle", "hf-kernel"]),
    default="json",
    show_default=True,
    help="json: a table for each GPU, which flashtune import reads. python: a stand-alone file for each "
    "kernel. triton-config: one file of triton.Config lists. bundle: the machine code of verified kernels. "
    "hf-kernel: a package for Hugging Face's kernels library, with the functions of flash_attn and with this "
    "machine code.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="File, or folder for several kernels or GPUs. Default: -, standard output.",
)
@click.option(
    "--shipped",
    is_flag=True,
    help="Export the shipped tables instead of the database. JSON then includes receipts.",
)
@quiet_options
@database_option
def command(
    problems: tuple[Problem, ...],
    target_name: str | None,
    kind: str,
    out: Path | None,
    shipped: bool,
    db: str | None,
) -> None:
    """Write selected kernels as files: of a database, of some shapes or of one GPU."""
    from flashtune.db.location import bundle_file, database_url
    from flashtune.tuner.tables.lookup import database_selections, narrowed, place, shipped_selections

    entries = shipped_selections() if shipped else database_selections(db)
    records = tuple(entry.record for entry in narrowed(entries, target_name, problems))
    if not records:
        raise FlashtuneError(f"{place(db, shipped)} has no such selection: run flashtune search first")
    if str(out) == "-":
        out = None

    def stored(arch: str) -> Path | None:
        """Returns the machine code of the database's selections."""
        return None if shipped else bundle_file(database_url(db), arch)

    if kind == "json":
        _json(records, out, shipped)
    elif kind == "python":
        _python(records, out)
    elif kind == "bundle":
        _bundle(records, out, stored)
    elif kind == "hf-kernel":
        _hub_package(records, out, stored)
    else:
        _triton_configs(records, out)


def _of_known_gpus(records: tuple[Record, ...]) -> tuple[Record, ...]:
    """Returns the records of GPUs whose properties are known here, and names the others; all if none is."""
    from flashtune.tuner.tables.admission import facts_of

    usable = tuple(record for record in records if facts_of(record) is not None)
    unknown = {record.target for record in records} - {record.target for record in usable}
    if usable and unknown:
        note(
            f"the selections of {', '.join(sorted(map(printable, unknown)))} were left out: export them on a "
            "machine with that GPU"
        )
    return usable or records


def _json(records: tuple[Record, ...], out: Path | None, shipped: bool) -> None:
    targets = sorted({record.target for record in records})
    with progress_bars() as watch:
        tables = {
            target: _table(target, [record for record in records if record.target == target], shipped, watch)
            for target in targets
        }
    if len(tables) == 1 and (out is None or not out.is_dir()):
        write_result(out, tables[targets[0]])
        return
    if out is None or out.is_file():
        raise UsageError(
            f"the tables of {len(tables)} GPUs need a folder: pass --out FOLDER, or one --target"
        )
    for target, table in tables.items():
        if not FILE_STEM.fullmatch(target):
            raise UsageError(f"the target {target[:60]!r} is not a file name: export it alone, to --out FILE")
        write_result(out / f"{target}.json", table)


def _table(target: str, records: list[Record], shipped: bool, watch: Watch) -> bytes:
    """Returns the records as a table. Records of a shipped table keep its receipts."""
    from flashtune.tuner.tables.table_files import json_table, table_file

    if not shipped:
        return json_table(target, records, watch)
    from flashtune.tuner.tables.lookup import shipped_tables
    from flashtune.tuner.tables.table_receipts import part_of

    table = next(shipped_table for shipped_table in shipped_tables() if shipped_table.target == target)
    return table_file(part_of(table, {record.problem for record in records}), watch)


def _python(records: tuple[Record, ...], out: Path | None) -> None:
    from flashtune.tuner.tables.table_files import kernel_files

    with progress_bars() as watch:
        files = kernel_files(records, watch)
    if not files:
        raise FlashtuneError(
            "only peers are selected here, and they have no kernel to write: name another shape"
        )
    if out is None or out.suffix == ".py":
        if len(files) != 1:
            raise UsageError(
                f"{len(files)} kernels need a folder: pass --out FOLDER, or name one shape and --target"
            )
        write_result(out, files[0].text.encode())
        return
    for file in files:
        write_result(out / file.name, file.text.encode())


def _bundle(records: tuple[Record, ...], out: Path | None, stored: Callable[[str], Path | None]) -> None:
    from flashtune.tuner.tables.export_bundle import the_bundle, verified_bundles

    with progress_bars() as watch:
        content = the_bundle(verified_bundles(records, watch, stored))
    write_result(out / "kernels.bundle" if out and out.is_dir() else out, content)


def _hub_package(records: tuple[Record, ...], out: Path | None, stored: Callable[[str], Path | None]) -> None:
    from flashtune.tuner.tables.export_bundle import verified_bundles
    from flashtune.tuner.tables.hub_package import is_served, package_files, require_no_others
    from flashtune.tuner.tables.table_files import write_file

    if out is None or out.is_file():
        raise UsageError("a kernel package is a folder: pass --out FOLDER")
    records = _of_known_gpus(records)
    served = [record for record in records if is_served(record)]
    with progress_bars() as watch:
        files = package_files(served, watch, verified_bundles(served, watch, stored))
    require_no_others(out, files)
    for path, content in files.items():
        write_file(out / path, content)
    note(f"wrote {len(files)} files to {out}")
    if len(served) < len(records):
        note(f"{len(records) - len(served)} selections have no function in flash_attn and were left out")


def _triton_configs(records: tuple[Record, ...], out: Path | None) -> None:
    from flashtune.templates.registry import find_family
    from flashtune.tuner.tables.table_files import triton_configs

    native = {r.family for r in records if r.config is not None and not find_family(r.family).interpreted}
    if native:
        note(f"configs of {' and '.join(sorted(native))} mean nothing to other kernels and were left out")
    write_result(out / "configs.py" if out and out.is_dir() else out, triton_configs(records).encode())
