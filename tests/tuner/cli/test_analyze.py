"""Tests of flashtune analyze and flashtune targets --details: tables, JSON, plots and errors."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from flashtune import testing
from flashtune.tuner.analysis.crossover import FASTER_FROM
from flashtune.tuner.bench.driver import BenchRequest
from flashtune.tuner.bench.results import BenchRun
from flashtune.tuner.workloads.shapes import parse_shape
from tests.tuner.bench.bench_fakes import a_bench, a_run
from tests.tuner.cli.conftest import Run
from tests.tuner.cli.test_line_width import too_long

SHAPE = "heads=16,seqlen=64|128,head_dim=64,causal"
COMMANDS = {
    "intensity": ("analyze", "intensity", "--target", "h200", "--shape", SHAPE),
    "sram": ("analyze", "sram", "--target", "a100", "--shape", "heads=1,seqlen=64,head_dim=64|256"),
    "memory": ("analyze", "memory", "--target", "h200", "--model", "llama-3.2-1b", "--seqlen", "512|1024"),
    "crossover": ("analyze", "crossover", "--target", "h200", "--shape", SHAPE),
    "paging": ("analyze", "paging", "--requests", "20"),
    "details": ("targets", "--details"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_charts_are_printed_as_json_and_drawn(
    run: Run, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "page.html"
    result = run(*COMMANDS[name], "--json", "--plot", page)
    assert result.exit_code == 0, result.output
    charts = json.loads(result.stdout)
    for chart in charts:
        assert list(chart) == [
            "title",
            "across",
            "positions",
            "unit",
            "lines",
            "limits",
            "beyond",
            "log",
            "notes",
        ]
        assert {len(values) for values in chart["lines"].values()} == {len(chart["positions"])}
    html = page.read_text(encoding="utf-8")
    assert "<script src=" not in html
    assert all(json.dumps(chart["title"])[1:-1] in html for chart in charts)
    monkeypatch.setenv("COLUMNS", "80")
    text = run(*COMMANDS[name]).output
    assert "…" not in text
    assert too_long(text) == []
    assert all(re.sub(r"\s+", " ", chart["title"]) in re.sub(r"\s+", " ", text) for chart in charts)


def test_tiles_that_do_not_fit_are_marked(run: Run) -> None:
    text = run(*COMMANDS["sram"]).output
    assert "294,912 B over" in text
    assert "capacity of a block: 166,912 B" in text


def test_predicted_crossover_is_labelled(run: Run) -> None:
    text = run(*COMMANDS["crossover"]).output
    assert "times: predicted for h200" in text
    assert "fused is faster from, tokens: 64" in text


def test_crossover_has_the_times_of_a_run(run: Run) -> None:
    problems = parse_shape(SHAPE)
    speeds = ({"flashtune": 1.0, "unfused": 2.0}, {"flashtune": 2.0, "unfused": 1.0})
    timed = a_run(*(a_bench(problem, speed) for problem, speed in zip(problems, speeds, strict=True)))

    def run_benches(request: BenchRequest, watch: Callable[[BenchRun], None]) -> BenchRun:
        assert (request.problems, request.peers, request.devices) == (problems, ("unfused",), (0,))
        watch(timed)
        return timed

    with testing.fake_gpu(), mock.patch("flashtune.tuner.bench.driver.run_benches", run_benches):
        result = run("analyze", "crossover", "--shape", SHAPE, "--json")
    (chart,) = json.loads(result.stdout)
    assert chart["title"].endswith("measured on NVIDIA H200")
    assert chart["lines"]["fused"] == [row.ms for bench in timed.benches if (row := bench.row("flashtune"))]
    assert chart["notes"][FASTER_FROM] == 128
    assert "2 of 2 shapes timed" in result.stderr


@pytest.mark.gpu
def test_crossover_is_measured_on_a_gpu(run: Run) -> None:
    result = run("analyze", "crossover", "--shape", "heads=16,seqlen=16|1024,head_dim=64", "--json")
    assert result.exit_code == 0, result.output
    (chart,) = json.loads(result.stdout)
    assert "measured on" in chart["title"]
    assert all(ms > 0 for times in chart["lines"].values() for ms in times)
    assert chart["lines"]["fused"][1] < chart["lines"]["unfused"][1]


def test_plot_without_plotly_is_refused_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    result = run(*COMMANDS["intensity"], "--plot", "page.html")
    assert result.exit_code == 2
    assert "flashtune[plot]" in result.output


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("targets --plot x.html", "add --details"),
        ("analyze memory --target h200", "no model given"),
        (
            "analyze sram --target h100 --shape heads=1,seqlen=64,head_dim=8 --family no",
            "no kernel family",
        ),
        ("analyze paging --cache-tokens 10", "pass more --cache-tokens"),
        ("analyze paging --trace trace.jsonl --seed 1", "use one of them"),
        ("analyze paging --trace trace.jsonl", "is no trace"),
    ],
)
def test_errors_are_one_sentence(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_text("nothing\n", encoding="utf-8")
    result = run(*line.split())
    assert result.exit_code == 2, result.output
    assert words in result.output
    assert len(result.output.strip().splitlines()) == 1
