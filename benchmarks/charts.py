"""Charts of pages: plotly figures of one style, and their SVG files in docs/pictures.

A file has the digest of its figure in a comment, so that a stale file is found without a browser. Writing one
needs kaleido and Chromium.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PICTURES = Path(__file__).resolve().parents[1] / "docs/pictures"
Points = Sequence[tuple[float, float]]


class Style(msgspec.Struct, frozen=True):
    """The style and name of a line."""

    name: str  # In the legend.
    color: str  # Such as `#d55e00`.
    width: float = 1.4  # In pixels.
    dash: str = "solid"  # A dash pattern of plotly, such as `dash`.


class Axis(msgspec.Struct, frozen=True):
    """The range of one side of a panel."""

    lowest: float  # Where it begins.
    highest: float  # Where it ends.
    ticks: tuple[tuple[float, str], ...]  # Values and their labels.
    log: bool = False  # Whether the scale is logarithmic.

    def settings(self) -> dict[str, Any]:
        """Returns the axis in plotly's terms."""
        ends = (self.lowest, self.highest)
        return {
            "range": [round(math.log10(end), 6) for end in ends] if self.log else ends,
            "type": "log" if self.log else "linear",
            "tickvals": [value for value, _ in self.ticks],
            "ticktext": [label for _, label in self.ticks],
        }


class Panel(msgspec.Struct, frozen=True):
    """One frame of a picture."""

    title: str
    across: Axis  # The horizontal axis.
    up: Axis  # The vertical one.
    lines: tuple[tuple[Style, Points], ...]  # Style and points of each line; the first is on top.
    notes: tuple[tuple[float, float, str], ...] = ()  # Texts in the panel, each at a point of it.


def picture(
    title: str,
    styles: Sequence[Style],
    panels: Sequence[Panel],
    *,
    columns: int = 2,
    size: tuple[int, int] = (400, 170),
) -> "Figure":
    """Returns a figure of panels, with one legend.

    Args:
        title: Of the picture.
        styles: The entries of the legend, in order.
        panels: Row by row.
        columns: Number of panels per row.
        size: Width and height of each, in pixels.
    """
    from plotly.graph_objects import Scatter

    names = [style.name for style in styles]
    figure = grid(title, [panel.title for panel in panels], columns=columns, size=size)
    legend: set[str] = set()
    for number, panel in enumerate(panels):
        cell = {"row": number // columns + 1, "col": number % columns + 1}
        for style, points in reversed(panel.lines):
            line = {"color": style.color, "width": style.width, "dash": style.dash}
            across, up = zip(*points, strict=True)
            # Lines of a style have one entry in the legend.
            entry = {"legendrank": names.index(style.name), "showlegend": style.name not in legend}
            legend.add(style.name)
            figure.add_trace(
                Scatter(x=across, y=up, mode="lines", name=style.name, line=line, **entry), **cell
            )
        figure.update_xaxes(panel.across.settings(), **cell)
        figure.update_yaxes(panel.up.settings(), **cell)
        for x, y, text in panel.notes:
            label = {"text": [text], "mode": "text", "textposition": "middle right", "showlegend": False}
            figure.add_trace(Scatter(x=[x], y=[y], **label), **cell)
    return figure


def grid(title: str, titles: Sequence[str], *, columns: int, size: tuple[int, int]) -> "Figure":
    """Returns a figure of empty panels of a size in pixels, row by row, in the style of all pictures."""
    from plotly.subplots import make_subplots

    rows = math.ceil(len(titles) / columns)
    width, height = columns * (size[0] + 60) + 20, rows * (size[1] + 70) + 70
    gaps = {"horizontal_spacing": 60 / width, "vertical_spacing": 70 / height}
    figure = make_subplots(rows, columns, subplot_titles=titles, **(gaps if len(titles) > 1 else {}))
    figure.update_annotations(font_size=12)
    figure.update_layout(
        title={"text": title, "font_size": 15, "x": 0.01, "y": 1 - 16 / height},
        legend={"orientation": "h", "y": 1 + 30 / (height - 120), "yanchor": "bottom"},
        width=width,
        height=height,
        margin={"l": 60, "r": 20, "t": 100, "b": 40},
        font={"family": "Helvetica, Arial, sans-serif", "size": 11},
    )
    return figure


def is_current(figure: "Figure", path: Path) -> bool:
    """Returns whether an SVG file shows this figure."""
    return path.is_file() and path.read_text(encoding="utf-8").startswith(_mark(figure))


def write_svg(figure: "Figure", path: Path) -> None:
    """Writes the SVG file of a figure."""
    mark = _mark(figure)
    figure.update_layout(template="plotly_white")
    path.write_text(f"{mark}{figure.to_image(format='svg').decode()}\n", encoding="utf-8")


def _mark(figure: "Figure") -> str:
    """Returns the first line of the file of a figure."""
    parts = figure.to_dict()
    # Versions of plotly have different templates.
    parts["layout"].pop("template", None)
    values = json.dumps(parts, sort_keys=True, default=list)
    return f"<!-- figure {hashlib.sha256(values.encode()).hexdigest()[:32]} -->\n"
