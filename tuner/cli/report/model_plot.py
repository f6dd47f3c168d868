"""Plot of a model's attention over sequence length, as a web page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from flashtune.tuner.analysis.model_overview import Overview, Point

WIDTH = 1200
PANEL_HEIGHT = 360
GIB = 2**30
# Distinguishable without colour vision.
COLORS = {"standard": "#999999", "flash": "#d55e00", "KV": "#0072b2", "speed-up": "#009e73"}
PANELS = ("memory, GiB", "HBM traffic of all layers, GiB", "at least, ms", "speed-up by the roofline")

Lines = dict[str, list[float]]


def overview_page(overviews: Sequence[Overview]) -> str:
    """Returns a self-contained page of HTML: a row of panels for each overview."""
    page: str = overview_figure(overviews).to_html(include_plotlyjs=True, full_html=True)
    return page


def overview_figure(overviews: Sequence[Overview]) -> Figure:
    """Returns the plot: memory, traffic, times and speed-up over length, one row for each overview."""
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    plot = make_subplots(
        rows=len(overviews),
        cols=len(PANELS),
        subplot_titles=[f"{_title(overview)}: {panel}" for overview in overviews for panel in PANELS],
        vertical_spacing=0.4 / len(overviews),
    )
    shown: set[str] = set()
    for row, overview in enumerate(overviews, start=1):
        lengths = [point.seqlen for point in overview.points]
        for column, lines in enumerate(_panels(overview.points), start=1):
            for name, values in lines.items():
                trace = Scatter(
                    x=lengths,
                    y=values,
                    name=name,
                    legendgroup=name,
                    showlegend=name not in shown,
                    mode="lines+markers",
                    line={"color": COLORS[name]},
                )
                plot.add_trace(trace, row=row, col=column)
                shown.add(name)
    plot.update_xaxes(type="log", title_text="tokens", tickvals=_all_lengths(overviews))
    plot.update_yaxes(type="log")
    plot.update_annotations(font_size=11)
    plot.update_layout(
        title=f"Attention on {overviews[0].target}",
        template="plotly_white",
        width=WIDTH,
        height=PANEL_HEIGHT * len(overviews) + 120,
    )
    return plot


def _title(overview: Overview) -> str:
    return f"{overview.model} {overview.phase.value}, batch {overview.batch}, {overview.dtype.value}"


def _panels(points: Sequence[Point]) -> tuple[Lines, ...]:
    """Returns the lines of each panel."""
    memory = {
        "standard": [point.standard.memory / GIB for point in points],
        "flash": [point.flash.memory / GIB for point in points],
        "KV": [point.kv_bytes / GIB for point in points],
    }
    traffic = {
        "standard": [point.standard.traffic / GIB for point in points],
        "flash": [point.flash.traffic / GIB for point in points],
    }
    times = {
        "standard": [point.standard.bound_ms for point in points],
        "flash": [point.flash.bound_ms for point in points],
    }
    return memory, traffic, times, {"speed-up": [point.speedup for point in points]}


def _all_lengths(overviews: Sequence[Overview]) -> list[int]:
    return sorted({point.seqlen for overview in overviews for point in overview.points})
