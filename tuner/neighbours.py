"""Which configs lie next to one: those that differ from it on a single axis."""

from __future__ import annotations

from collections.abc import Iterator

from flashtune.config import Axis, AxisValue, Config, Space


def neighbours(space: Space, config: Config) -> Iterator[Config]:
    """The points of a space that differ from a config on one axis, in the order of the axes.

    Ordered axes are left by one step, others for any value. What that switches off takes its first
    value, and what it switches on keeps the one that it has.
    """
    for axis in space.axes:
        for value in _beside(axis, getattr(config, axis.name)):
            moved = _moved(space, config, axis, value)
            if moved != config and space.contains(moved):
                yield moved


def _beside(axis: Axis, value: AxisValue) -> tuple[AxisValue, ...]:
    if value not in axis.values or not axis.ordered:
        return axis.values
    position = axis.values.index(value)
    return axis.values[max(0, position - 1) : position + 2]


def _moved(space: Space, config: Config, along: Axis, value: AxisValue) -> Config:
    return space.choose(lambda axis: value if axis is along else getattr(config, axis.name))
