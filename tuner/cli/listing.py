"""Stored records as tables for a person."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from flashtune.record import Record
from flashtune.tuner.cli.output import plain
from flashtune.tuner.listing import Listed
from flashtune.tuner.stored import Found


def selections_table(rows: Sequence[Listed]) -> Table:
    """One line for each selection."""
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
            plain(record.family) + (" (other strides)" if row.stands_in else ""),
            _config(record),
            _number(record.ms, 4),
            _number(row.tflops, 1),
            _ratio(row.best_sdpa_ms, record.ms),
            record.provenance.value,
            row.standing.value,
        )
    return table


def records_table(rows: Sequence[Found]) -> Table:
    """One line for each candidate, failed ones with the reason."""
    names = ("id", "target", "problem", "family", "config", "outcome")
    table = _table(names, ("ms", "SRAM", "registers", "spills", "error"), ("message",))
    for row in rows:
        record, resources, verdict = row.record, row.record.resources, row.record.verdict
        table.add_row(
            str(row.id),
            plain(record.target),
            record.problem.key,
            plain(record.family),
            _config(record),
            record.outcome.value,
            _number(record.ms, 4),
            f"{resources.sram_bytes:,}" if resources else "",
            str(resources.registers) if resources else "",
            str(resources.spill_bytes) if resources else "",
            # Of what the gate allows: above 1 it is refused.
            f"{verdict.worst_ratio:.2g}" if verdict else "",
            plain(record.message),
        )
    return table


def _config(record: Record) -> str:
    return plain(record.config.label()) if record.config else ""


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _ratio(theirs: float | None, ours: float | None) -> str:
    return f"{theirs / ours:.2f}x" if theirs and ours else ""


def _table(left: tuple[str, ...], right: tuple[str, ...], last: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in (*left, *right, *last):
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table
