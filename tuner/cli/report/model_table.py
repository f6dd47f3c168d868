"""Table of a model's attention over sequence length."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from flashtune.tuner.analysis.model_overview import Overview, Way
from flashtune.tuner.cli.output import UNFOLDED, plain, print_heading, quantity
from flashtune.tuner.workloads.model_sizes import Phase

WHAT = {
    Phase.PREFILL: "of a whole prompt",
    Phase.DECODE: "of one new token of each sequence",
    Phase.TRAINING: "on whole sequences, both passes",
}


class Column(NamedTuple):
    """A column of a table: its head and its cells, from top to bottom."""

    head: str
    cells: tuple[str, ...]


def print_overview(out: Console, overview: Overview) -> None:
    """Prints one overview."""
    title = (
        f"{overview.model}, {overview.phase.value} {WHAT[overview.phase]} on {overview.target}: "
        f"{overview.layers} layers, batch {overview.batch}, {overview.dtype.value}"
    )
    print_heading(out, title)
    lengths = Column("length", tuple(f"{point.seqlen:,}" for point in overview.points))
    sizes = (
        Column("KV", tuple(quantity(point.kv_bytes) for point in overview.points)),
        *_pair("layer memory", overview, lambda way: quantity(way.memory)),
        *_pair("HBM traffic", overview, lambda way: quantity(way.traffic)),
    )
    times = (
        *_pair("at least, ms", overview, lambda way: f"{way.bound_ms:,.3f}"),
        *_pair("bound by", overview, lambda way: way.bound_by),
        Column("speed-up", tuple(f"{point.speedup:.1f}x" for point in overview.points)),
    )
    whole = _table(lengths, *sizes, *times)
    tables = (
        (whole,)
        if Console(width=UNFOLDED).measure(whole).maximum <= out.width
        else (_table(lengths, *sizes), _table(lengths, *times))
    )
    for table in tables:
        out.print(table)
        out.print()
    families = ", ".join(dict.fromkeys(family for point in overview.points for family in point.families))
    out.print(
        plain(
            f"Flash is {families}; of what is read again, the share that misses L2 counts. KV "
            "(contiguous), traffic and times are of all layers. At least: by peak rates and the bytes that "
            "cannot be saved; speed-up is of these, and not measured."
        )
    )
    out.print()


def _table(*columns: Column) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.head, justify="right")
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table


def _pair(head: str, overview: Overview, cell: Callable[[Way], str]) -> tuple[Column, Column]:
    """Returns the two columns of a quantity."""
    return (
        Column(f"{head}\nstandard", tuple(cell(point.standard) for point in overview.points)),
        Column(f"{head}\nflash", tuple(cell(point.flash) for point in overview.points)),
    )
