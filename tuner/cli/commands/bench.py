"""`flashtune bench`: times selected kernels and other implementations in one run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from flashtune.core.errors import UsageError, VerificationError
from flashtune.core.files import read_bounded
from flashtune.core.machine import DATABASE_VARIABLE
from flashtune.tuner.cli.command import flashtune_command
from flashtune.tuner.cli.options import (
    DEVICE_OPTION,
    chosen_gpus,
    database_option,
    devices_option,
    file_option,
    json_option,
    problem_options,
)
from flashtune.tuner.cli.output import command_line, note, print_json

if TYPE_CHECKING:
    from flashtune.core.problem import Problem
    from flashtune.tuner.bench.driver import BenchRequest, Report
    from flashtune.tuner.bench.grids import PeerFile
    from flashtune.tuner.bench.results import BenchRun

# As in `grids` and `peer_runs` of `flashtune.tuner.bench`, whose import would slow down `--help`.
GRIDS = ("paper", "gqa", "fp8", "backward", "decode", "paged", "splits", "features")
MAX_RESULT_BYTES = 2**28
PEERS = ("sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "flex", "flash-attn-4", "flashinfer", "unfused")


@flashtune_command(
    "bench",
    'flashtune bench --shape "heads=32,kv_heads=8,seqlen=4096,head_dim=128,causal"',
    "flashtune bench --grid paper --save results.json --markdown results.md",
)
@problem_options(grids="--grid", load_file="--load")
@click.option(
    "--grid",
    "grids",
    multiple=True,
    type=click.Choice(GRIDS),
    help="Shapes that papers report. paper: bf16, head dims 64, 128 and 256, full and causal, lengths 512 to "
    "16384, 16k tokens, heads x head dim = 2048. gqa: bf16, 64 heads on 8, head dim 128, lengths 2048 to "
    "32768, 32k tokens. fp8: the same in e4m3. backward: the gradients of the paper's shapes at lengths 2048 "
    "and 8192. decode: bf16, one query for each head, batches 1 to 128, "
    "caches of 4096 to 131072 keys, in GB/s. paged: bf16, one query for each head, 32 or 64 heads on 8, "
    "caches of 1024 to 65536 keys in pages of 16 and 64, batches 1 to 128. "
    "splits: bf16, 16 to 512 queries over 4096 to 131072 keys. "
    "features: windows, softcap, ALiBi, chunks, sinks, masks, packed "
    "sequences and pages. Repeatable.",
)
@DEVICE_OPTION
@devices_option()
@click.option(
    "--peer",
    "peers",
    multiple=True,
    type=click.Choice(PEERS),
    metavar="NAME",
    help=f"Implementation to compare with: {', '.join(PEERS)}. Default: all that are installed. flex is "
    "compiled for each shape, which takes seconds. Repeatable.",
)
@click.option("--no-peers", is_flag=True, help="Time only the selected kernel.")
@click.option(
    "--rounds",
    type=click.IntRange(3, 1000),
    default=21,
    show_default=True,
    help="Samples of each implementation.",
)
@click.option(
    "--sustained",
    is_flag=True,
    help="Time each implementation alone, at the clock that its power allows, in place of --rounds.",
)
@file_option(
    "against",
    "JSON file with speeds of other implementations from another run. The report compares with them.",
    exists=True,
)
@file_option("save", "Write the results to FILE as JSON, after each shape.")
@file_option("load", "Show a file that --save wrote, without timing. Needs no GPU.", exists=True)
@file_option("markdown", "Also write the tables to FILE, with versions and the command line.")
@file_option("plot", "Write speeds over sequence length to FILE, as a web page. Needs plotly.")
@database_option
@json_option
def command(
    problems: tuple[Problem, ...],
    grids: tuple[str, ...],
    device: int | None,
    devices: str | None,
    peers: tuple[str, ...],
    no_peers: bool,
    rounds: int,
    sustained: bool,
    against_file: Path | None,
    save_file: Path | None,
    load_file: Path | None,
    markdown_file: Path | None,
    plot_file: Path | None,
    db: str | None,
    as_json: bool,
) -> None:
    """Time the selected kernels of shapes and other implementations, interleaved.

    At its power limit, a GPU lowers its clock, and interleaved kernels have one clock. With --sustained each
    has its own.

    GPU times are of CUDA-graph replays with a cold L2 cache. Host times are in a separate column. The time
    of a backward shape is that of the gradients alone, as autograd computes them. An implementation whose
    output differs from the float64 reference is left out. If it is flashtune's kernel, the exit code is 1.

    The upper limit is the speed of a large matrix product in the same run. Decoding is limited by memory, so
    its speed is in GB/s, and its limit is a copy of device memory.
    """
    from flashtune.tuner.bench.driver import BenchRequest, report_of
    from flashtune.tuner.cli.report.chart_report import has_plotly, require_plotly

    lacks_plotly = plot_file is not None and not has_plotly()
    if lacks_plotly and markdown_file is None and save_file is None:
        # Fail before the measurements if nothing could be written after them.
        require_plotly()
    figures = _figures(against_file)
    if load_file is not None:
        if problems or grids:
            raise UsageError("--load shows what was timed before: leave the shapes out")
        run = _loaded(load_file, as_json)
    else:
        if db is not None:
            # Bench the kernels that a program gets. Programs name their database by this variable.
            os.environ[DATABASE_VARIABLE] = db
        listed, chosen = _all_problems(problems, grids), _chosen_peers(peers, no_peers)
        request = BenchRequest(
            listed, chosen_gpus(device, devices), chosen, rounds, command_line(), sustained
        )
        run = _timed(request, figures, save_file, as_json)
    report = report_of(run, figures)
    if figures is not None and report.against is None:
        note(f"no shape of this run can be compared with {against_file}: --grid paper has its cases")
    _finish(report, save_file, markdown_file, None if lacks_plotly else plot_file, as_json)
    if lacks_plotly:
        require_plotly()


def _figures(path: Path | None) -> PeerFile | None:
    from flashtune.tuner.bench.grids import read_figures

    return None if path is None else read_figures(_content(path), str(path))


def _content(path: Path) -> bytes:
    try:
        return read_bounded(path, MAX_RESULT_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; name another file") from error


def _all_problems(problems: tuple[Problem, ...], grids: tuple[str, ...]) -> tuple[Problem, ...]:
    from flashtune.tuner.bench.grids import grid_problems

    return tuple(dict.fromkeys((*problems, *(problem for name in grids for problem in grid_problems(name)))))


def _chosen_peers(peers: tuple[str, ...], no_peers: bool) -> tuple[str, ...]:
    from flashtune.tuner.bench.peer_runs import check_peers, installed_peers

    if no_peers and peers:
        raise UsageError("--peer and --no-peers exclude each other: use one of them")
    if no_peers:
        return ()
    return check_peers(peers) if peers else installed_peers()


def _timed(request: BenchRequest, figures: PeerFile | None, save: Path | None, as_json: bool) -> BenchRun:
    """Runs the request. Shows and saves each result as it arrives."""
    from flashtune.tuner.bench.driver import report_of, run_benches
    from flashtune.tuner.cli.report.bench_terminal import show_bench

    def watch(run: BenchRun) -> None:
        if not as_json:
            show_bench(run.benches[-1], len(request.problems))
        if save is not None:
            _save(save, report_of(run, figures))

    return run_benches(request, watch)


def _loaded(path: Path, as_json: bool) -> BenchRun:
    from flashtune.tuner.bench.driver import read_report
    from flashtune.tuner.cli.report.bench_terminal import show_bench

    run = read_report(_content(path), str(path))
    for bench in () if as_json else run.benches:
        show_bench(bench, len(run.benches))
    return run


def _save(path: Path, report: Report) -> None:
    from flashtune.tuner.tables.table_files import write_file

    write_file(path, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def _finish(
    report: Report, save: Path | None, markdown_file: Path | None, plot: Path | None, as_json: bool
) -> None:
    """Shows the summaries of all results and writes the files.

    Raises:
        VerificationError: A selected kernel has no row.
    """
    from flashtune.tuner.bench.results import OURS
    from flashtune.tuner.cli.report.bench_markdown import markdown
    from flashtune.tuner.cli.report.bench_plot import plot_page
    from flashtune.tuner.cli.report.bench_terminal import show_summary
    from flashtune.tuner.tables.table_files import write_file

    if as_json:
        print_json(report)
    else:
        show_summary(report)
    if save is not None:
        _save(save, report)
    if markdown_file is not None:
        write_file(markdown_file, markdown(report).encode())
    if plot is not None:
        write_file(plot, plot_page(report.run).encode())
    wrong = [bench.problem.key for bench in report.run.benches if bench.row(OURS) is None]
    if wrong:
        raise VerificationError(
            f"the selected kernel of {', '.join(wrong)} does not compute it here: run flashtune verify"
        )
