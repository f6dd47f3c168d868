"""Charts of speed over sequence length, from saved results of `flashtune bench`."""

from typing import TYPE_CHECKING

from benchmarks.charts import Axis, Panel, Style, picture
from benchmarks.saved import content
from benchmarks.tables import FLASH, RESULTS, by_grid, lines_of
from flashtune.tuner.bench.driver import read_report
from flashtune.tuner.bench.peer_runs import CUDNN
from flashtune.tuner.bench.results import OURS

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

STYLES = (Style(OURS, "#d55e00", 2.4), Style(CUDNN, "#0072b2"), Style(FLASH, "#5b6475"))
# Charts by the names of their files: the grid and the title.
CHARTS = {
    "bench-paper": ("paper", "Forward pass in bf16: TFLOP/s over sequence length, NVIDIA H200"),
    "bench-gqa": ("gqa", "Grouped heads in bf16: TFLOP/s over sequence length, NVIDIA H200"),
}


def pictures() -> "dict[str, Figure]":
    """Returns the figures by name."""
    results = by_grid(bench for path in RESULTS for bench in read_report(content(path), path.name).benches)
    figures = {}
    for name, (grid, title) in CHARTS.items():
        lengths = sorted({bench.problem.seqlen_kv for bench in results[grid]})
        shown = tuple((length, f"{length}") for length in lengths)
        across = Axis(lengths[0], lengths[-1], shown, log=True)
        up = Axis(0, 900, tuple((speed, f"{speed}") for speed in range(0, 901, 200)))
        panels = []
        for line_title, benches in lines_of(results[grid]).items():
            speeds = {
                style: [
                    (bench.problem.seqlen_kv, round(row.tflops, 1))
                    for bench in benches
                    if (row := bench.row(style.name)) is not None
                ]
                for style in STYLES
            }
            lines = tuple((style, points) for style, points in speeds.items() if points)
            panels.append(Panel(line_title, across, up, lines))
        figures[name] = picture(title, STYLES, panels, size=(400, 200))
    return figures
