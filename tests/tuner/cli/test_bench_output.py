"""How results of `flashtune bench` are shown: tables, notes, lines, Markdown and plots."""

import io

import msgspec
import pytest
from rich.console import Console

from flashtune.core.problem import Causal
from flashtune.tuner.bench.driver import report_of
from flashtune.tuner.bench.grids import grid_problems
from flashtune.tuner.bench.results import OURS, LeftOut
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

PAPER, DECODE = grid_problems("paper"), grid_problems("decode")
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
