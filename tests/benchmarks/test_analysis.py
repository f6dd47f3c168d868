"""Tests of the wiring of the measured crossover length: the page is complete with and without its file."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.analysis import report
from benchmarks.analysis.crossover import SHAPES
from benchmarks.analysis.recorded_trace import read_azure
from benchmarks.saved import save
from flashtune.tuner.analysis.cache_use import Request
from flashtune.tuner.workloads.shapes import parse_shape
from scripts.code_blocks import ROOT, code_blocks
from tests.tuner.bench.bench_fakes import a_bench, a_run


def test_page_without_a_measurement_says_how_to_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "CROSSOVER", Path("none.json.gz"))
    assert report.measured_crossover() == ()
    assert "python -m benchmarks.analysis.crossover --save" in report.crossover_text()
    assert "](pictures/" not in report.crossover_text()


def test_measurement_makes_a_table_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "crossover.json.gz"
    problems = parse_shape("heads=16,seqlen=16|32|64,head_dim=64|128")
    # Unfused attention is faster at 16 tokens.
    speeds = {16: {"flashtune": 1.0, "unfused": 2.0}}
    benches = [
        a_bench(problem, speeds.get(problem.seqlen_kv, {"flashtune": 2.0, "unfused": 1.0}))
        for problem in problems
    ]
    save(path, a_run(*benches))
    monkeypatch.setattr(report, "CROSSOVER", path)
    monkeypatch.setattr(report, "charts", dict)
    text = report.crossover_text()
    assert "![Times of unfused and of fused attention over length](pictures/analysis-crossover.svg)" in text
    assert "| h16 d64 b1 | 32 |" in text
    assert "| h16 d128 b1 | 32 |" in text
    pytest.importorskip("plotly")
    assert list(report.pictures()) == ["analysis-crossover"]


def test_script_measures_from_16_tokens() -> None:
    lengths = {problem.seqlen_kv for shape in SHAPES for problem in parse_shape(shape)}
    assert (min(lengths), max(lengths)) == (16, 4096)


def test_recorded_trace_is_converted(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,0\n"
    )
    assert list(read_azure(path)) == [Request(0.0, 374, 44), Request(4.314579, 396, 1)]


def test_example_of_a_trace_is_a_request() -> None:
    (example,) = (block.text for block in code_blocks(ROOT / "docs/analysis.md") if block.language == "json")
    assert msgspec.json.decode(example, type=Request) == Request(0.0, 374, 44)
