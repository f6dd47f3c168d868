"""Plot of results of `flashtune bench`: speed over sequence length, as a web page."""

from __future__ import annotations

import importlib.util
import math
from typing import TYPE_CHECKING

from flashtune.core.errors import UsageError
from flashtune.tuner.bench.results import BenchRun, speed_of
from flashtune.tuner.cli.report.bench_terminal import CEILING, COPY, Panel, panels

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


COLUMNS = 2
PANEL_HEIGHT = 340
WIDTH = 1100
# Distinguishable without colour vision, with emphasis on ours.
COLORS = {
    "flashtune": "#d55e00",
    "sdpa-cudnn": "#009e73",
    "flash-attn-4": "#0072b2",
    "flashinfer": "#f0e442",
    "flex": "#cc79a7",
    "sdpa-flash": "#56b4e9",
    "sdpa-efficient": "#e69f00",
    "unfused": "#999999",
}
CEILINGS = (CEILING, COPY)
CEILING_COLOR = "#000000"


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


def plot_page(run: BenchRun) -> str:
    """Returns a self-contained page of HTML: a panel for each head dim and mask."""
    page: str = figure(run).to_html(include_plotlyjs=True, full_html=True)
    return page


def figure(run: BenchRun) -> Figure:
    """Returns the plot: a line for each contestant, and the ceiling of each panel's type dashed."""
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    drawn = panels(run.benches)
    rows = math.ceil(len(drawn) / COLUMNS)
    plot = make_subplots(
        rows=rows,
        cols=min(COLUMNS, len(drawn)),
        subplot_titles=[panel.title for panel in drawn],
        vertical_spacing=0.3 / (rows + 1),
    )
    shown: set[str] = set()
    for number, panel in enumerate(drawn):
        lines = _lines(panel)
        ends = [_lengths(panel)[0], _lengths(panel)[-1]]
        lines += [(name, ends, [speed] * 2) for name, speed in panel.ceilings(run)]
        for name, across, up in lines:
            trace = Scatter(
                x=across,
                y=up,
                name=name,
                legendgroup=name,
                showlegend=name not in shown,
                mode="lines" if name in CEILINGS else "lines+markers",
                line={
                    "color": COLORS.get(name, CEILING_COLOR),
                    "dash": "dash" if name in CEILINGS else "solid",
                },
            )
            plot.add_trace(trace, row=number // COLUMNS + 1, col=number % COLUMNS + 1)
            shown.add(name)
        plot.update_yaxes(title_text=panel.unit.value, row=number // COLUMNS + 1, col=number % COLUMNS + 1)
        ticks = {"type": "log", "tickvals": _lengths(panel), "ticktext": [str(x) for x in _lengths(panel)]}
        plot.update_xaxes(**ticks, row=number // COLUMNS + 1, col=number % COLUMNS + 1)
    plot.update_yaxes(rangemode="tozero")
    plot.update_xaxes(title_text="sequence length", row=rows)
    plot.update_layout(
        title=f"Attention on {run.environment.gpu}",
        template="plotly_white",
        width=WIDTH,
        height=PANEL_HEIGHT * rows + 120,
    )
    return plot


def _lengths(panel: Panel) -> list[int]:
    return sorted({bench.problem.seqlen_kv for bench in panel.benches})


def _lines(panel: Panel) -> list[tuple[str, list[int], list[float]]]:
    """Returns each contestant's name, sequence lengths and speeds, without gaps."""
    lines = []
    for name in panel.names:
        points = [
            (bench.problem.seqlen_kv, speed_of(bench.problem, row))
            for bench in panel.benches
            if (row := bench.row(name))
        ]
        lines.append((name, [length for length, _ in points], [speed for _, speed in points]))
    return lines
