"""Charts of measurements of training."""

from typing import TYPE_CHECKING

from benchmarks import charts
from benchmarks.charts import Axis, Panel, Points, Style
from benchmarks.training.memory import GIB, OURS, UNFUSED, Document
from examples.training.report import Document as Training
from examples.training.report import median_ms
from examples.training.trainer import Run, left_out

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Lines lie upon one another: those below are wider, and the uppermost one has gaps.
MEMORY_STYLES = (
    Style(OURS, "#d55e00", 2.0, "dash"),
    Style("sdpa-cudnn", "#0072b2", 3.2),
    Style("sdpa-efficient", "#8fd3bd", 6.0),
    Style("sdpa-flash", "#5b6475", 1.6),
    Style(UNFUSED, "#cc79a7", 2.0),
    Style("held in any case", "#8a93a6", 1.4, "dot"),
)
FLOOR = Style("entropy of the data", "#8a93a6", 1.4, "dot")
RUN_STYLES = {
    "flashtune": Style("flashtune", "#d55e00", 1.4, "dash"),
    "torch SDPA": Style("torch SDPA", "#0072b2", 2.4),
    "another SDPA": Style("another SDPA", "#8fd3bd", 5.0),
}
# Marks of the axes.
SIZES = (
    (1 / 32, "32 MiB"),
    (1 / 8, "128 MiB"),
    (1 / 2, "512 MiB"),
    (2, "2 GiB"),
    (8, "8 GiB"),
    (32, "32 GiB"),
)
LOSSES = (0.5, 1, 2, 4, 8)


def memory_picture(document: Document) -> "Figure":
    """Peaks over the length on two log axes, one line for each way."""
    lengths = [row.seqlen for row in document.rows]
    *ways, held = MEMORY_STYLES
    lines = [(style, _peaks(document, style.name)) for style in ways]
    lines.append((held, [(row.seqlen, row.held / GIB) for row in document.rows]))
    # Where the standard computation ends, if it fitted at any length; a way that never did has no line.
    ends = [(at * 1.1, peak, "beyond, out of memory") for at, peak in _peaks(document, UNFUSED)[-1:]]
    panel = Panel(
        "peak memory of a forward and a backward pass, over tokens",
        Axis(lengths[0], lengths[-1], tuple((length, f"{length // 1024}k") for length in lengths), log=True),
        Axis(1 / 64, 128, SIZES, log=True),
        tuple(line for line in lines if line[1]),
        tuple(ends),
    )
    return charts.picture(
        f"Memory of attention in training, {document.gpu}", MEMORY_STYLES, [panel], columns=1, size=(700, 380)
    )


def _peaks(document: Document, name: str) -> Points:
    """Length and GiB of the rows that fit."""
    return [
        (row.seqlen, peak.bytes / GIB)
        for row in document.rows
        for peak in row.peaks
        if peak.name == name and peak.bytes is not None
    ]


def losses_picture(document: Training) -> "Figure":
    """A chart of the losses of all runs, and of the time of each step."""
    steps = document.setting.steps
    across = Axis(0, steps, tuple((part * steps // 3, f"{part * steps // 3}") for part in range(4)))
    runs = sorted(document.runs, key=lambda run: list(RUN_STYLES).index(run.name))
    losses = Panel(
        "loss over steps, nats a token",
        across,
        Axis(
            LOSSES[0],
            1.1 * document.runs[0].losses[0],
            tuple((loss, f"{loss:g}") for loss in LOSSES),
            log=True,
        ),
        (
            *((RUN_STYLES[run.name], list(enumerate(run.losses))) for run in runs),
            (FLOOR, [(0, document.floor), (steps, document.floor)]),
        ),
    )
    slowest = max(map(median_ms, runs))
    marks = tuple((time, f"{time}") for time in range(0, int(1.1 * slowest), 10))
    times = Panel(
        "milliseconds a step, the first ones left out",
        across,
        Axis(0, 1.2 * slowest, marks),
        tuple((RUN_STYLES[run.name], _times(run)) for run in runs),
    )
    title = f"The same training by three ways of attention, {document.device}"
    styles = (*RUN_STYLES.values(), FLOOR)
    return charts.picture(title, styles, [losses, times], size=(400, 280))


def _times(run: Run) -> Points:
    skipped = left_out(len(run.step_ms))
    return list(enumerate(run.step_ms))[skipped:]
