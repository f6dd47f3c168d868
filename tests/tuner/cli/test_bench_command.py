"""Tests of the bench command: saving, loading, refusals, and how results are shown."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from click.testing import Result
from rich.console import Console

from flashtune import testing
from flashtune.core.problem import Causal, Problem
from flashtune.tuner.bench import driver
from flashtune.tuner.bench.driver import BenchRequest, report_of, run_benches
from flashtune.tuner.bench.grids import GRIDS, grid_problems
from flashtune.tuner.bench.results import OURS, Bench, LeftOut
from flashtune.tuner.cli.commands.bench import GRIDS as NAMED_GRIDS
from flashtune.tuner.cli.report.bench_markdown import markdown
from flashtune.tuner.cli.report.bench_terminal import (
    CEILING,
    COPY,
    bench_line,
    bench_table,
    lengths_of,
    notes,
    summary,
    title_of,
)
from tests.tuner.bench.bench_fakes import DETAIL, REFUSED, SPEEDS, a_bench, a_reading_bench, a_run
from tests.tuner.cli.conftest import Run

PAPER = grid_problems("paper")
SHAPE = "heads=4,kv_heads=2,seqlen=256,head_dim=64,dtype=bf16,causal,batch=2"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A report of the whole grid."""
    path = tmp_path / "saved.json"
    run = a_run(*(a_bench(problem, left_out=(REFUSED,)) for problem in PAPER))
    path.write_bytes(msgspec.json.encode(report_of(run, None)))
    return path


@pytest.mark.parametrize("count", [2, 36])
def test_a_saved_report_is_shown_without_a_gpu(run: Run, tmp_path: Path, count: int) -> None:
    path, page = tmp_path / "saved.json", tmp_path / "folder" / "bench.md"
    benches = (a_bench(problem, left_out=(REFUSED,)) for problem in PAPER[:count])
    path.write_bytes(msgspec.json.encode(report_of(a_run(*benches), None)))
    result = run("bench", "--load", path, "--markdown", page)
    assert result.exit_code == 0, result.output
    assert f"flashtune over sdpa-cudnn: 1.200 in the geometric mean of {count}" in result.output
    assert "reaches 800.0 TFLOP/s" in result.output
    assert REFUSED.message in result.output
    assert page.read_text(encoding="utf-8").startswith("# Attention on nvidia-h200")


def test_published_figures_are_summarised_as_one_ratio(run: Run, saved: Path) -> None:
    peers = Path(__file__).parents[3] / "benchmarks" / "peers" / "nvidia-h200.json"
    result = run("bench", "--load", saved, "--against", peers)
    assert result.exit_code == 0, result.output
    assert "in the geometric mean of 36" in result.output
    assert "fwd d64 full s16384: 1.200 of cuDNN here, fa4 1.221 there: 0.983" in result.output
    as_json = json.loads(run("bench", "--load", saved, "--against", peers, "--json").stdout)
    assert len(as_json["against"]["points"]) == 36
    fp8 = peers.with_name("nvidia-h200-fp8.json")
    assert "no shape of this run can be compared" in run("bench", "--load", saved, "--against", fp8).output


def test_saved_and_printed_json_are_equal(run: Run, saved: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    result = run("bench", "--load", saved, "--json", "--save", again)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads(again.read_bytes()) == json.loads(saved.read_bytes())


def test_a_plot_has_a_panel_for_each_mask_and_head_dim(run: Run, saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from flashtune.tuner.cli.report.bench_plot import figure

    page = tmp_path / "plot.html"
    assert run("bench", "--load", saved, "--plot", page).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert "head dim 128, 16 heads, causal" in text
    assert "<script src=" not in text
    plot = figure(a_run(*(a_bench(problem) for problem in PAPER)))
    assert len(plot.data) == 6 * (len(SPEEDS) + 1)
    dashed = [trace for trace in plot.data if trace.line.dash == "dash"]
    assert [tuple(trace.y) for trace in dashed] == [(800.0, 800.0)] * 6
    assert sorted(trace.name for trace in plot.data if trace.showlegend) == sorted([*SPEEDS, CEILING])
    assert len({trace.xaxis for trace in plot.data}) == 6


def test_plot_without_plotly_is_refused_before_timing(
    run: Run, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    result = run("bench", "--load", saved, "--plot", tmp_path / "plot.html")
    assert result.exit_code == 2
    assert "flashtune[plot]" in result.output
    assert "geometric mean" not in result.output
    page = tmp_path / "bench.md"
    result = run("bench", "--load", saved, "--plot", tmp_path / "plot.html", "--markdown", page)
    assert result.exit_code == 2
    assert "flashtune[plot]" in result.output
    assert page.read_text(encoding="utf-8").startswith("# Attention on")


def test_missing_kernel_row_is_an_error_after_the_output(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    wrong = a_bench(PAPER[0], {"sdpa-cudnn": 500.0}, (LeftOut(OURS, 2.0),))
    path.write_bytes(msgspec.json.encode(report_of(a_run(wrong, a_bench(PAPER[1])), None)))
    result = run("bench", "--load", path)
    assert result.exit_code == 1
    assert f"the selected kernel of {PAPER[0].key} does not compute it here" in result.output
    assert "flashtune is left out: its error against float64 is 2 of what is allowed" in result.output


def test_shapes_and_a_saved_report_are_exclusive(run: Run, saved: Path) -> None:
    result = run("bench", "--load", saved, "--grid", "paper")
    assert result.exit_code == 2
    assert "leave the shapes out" in result.output


def test_command_lists_the_grids() -> None:
    assert tuple(GRIDS) == NAMED_GRIDS


@pytest.fixture
def fake_gpu() -> Iterator[list[Problem]]:
    """A fake GPU with constructed benches; returns the list of timed problems."""
    timed: list[Problem] = []
    empty = a_run()

    def fake_bench(
        problem: Problem, index: int, *, peers: tuple[str, ...], rounds: int, sustained: bool
    ) -> Bench:
        timed.append(problem)
        if len(timed) > 3:
            raise KeyboardInterrupt
        bench = a_bench(problem, {name: SPEEDS[name] for name in (OURS, *peers)})
        return msgspec.structs.replace(bench, sustained=sustained)

    functions: dict[str, Any] = {
        "compile_ahead": lambda problems, target: (),
        "measure_ceiling": lambda dtype, device, rounds: empty.ceilings[0],
        "measure_copy": lambda device, rounds: empty.copy,
        "environment": lambda device: empty.environment,
        "run_bench": fake_bench,
    }
    with testing.fake_gpu(), mock.patch.multiple(driver, **functions):
        yield timed


@pytest.mark.usefixtures("fake_gpu")
def test_sustained_times_are_marked_as_such(run: Callable[..., Result], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    result = run("bench", "--shape", SHAPE, "--no-peers", "--sustained", "--markdown", str(page))
    assert "Each was timed alone, under sustained load." in " ".join(result.output.split())
    assert "each contestant alone under sustained load, median of" in page.read_text()
    plain = run("bench", "--shape", SHAPE, "--no-peers", "--markdown", str(page))
    assert "sustained" not in plain.output
    assert "contestants in turn, median of" in page.read_text()


def test_given_baselines_replace_the_default_ones(fake_gpu: list[Problem]) -> None:
    told: list[int] = []
    request = BenchRequest(PAPER[:2], (0,), ("sdpa-cudnn",), 5, "flashtune bench")
    bench_run = run_benches(request, lambda run: told.append(len(run.benches)))
    assert told == [1, 2]
    assert fake_gpu == list(PAPER[:2])
    assert [row.name for row in bench_run.benches[0].rows] == [OURS, "sdpa-cudnn"]
    assert bench_run.ceilings[0].tflops == 800.0
    assert bench_run.copy == a_run().copy


def test_interrupted_run_saves_finished_results(run: Run, fake_gpu: list[Problem], tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    result = run("bench", "--grid", "paper", "--peer", "sdpa-cudnn", "--save", path)
    assert result.exit_code == 130
    assert len(json.loads(path.read_bytes())["run"]["benches"]) == 3
    assert run("bench", "--load", path).exit_code == 0


def test_empty_problem_is_refused_before_timing(run: Run, fake_gpu: list[Problem], tmp_path: Path) -> None:
    shapes = tmp_path / "shapes.json"
    empty = msgspec.structs.replace(PAPER[0], batch=0)
    shapes.write_bytes(msgspec.json.encode([PAPER[0], empty]))
    result = run("bench", "--shapes-file", shapes, "--no-peers")
    assert result.exit_code == 2
    assert fake_gpu == []


def test_dropout_is_refused_before_timing(run: Run, fake_gpu: list[Problem]) -> None:
    result = run("bench", "--shape", SHAPE, "--shape", f"{SHAPE},window=8,dropout", "--no-peers")
    assert result.exit_code == 2
    assert "implementations drop other probabilities" in result.stderr
    assert fake_gpu == []


@pytest.mark.gpu
def test_command_prints_tables_and_writes_all_files(run: Run, tmp_path: Path) -> None:
    page, kept = tmp_path / "bench.md", tmp_path / "bench.json"
    result = run("bench", "--shape", SHAPE, "--rounds", "3", "--markdown", page, "--save", kept)
    assert result.exit_code == 0, result.output
    assert "TFLOP/s" in result.output
    assert OURS in page.read_text(encoding="utf-8")
    assert json.loads(kept.read_bytes())["run"]["ceilings"][0]["tflops"] > 0


DECODE = grid_problems("decode")
WRONG = LeftOut("sdpa-efficient", 3.25)
NOT_FINITE = LeftOut("flex", None)


def test_the_table_compares_with_the_best_sdpa() -> None:
    printed = io.StringIO()
    Console(width=120, file=printed).print(bench_table(a_bench(PAPER[0])))
    lines = printed.getvalue().splitlines()
    ours = next(line for line in lines if OURS in line)
    assert "600.0" in ours
    assert "1.20" in ours
    assert "0.60" in next(line for line in lines if "sdpa-flash" in line)


def test_notes_list_the_kernel_and_omitted_implementations() -> None:
    said = notes(a_bench(PAPER[0], left_out=(WRONG, NOT_FINITE, REFUSED), throttled=True))
    assert f"flashtune is {DETAIL}." in said
    assert "sdpa-efficient is left out: its error against float64 is 3.2 of what is allowed." in said
    assert "flex is left out: its output is not finite where it should be." in said
    assert f"unfused is left out: {REFUSED.message}." in said
    assert any("clock" in sentence for sentence in said)
    assert len(notes(a_bench(PAPER[0]))) == 1


def test_line_contains_all_results_of_a_shape() -> None:
    line = bench_line(a_bench(PAPER[0], left_out=(REFUSED,), throttled=True))
    assert line == (
        "bf16, head dim 64, 32 heads, full, 512, batch 32: flashtune 600.0, sdpa-cudnn 500.0, "
        "sdpa-flash 300.0, flash-attn-4 750.0, unfused left out, throttled"
    )


RATES = {OURS: 3600.0, "sdpa-cudnn": 3000.0}


def test_decoding_is_reported_as_bandwidth() -> None:
    bench = a_reading_bench(DECODE[3], RATES)
    printed = io.StringIO()
    Console(width=120, file=printed).print(bench_table(bench))
    assert "GB/s" in printed.getvalue()
    assert "3600.0" in printed.getvalue()
    assert bench_line(bench) == (
        "decode, bf16, head dim 128, 32 heads on 8, full, 1 to 8192, batch 16 (GB/s): flashtune 3600.0, "
        "sdpa-cudnn 3000.0"
    )
    report = report_of(a_run(bench), None)
    text = markdown(report)
    assert "decode b16 hq32 hkv8 s8192 d128 [GB/s] | 3600 | 0.900 |" in text
    assert f"| {COPY} | 4000.0 |" in text
    assert CEILING not in text.split("## Every shape")[0].split("## Speeds")[1]
    said = list(summary(report))
    assert "decode b16 hq32 hkv8 s8192 d128 [GB/s]: 3600 GB/s, 0.900 of the copy." in said


def test_plot_of_decoding_shows_copy_bandwidth_as_limit() -> None:
    pytest.importorskip("plotly")
    from flashtune.tuner.cli.report.bench_plot import figure

    plot = figure(a_run(a_reading_bench(DECODE[0], RATES), a_bench(PAPER[0])))
    assert {trace.name: tuple(trace.y) for trace in plot.data if trace.line.dash == "dash"} == {
        COPY: (4000.0, 4000.0),
        CEILING: (800.0, 800.0),
    }
    assert (plot.layout.yaxis.title.text, plot.layout.yaxis2.title.text) == ("GB/s", "TFLOP/s")


def test_messages_of_baselines_are_printable() -> None:
    bench = a_bench(PAPER[0], left_out=(LeftOut("flex", None, "no\x1b[2J [bold]| way\nback"),))
    assert all(sentence.isprintable() for sentence in notes(bench))


def test_titles_contain_unusual_fields() -> None:
    problem = msgspec.structs.replace(
        PAPER[0], kv_heads=8, value_head_dim=32, seqlen_kv=600, causal=Causal.TOP_LEFT
    )
    assert title_of(problem) == "bf16, head dim 64 (values 32), 32 heads on 8, causal top-left"
    assert lengths_of(problem) == "512 to 600, batch 32"
    windowed = msgspec.structs.replace(PAPER[0], window_left=1023, sinks=True)
    assert title_of(windowed) == "bf16, head dim 64, 32 heads, full, window1023:, sinks"


def test_markdown_contains_versions_command_and_every_row() -> None:
    benches = [a_bench(problem, left_out=(REFUSED,)) for problem in PAPER]
    missing = {name: speed for name, speed in SPEEDS.items() if name != "sdpa-flash"}
    benches[1] = a_bench(PAPER[1], missing)
    text = markdown(report_of(a_run(*benches), None))
    for part in (
        "NVIDIA H200",
        "torch 2.13.0",
        "driver 580.1",
        "cuDNN 9.19.0",
        "`flashtune bench --grid paper`",
        f"| {CEILING} | 800.0 |",
        "| best peer | 36 | 0.800 | 0.800 |",
        "| sdpa-flash | 300.0 | – | 300.0 |",
    ):
        assert part in text
    assert text.count("### forward_bf16") == 36
    assert text.count("### bf16, head dim") == 6
    table: list[int] = []
    for line in text.splitlines():
        if line.startswith("|"):
            table.append(line.count("|"))
            assert table[0] == table[-1]
        else:
            table = []
