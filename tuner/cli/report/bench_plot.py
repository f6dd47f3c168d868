"""Plot of results of `flashtune bench`: speed over sequence length, as a web page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashtune.tuner.analysis.charts import Chart, Values
from flashtune.tuner.bench.results import BenchRun, speed_of
from flashtune.tuner.cli.report.bench_terminal import Panel, panels
from flashtune.tuner.cli.report.chart_report import charts_figure

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def plot_page(run: BenchRun) -> str:
    """Returns a self-contained page of HTML: a panel for each head dim and mask."""
    page: str = figure(run).to_html(include_plotlyjs=True, full_html=True)
    return page


def figure(run: BenchRun) -> Figure:
    """Returns the plot: a line for each contestant, and the ceiling of each panel's type dashed."""
    charts = [
        Chart(
            title=panel.title,
            across="sequence length",
            positions=tuple(bench.problem.seqlen_kv for bench in panel.benches),
            unit=panel.unit.value,
            lines={name: _speeds(panel, name) for name in panel.names},
            limits=dict(panel.ceilings(run)),
            log=False,
        )
        for panel in panels(run.benches)
    ]
    return charts_figure(charts, f"Attention on {run.environment.gpu}")


def _speeds(panel: Panel, name: str) -> Values:
    rows = [(bench.problem, bench.row(name)) for bench in panel.benches]
    return tuple(speed_of(problem, row) if row else None for problem, row in rows)
