"""What is told of training is what was measured: tables and pictures are those of benchmarks/results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import training_report
from flashtune.errors import TableError
from flashtune.tuner.pages import with_tables


def test_the_page_holds_the_tables_of_the_results() -> None:
    page = training_report.PAGE.read_text(encoding="utf-8")
    texts = training_report.tables(training_report.measured(training_report.RESULTS))
    assert with_tables(page, texts, training_report.SCRIPT) == page
    assert all(text in page for text in texts.values())


def test_the_pictures_are_those_of_the_results() -> None:
    drawn = training_report.pictures(training_report.measured(training_report.RESULTS))
    for name, picture in drawn.items():
        assert (training_report.PICTURES / f"{name}.svg").read_text(encoding="utf-8") == picture


def test_a_folder_without_results_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="holds no such measurement"):
        training_report.measured(tmp_path)
