"""`Chart`: values over one axis, which commands print as a table, as JSON or as a plot."""

from collections.abc import Mapping

import msgspec

BYTES = "bytes"
Values = tuple[float | None, ...]


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of values over one axis."""

    title: str
    across: str  # The axis: `tokens`.
    positions: tuple[int | str, ...]  # Points of the axis, in order.
    unit: str  # Of all values: `bytes`, `FLOP/byte`.
    lines: Mapping[str, Values]  # One value for each position; None if there is none.
    limits: Mapping[str, float] = {}  # Bounds of the values, such as a capacity.
    beyond: str = ""  # A word for values above all limits in tables.
    log: bool = True  # Whether plots have a logarithmic scale of values.
    notes: Mapping[str, str | int | float | None] = {}  # Single results, and how the values were obtained.
