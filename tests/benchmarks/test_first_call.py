"""Tests of the table of first calls."""

import datetime

from benchmarks.host.first_call import Row, summary, texts
from benchmarks.saved import Saved, Source

SOURCE = Source("python -m a", datetime.date(2026, 11, 28), "NVIDIA H200", "2.11.0", "3.6.0", "580.1")
OURS, TORCHS = "import of flashtune to its first result, ms", "import of torch to its first result, ms"


def rows(scale: float, compiled: int) -> list[Row]:
    return [
        ("then an untuned plain shape, ms", "short", 20.0 * scale, compiled),
        ("then an untuned plain shape, ms", "wide", 50.0 * scale, compiled),
        ("then an untuned plain shape, ms", "long", 9.0 * scale, 0),
        (OURS, "", 2400.0 * scale, 0),
        (TORCHS, "", 2000.0, 0),
    ]


def test_summary_has_medians_the_worst_case_and_the_kernels_that_were_compiled() -> None:
    first, *_, ratio = summary(rows(1.0, 1))
    assert first == ("then an untuned plain shape, ms", "20.0", "50.0 wide", "2")
    assert ratio == ("import to first result, flashtune over torch", "1.20", "", "")


def test_table_compares_runs_with_and_without_a_bundle() -> None:
    runs = [Saved(SOURCE, rows(1.0, 0)), Saved(SOURCE, rows(3.0, 1))]
    lines = texts(runs)["first-call"].splitlines()
    assert lines[0].startswith("On an NVIDIA H200 (torch 2.11.0, Triton 3.6.0, driver 580.1)")
    assert "| then an untuned plain shape, ms | 20.0 | 50.0 wide | 0 | 60.0 |" in lines
    assert "| import to first result, flashtune over torch | 1.20 |  |  | 3.60 |" in lines
