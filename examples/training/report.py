"""The results of training runs: differences in loss, a table, a document and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import torch
from rich.table import Table

from examples.training.trainer import Run, Setting, left_out

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MIB = 2**20
# Two right ways with a given kind of rounding differ by chance: so many times what a third one shows is far.
CHANCE = 3
# The spacing of bfloat16 at a magnitude of 1, and the difference of float32 sums of another order.
BF16_SPACING = 2.0**-8
FP32_MARGIN = 1e-4
WIDTH, HEIGHT = 860, 480
COLORS = {"flashtune": "#d55e00", "torch SDPA": "#0072b2", "another SDPA": "#999999"}


class Document(msgspec.Struct, frozen=True):
    """The results of all runs and their setting."""

    device: str  # The GPU, or the CPU.
    torch: str  # Its version.
    triton: str  # Its version.
    setting: Setting  # The common setting of all runs.
    parameters: int  # Number of weights of the model.
    floor: float  # The approximate entropy of the data, the lowest possible loss.
    difference: float  # The largest difference of a step's loss between flashtune and SDPA.
    noise: float  # The same between two SDPA backends.
    tolerance: float  # The largest allowed difference.
    runs: tuple[Run, ...]  # The results of each implementation.


def difference(run: Run, other: Run) -> float:
    """Returns the largest difference of a step's loss, NaN if a loss is NaN."""
    gaps = torch.tensor(run.losses, dtype=torch.float64) - torch.tensor(other.losses, dtype=torch.float64)
    return float(gaps.abs().max())


def tolerance(first: Run, noise: float, *, in_bf16: bool) -> float:
    """Returns the largest allowed difference of a step's loss.

    Rounding differences grow during training. Two SDPA backends, which round in different orders, give
    `noise`. The tolerance is at least one spacing of bfloat16 at the first loss.

    Args:
        first: SDPA's run.
        noise: The difference between SDPA's backends.
        in_bf16: Whether products were in bfloat16.
    """
    least = BF16_SPACING * first.losses[0] if in_bf16 else FP32_MARGIN
    return max(CHANCE * noise, least)


def median_ms(run: Run) -> float:
    """Returns the median time of a step in ms, without the first steps."""
    return statistics.median(run.step_ms[left_out(len(run.step_ms)) :])


def table(runs: Sequence[Run]) -> Table:
    """Returns one line per implementation, with ratios to the first one."""
    shown = Table(title="Training", title_justify="left")
    for number, header in enumerate(("", "first loss", "last loss", "step, ms", "", "peak, MiB", "")):
        shown.add_column(header, justify="left" if number == 0 else "right")
    base = runs[0]
    for run in runs:
        memory, share = f"{run.peak_bytes / MIB:.0f}", f"{run.peak_bytes / max(1, base.peak_bytes):.2f}x"
        shown.add_row(
            run.name,
            f"{run.losses[0]:.4f}",
            f"{run.losses[-1]:.4f}",
            f"{median_ms(run):.2f}",
            f"{median_ms(run) / median_ms(base):.2f}x",
            *((memory, share) if base.peak_bytes else ("", "")),
        )
    return shown


def figure(document: Document) -> Figure:
    """Returns a plot of losses over steps, with the lowest possible loss."""
    from plotly.graph_objects import Figure, Scatter

    plot = Figure()
    for run in document.runs:
        # Lines lie upon one another: each is dashed in its own way.
        line = {"color": COLORS.get(run.name), "dash": "dot" if run.name == "flashtune" else "solid"}
        plot.add_trace(Scatter(y=run.losses, name=run.name, mode="lines", line=line))
    plot.add_hline(y=document.floor, line_dash="dash", annotation_text="entropy of the data")
    plot.update_xaxes(title_text="step")
    plot.update_yaxes(title_text="loss, nats a token", rangemode="tozero")
    title = (
        f"{document.parameters / 1e6:.0f} million parameters on {document.device}: "
        f"losses differ by {document.difference:.2g} at most"
    )
    plot.update_layout(title=title, template="plotly_white", width=WIDTH, height=HEIGHT)
    return plot
