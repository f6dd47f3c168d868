"""Stored records as tables."""

import itertools
from collections.abc import Iterator, Sequence

from rich.table import Table

from flashtune.core.record import Provenance, Record
from flashtune.templates.config_text import config_text
from flashtune.tuner.cli.output import plain
from flashtune.tuner.tables.listing import Listed
from flashtune.tuner.tables.lookup import Found
from flashtune.tuner.workloads.short_shape import short_shape


def selections_tables(rows: Sequence[Listed]) -> Iterator[tuple[str, Table]]:
    """Yields each target and its selections in lines of at most 80 columns, of which long shapes take two."""
    for target, group in itertools.groupby(rows, key=lambda row: row.found.record.target):
        yield plain(target), _selections_table(tuple(group))


def _selections_table(rows: Sequence[Listed]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("shape", overflow="fold")
    for name in ("ms", "TFLOP/s", "over\nSDPA"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("standing", no_wrap=True)
    for row in rows:
        record = row.found.record
        predicted = "~" if record.provenance is Provenance.PREDICTED else ""
        table.add_row(
            "  other strides" if row.is_fallback else short_shape(record.problem),
            "" if record.ms is None else f"{predicted}{_four_digits(record.ms)}",
            "" if row.tflops is None else f"{row.tflops:.0f}",
            f"{row.best_sdpa_ms / record.ms:.2f}" if row.best_sdpa_ms and record.ms else "",
            row.standing.value,
        )
    return table


def wide_selections_table(rows: Sequence[Listed]) -> Table:
    """Returns a table with a line for each selection: its problem's key, family and config."""
    table = _table(
        ("target", "problem", "family", "config"),
        ("ms", "TFLOP/s", "vs best SDPA"),
        ("provenance", "standing"),
    )
    for row in rows:
        record = row.found.record
        table.add_row(
            plain(record.target),
            record.problem.key,
            plain(record.family) + (" (other strides)" if row.is_fallback else ""),
            _config(record),
            _number(record.ms, 4),
            _number(row.tflops, 1),
            f"{row.best_sdpa_ms / record.ms:.2f}x" if row.best_sdpa_ms and record.ms else "",
            record.provenance.value,
            row.standing.value,
        )
    return table


def records_tables(rows: Sequence[Found]) -> Iterator[tuple[str, Table]]:
    """Yields each problem and target, and a table of its candidates."""

    def key(row: Found) -> str:
        return f"{row.record.problem.key} on {row.record.target}"

    for title, group in itertools.groupby(rows, key=key):
        yield plain(title), _records_table(tuple(group))


def _records_table(rows: Sequence[Found]) -> Table:
    """Returns a table with a row for each candidate; family, config and message of a failure in one cell."""
    table = _table(("id", "candidate"), ("outcome", "ms", "SRAM", "registers", "spills", "error"), ())
    for column in table.columns[2:]:
        column.no_wrap = True
    for row in rows:
        record, resources, verdict = row.record, row.record.resources, row.record.verdict
        table.add_row(
            str(row.id),
            "\n".join(filter(None, (plain(record.family), _config(record), plain(record.message)))),
            record.outcome.value,
            _number(record.ms, 4),
            f"{resources.sram_bytes:,}" if resources else "",
            str(resources.registers) if resources else "",
            str(resources.spill_bytes) if resources else "",
            # As a multiple of the tolerance: above 1 it failed.
            f"{verdict.worst_ratio:.2g}" if verdict else "",
        )
    return table


def _four_digits(ms: float) -> str:
    """Returns a time with four significant digits, and at most four decimal places."""
    whole = len(str(int(ms))) if ms >= 1 else 0
    return f"{ms:.{max(0, 4 - whole)}f}"


def _config(record: Record) -> str:
    return plain(config_text(record))


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _table(left: tuple[str, ...], right: tuple[str, ...], last: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in (*left, *right, *last):
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table
