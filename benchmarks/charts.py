"""Charts of measurements in SVG: a grid of panels with lines, and a legend above."""

import math
from collections.abc import Iterator, Sequence

import msgspec

# Distances in pixels; the gap holds an axis's labels.
GAP, TOP = 46, 70
LEGEND_STEP = 110
INK, SOFT, FRAME, GRID = "#1f2430", "#5b6475", "#8a93a6", "#eef0f4"

Points = Sequence[tuple[float, float]]


class Style(msgspec.Struct, frozen=True):
    """The style and name of a line."""

    name: str  # In the legend.
    color: str  # Such as `#d55e00`.
    width: float = 1.4  # In pixels.
    dash: str = ""  # An SVG dash pattern such as `6 4`; empty for a solid line.

    @property
    def stroke(self) -> str:
        """Its attributes in SVG."""
        dash = f' stroke-dasharray="{self.dash}"' if self.dash else ""
        return f'stroke="{self.color}" stroke-width="{self.width}"{dash}'


class Axis(msgspec.Struct, frozen=True):
    """The range of one side of a panel."""

    lowest: float  # Where it begins.
    highest: float  # Where it ends.
    ticks: tuple[tuple[float, str], ...]  # Values and their labels.
    log: bool = False  # Whether the scale is logarithmic.

    def share(self, value: float) -> float:
        """The position of a value along the axis, from 0 to 1; values outside are clamped."""
        low, high = self.lowest, self.highest
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return min(1.0, max(0.0, value - low) / (high - low))


class Panel(msgspec.Struct, frozen=True):
    """One frame of a picture."""

    title: str  # Written at its lower left.
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
    legend_step: int = LEGEND_STEP,
) -> str:
    """A whole SVG file.

    Args:
        title: Of the picture.
        styles: The entries of the legend, in order.
        panels: Row by row.
        columns: Number of panels per row.
        size: Width and height of each, in pixels.
        legend_step: From one entry of the legend to the next, in pixels.
    """
    rows = math.ceil(len(panels) / columns)
    width, height = columns * (size[0] + GAP) + GAP, TOP + rows * (size[1] + GAP)
    box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    font = 'font-family="Helvetica, Arial, sans-serif" font-size="11"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" {font}>',
        f"  <title>{title}</title>",
        f'  <rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        f'  <text x="{GAP}" y="24" font-size="14" font-weight="bold" fill="{INK}">{title}</text>',
    ]
    for number, style in enumerate(styles):
        left = GAP + legend_step * number
        parts.append(f'  <line x1="{left}" y1="42" x2="{left + 24}" y2="42" {style.stroke}/>')
        parts.append(f'  <text x="{left + 30}" y="46" fill="{INK}">{style.name}</text>')
    for number, panel in enumerate(panels):
        left = GAP + number % columns * (size[0] + GAP)
        top = TOP + number // columns * (size[1] + GAP)
        parts += _panel(panel, left, top, *size)
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, left: int, top: int, width: int, height: int) -> Iterator[str]:
    bottom = top + height

    def x_of(value: float) -> float:
        return left + panel.across.share(value) * width

    def y_of(value: float) -> float:
        return bottom - panel.up.share(value) * height

    yield f'  <rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="{FRAME}"/>'
    yield f'  <text x="{left + 6}" y="{bottom - 8}" fill="{INK}">{panel.title}</text>'
    for value, label in panel.up.ticks:
        y = y_of(value)
        yield f'  <line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}" stroke="{GRID}"/>'
        yield f'  <text x="{left - 4}" y="{y + 4:.1f}" fill="{SOFT}" text-anchor="end">{label}</text>'
    for value, label in panel.across.ticks:
        x = x_of(value)
        yield f'  <text x="{x:.0f}" y="{bottom + 14}" fill="{SOFT}" text-anchor="middle">{label}</text>'
    for style, points in reversed(panel.lines):
        places = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in _corners(points))
        yield f'  <polyline points="{places}" fill="none" {style.stroke}/>'
    for across, up, text in panel.notes:
        yield f'  <text x="{x_of(across):.0f}" y="{y_of(up):.0f}" fill="{SOFT}">{text}</text>'


def _corners(points: Points) -> list[tuple[float, float]]:
    """The points of a line without the inner points of horizontal segments."""
    inner = zip(points, points[1:], points[2:], strict=False)
    bends = [point for before, point, after in inner if not before[1] == point[1] == after[1]]
    return [points[0], *bends, points[-1]]
