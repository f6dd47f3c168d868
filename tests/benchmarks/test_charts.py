"""Tests of charts: positions of values, and well-formed files."""

from xml.etree import ElementTree as Xml

import pytest

from benchmarks.charts import Axis, Panel, Style, picture

LEVEL = Axis(0.0, 4.0, ((2.0, "two"),))
LOG = Axis(1.0, 16.0, ((4.0, "four"),), log=True)


@pytest.mark.parametrize(
    ("axis", "value", "share"),
    [(LEVEL, 1.0, 0.25), (LEVEL, -1.0, 0.0), (LEVEL, 9.0, 1.0), (LOG, 4.0, 0.5), (LOG, 0.0, 0.0)],
)
def test_values_are_mapped_to_axis_positions(axis: Axis, value: float, share: float) -> None:
    assert axis.share(value) == pytest.approx(share)


def test_chart_has_lines_labels_and_notes() -> None:
    style = Style("ours", "#d55e00", 2.0, "6 4")
    points = [(0.0, 4.0), (1.0, 4.0), (2.0, 4.0), (4.0, 1.0)]
    panel = Panel("panel", LEVEL, LOG, ((style, points),), ((2.0, 4.0, "noted"),))
    root = Xml.fromstring(picture("title", [style], [panel, panel], size=(100, 50)))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    lines = [element.get("points", "").split() for element in root.iter() if element.tag.endswith("polyline")]
    assert texts[:2] == ["title", "ours"]
    assert {"panel", "two", "four", "noted"} <= set(texts)
    # Points of a level stretch are left out.
    assert lines[0] == ["46.0,95.0", "96.0,95.0", "146.0,120.0"]
    assert len(lines) == 2
