"""Charts as tables and as plots."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from flashtune.core.errors import UsageError
from flashtune.tuner.analysis.charts import BYTES, Chart
from flashtune.tuner.cli import output
from flashtune.tuner.cli.output import grid, plain, print_heading, print_table, quantity, say

if TYPE_CHECKING:
    from pathlib import Path

    from plotly.graph_objects import Figure
    from rich.console import Console

# Distinguishable without colour vision (Okabe and Ito).
COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5b6475", "#000000")
PANEL_WIDTH, PANEL_HEIGHT = 480, 300


def has_plotly() -> bool:
    """Returns whether plots can be made."""
    return importlib.util.find_spec("plotly") is not None


def require_plotly(option: str = "--plot") -> None:
    """Checks that plots can be made, for an option of the command line.

    Raises:
        UsageError: plotly is not installed.
    """
    if not has_plotly():
        raise UsageError(f"{option} needs plotly: run pip install 'flashtune[plot]', or leave {option} out")


def show_charts(charts: Sequence[Chart], plot_file: Path | None, as_json: bool) -> None:
    """Prints charts as tables or as JSON, and draws them to a file on request."""
    from flashtune.tuner.tables.table_files import write_file

    if plot_file is not None:
        require_plotly()
        write_file(plot_file, charts_page(charts).encode())
    if as_json:
        output.print_json(charts)
    else:
        print_charts(output.console(), charts)


def print_charts(out: Console, charts: Sequence[Chart]) -> None:
    """Prints each chart as a table, with its limits and notes below."""
    for chart in charts:
        print_heading(out, f"{chart.title}, {chart.unit}")
        heads = [chart.across, *chart.lines]
        print_table(out, grid(heads, (map(plain, row) for row in cells(chart)), heads[1:]))
        for name, value in {**{k: _text(chart, v) for k, v in chart.limits.items()}, **chart.notes}.items():
            say(f"{name}: {'none' if value is None else value}", "  ")
        out.print()


def cells(chart: Chart) -> Iterator[tuple[str, ...]]:
    """Returns the rows of a chart's table."""
    columns = ([_cell(chart, value) for value in values] for values in chart.lines.values())
    positions = (f"{x:,}" if isinstance(x, int) else x for x in chart.positions)
    return zip(positions, *columns, strict=True)


def _cell(chart: Chart, value: float | None) -> str:
    if value is None:
        return ""
    is_over = chart.beyond and value > max(chart.limits.values())
    return f"{_text(chart, value)} {chart.beyond}" if is_over else _text(chart, value)


def _text(chart: Chart, value: float) -> str:
    if chart.unit == BYTES:
        return quantity(round(value))
    return f"{value:,.0f}" if value >= 1000 or isinstance(value, int) else f"{value:.4g}"


def charts_page(charts: Sequence[Chart], title: str = "") -> str:
    """Returns a self-contained page of HTML with all charts."""
    page: str = charts_figure(charts, title).to_html(include_plotlyjs=True, full_html=True)
    return page


def charts_figure(charts: Sequence[Chart], title: str = "") -> Figure:
    """Returns the plot: a panel for each chart, with limits as dashed lines and one legend.

    Values over numbers are lines, and others are bars. Lines of one name have one colour in all panels.
    """
    from plotly.graph_objects import Bar, Scatter
    from plotly.subplots import make_subplots

    columns = min(2, len(charts))
    rows = math.ceil(len(charts) / columns)
    titles = [chart.title for chart in charts]
    plot = make_subplots(rows, columns, subplot_titles=titles, vertical_spacing=0.3 / (rows + 1))
    names = list(dict.fromkeys(name for chart in charts for name in chart.lines))
    shown: set[str] = set()
    for number, chart in enumerate(charts):
        cell = {"row": number // columns + 1, "col": number % columns + 1}
        is_numeric = all(isinstance(x, int) for x in chart.positions)
        ends = chart.positions[0], chart.positions[-1]
        for name, values in {**chart.lines, **{name: (y, y) for name, y in chart.limits.items()}}.items():
            color = COLORS[names.index(name) % len(COLORS)] if name in names else COLORS[-1]
            entry = {"name": name, "legendgroup": name, "showlegend": name not in shown}
            shown.add(name)
            if name in chart.limits:
                line = {"color": color, "dash": "dash"}
                mode = "lines" if len(chart.positions) > 1 else "markers"
                trace = Scatter(x=ends, y=values, mode=mode, line=line, **entry)
            elif is_numeric:
                style = {"mode": "lines+markers", "line_color": color, "connectgaps": True}
                trace = Scatter(x=chart.positions, y=values, **style, **entry)
            else:
                trace = Bar(x=chart.positions, y=values, marker_color=color, **entry)
            plot.add_trace(trace, **cell)
        if is_numeric:
            marks = {"tickvals": chart.positions, "ticktext": [str(x) for x in chart.positions]}
            plot.update_xaxes(type="log", title_text=chart.across, **marks, **cell)
        is_size = chart.unit == BYTES
        plot.update_yaxes(
            exponentformat="SI" if is_size else None, ticksuffix="B" if is_size else None, **cell
        )
        plot.update_yaxes(
            title_text=None if is_size else chart.unit, type="log" if chart.log else "linear", **cell
        )
        plot.update_yaxes(rangemode=None if chart.log else "tozero", **cell)
    plot.update_annotations(font_size=12)
    # The same style as the pictures of benchmarks/charts.py.
    return plot.update_layout(
        title={"text": title, "x": 0.01},
        template="plotly_white",
        font={"family": "Helvetica, Arial, sans-serif", "size": 11},
        legend={"orientation": "h", "y": 1 + 30 / (PANEL_HEIGHT * rows), "yanchor": "bottom"},
        margin={"l": 60, "r": 20, "t": 110 if title else 80, "b": 40},
        width=PANEL_WIDTH * columns,
        height=PANEL_HEIGHT * rows + 120,
    )
