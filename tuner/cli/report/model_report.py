"""Table and plot of a model's attention over sequence length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from flashtune.tuner.analysis.charts import Chart
from flashtune.tuner.analysis.model_overview import Overview, Point, Way
from flashtune.tuner.cli.output import UNFOLDED, grid, plain, print_heading, quantity
from flashtune.tuner.cli.report.chart_report import charts_page
from flashtune.tuner.workloads.model_sizes import Phase

WHAT = {
    Phase.PREFILL: "of a whole prompt",
    Phase.DECODE: "of one new token of each sequence",
    Phase.TRAINING: "on whole sequences, both passes",
}

GIB = 2**30
PANELS = ("memory, GiB", "HBM traffic of all layers, GiB", "at least, ms", "speed-up by the roofline")

Lines = dict[str, list[float]]


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
    heads = [column.head for column in columns]
    return grid(heads, zip(*(column.cells for column in columns), strict=True), heads)


def _pair(head: str, overview: Overview, cell: Callable[[Way], str]) -> tuple[Column, Column]:
    """Returns the two columns of a quantity."""
    return (
        Column(f"{head}\nunfused", tuple(cell(point.unfused) for point in overview.points)),
        Column(f"{head}\nflash", tuple(cell(point.flash) for point in overview.points)),
    )


def overview_page(overviews: Sequence[Overview]) -> str:
    """Returns a self-contained page of HTML: memory, traffic, times and speed-up of each overview."""
    charts = [
        Chart(
            title=f"{_title(overview)}: {panel}",
            across="tokens",
            positions=tuple(point.seqlen for point in overview.points),
            unit=panel.rpartition(", ")[2],
            lines={name: tuple(values) for name, values in lines.items()},
        )
        for overview in overviews
        for panel, lines in zip(PANELS, panels_of(overview.points), strict=True)
    ]
    return charts_page(charts, f"Attention on {overviews[0].target}")


def _title(overview: Overview) -> str:
    return f"{overview.model} {overview.phase.value}, batch {overview.batch}, {overview.dtype.value}"


def panels_of(points: Sequence[Point]) -> tuple[Lines, ...]:
    """Returns the lines of each panel."""
    memory = {
        "unfused": [point.unfused.memory / GIB for point in points],
        "flash": [point.flash.memory / GIB for point in points],
        "KV": [point.kv_bytes / GIB for point in points],
    }
    traffic = {
        "unfused": [point.unfused.traffic / GIB for point in points],
        "flash": [point.flash.traffic / GIB for point in points],
    }
    times = {
        "unfused": [point.unfused.bound_ms for point in points],
        "flash": [point.flash.bound_ms for point in points],
    }
    return memory, traffic, times, {"speed-up": [point.speedup for point in points]}
