"""Tests of the charts and errors of the training report."""

from msgspec.structs import replace

from benchmarks.training.charts import memory_picture
from benchmarks.training.memory import UNFUSED
from benchmarks.training.report import saved_memory


def test_backend_that_never_fits_has_no_line() -> None:
    document = saved_memory()
    rows = tuple(
        replace(
            row,
            peaks=tuple(replace(peak, bytes=None) if peak.name == UNFUSED else peak for peak in row.peaks),
        )
        for row in document.rows
    )
    drawn, complete = memory_picture(replace(document, rows=rows)), memory_picture(document)
    assert "out of memory" in complete
    assert "out of memory" not in drawn
    assert drawn.count("<polyline") == complete.count("<polyline") - 1
