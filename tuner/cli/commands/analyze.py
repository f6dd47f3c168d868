"""`flashtune analyze`: computed and measured properties of attention over one axis, as tables and plots."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashtune.core.errors import UsageError
from flashtune.core.machine import DATABASE_VARIABLE
from flashtune.tuner.cli.command import Group
from flashtune.tuner.cli.options import (
    WholeModels,
    apply_options,
    database_option,
    family_option,
    file_option,
    json_option,
    model_options,
    problem_options,
    target_options,
)
from flashtune.tuner.cli.output import command_line, note
from flashtune.tuner.cli.report.chart_report import require_plotly, show_charts

if TYPE_CHECKING:
    from flashtune.core.problem import Problem
    from flashtune.core.target import Target
    from flashtune.tuner.analysis.charts import Chart

SHAPE = '--shape "heads=32,kv_heads=8,seqlen=16..16384,head_dim=128,causal"'
PLOT_OPTION = file_option("plot", "Also draw the figure to FILE, as a web page. Needs plotly.")
ROUNDS = 21  # Samples of each time.
FAMILY_OPTION = family_option("families", multiple=True, help="Only this kernel family. Repeatable.")


@click.group("analyze", cls=Group)
def command() -> None:
    """Analyze attention over sequence length, tile sizes or page sizes."""


def analysis(*examples: str, options: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
    """Makes a function that returns charts a command of its name."""

    def decorate(charts_of: Callable[..., Sequence[Chart]]) -> click.Command:
        @functools.wraps(charts_of)
        def run(plot_file: Path | None, as_json: bool, **arguments: Any) -> None:
            if plot_file is not None:
                require_plotly()  # before measurements
            show_charts(charts_of(**arguments), plot_file, as_json)

        name = charts_of.__name__
        lines = tuple(f"flashtune analyze {name} {example}" for example in examples)
        made: click.Command = command.command(name, examples=lines)(
            apply_options((*options, PLOT_OPTION, json_option), run)
        )
        return made

    return decorate


@analysis(f"--target h200 {SHAPE}", options=(problem_options(), target_options, database_option))
def intensity(
    problems: tuple[Problem, ...], target: Target, device: int | None, db: str | None
) -> Sequence[Chart]:
    """Print operations per byte of HBM traffic, of unfused attention and of the selected kernels.

    Memory limits the speed below the ridge point, and the Tensor Cores above it. Needs no GPU.
    """
    from flashtune.tuner.analysis import intensity as analyzed

    del device  # no kernel is launched
    return analyzed.intensity(problems, target, db)


@analysis(
    '--target h100 --shape "heads=16,seqlen=4096,head_dim=64|128|256"',
    options=(problem_options(), target_options, FAMILY_OPTION),
)
def sram(
    problems: tuple[Problem, ...], target: Target, device: int | None, families: tuple[str, ...]
) -> Sequence[Chart]:
    """Print the SRAM of a block over its tile sizes, and the number of configs that fit.

    It is the least of all configs with a tile, by the model with which a search rejects candidates before it
    compiles them. "over" marks tiles that never fit. Needs no GPU.
    """
    from flashtune.tuner.analysis.sram_table import sram_charts

    del device
    return sram_charts(problems, target, families)


@analysis(
    "--target h200 --model llama-3.1-8b --seqlen 1024..65536",
    options=(model_options, target_options, database_option),
)
def memory(models: WholeModels, target: Target, device: int | None, db: str | None) -> Sequence[Chart]:
    """Print the memory of the attention of all layers of a model in training.

    It is the peak at the start of the backward pass: the tensors that all layers keep, and the gradients and
    workspaces of one layer. Weights, optimizer and other layers need the same memory with both. --seqlen
    defaults to 1024..131072. Needs no GPU.
    """
    from flashtune.tuner.analysis.training_memory import training_memory

    del device
    charts = (training_memory(attention, models.sizes, target, db) for attention in models.attentions)
    return [chart for group in charts for chart in group]


@analysis(
    SHAPE,
    f"--target h200 {SHAPE}",
    options=(problem_options(), target_options, database_option),
)
def crossover(
    problems: tuple[Problem, ...], target: Target, device: int | None, db: str | None
) -> Sequence[Chart]:
    """Print the length from which on kernels are faster than unfused attention.

    Times are measured on the GPU, as `flashtune bench` does. With --target they are predicted.
    """
    from flashtune.tuner.analysis import crossover as analyzed

    if device is None:
        times = analyzed.predicted_times(problems, target, db)
        return analyzed.crossover(times, f"predicted for {target.short_name}")
    from flashtune.tuner.bench.driver import BenchRequest, run_benches
    from flashtune.tuner.bench.peer_runs import UNFUSED

    if db is not None:
        # The measured kernels are those of a program. Programs name their database by this variable.
        os.environ[DATABASE_VARIABLE] = db
    request = BenchRequest(problems, (device,), (UNFUSED,), ROUNDS, command_line())
    run = run_benches(request, lambda run: note(f"{len(run.benches)} of {len(problems)} shapes timed"))
    return analyzed.crossover(run.times(UNFUSED), f"measured on {run.environment.gpu}")


def number_option(name: str, kind: click.ParamType[Any], default: float, text: str) -> Callable[..., Any]:
    """Returns an option of a number."""
    return click.option(f"--{name}", type=kind, default=default, show_default=True, help=text)


TRACE_OPTIONS = (
    file_option(
        "trace",
        "A recorded trace: one JSON object a line with arrival (in seconds), prompt_tokens and "
        "generated_tokens. Default: synthetic requests.",
        exists=True,
    ),
    number_option("requests", click.IntRange(1, 100_000), 400, "Number of synthetic requests."),
    number_option("rate", click.FloatRange(1e-3, 1e6), 20.0, "Their mean number of arrivals in a second."),
    number_option("prompt", click.IntRange(1, 2**20), 400, "Median of the tokens of their prompts."),
    number_option("generated", click.IntRange(1, 2**20), 150, "Median of their generated tokens."),
    number_option("seed", click.IntRange(min=0), 0, "Seed of their generator."),
    number_option("cache-tokens", click.IntRange(1, 2**26), 32768, "Tokens that the memory can hold."),
    number_option("step-ms", click.FloatRange(0.01, 1e6), 20.0, "Time in which each request gets a token."),
    click.option(
        "--page-size",
        "page_sizes",
        type=click.IntRange(1, 2**20),
        multiple=True,
        default=(16, 32, 64, 128, 256),
        show_default=True,
        help="Tokens of a page. Repeatable.",
    ),
)


@analysis("--requests 100 --rate 20", "--trace trace.jsonl --page-size 16", options=TRACE_OPTIONS)
def paging(
    trace_file: Path | None, cache_tokens: int, step_ms: float, page_sizes: tuple[int, ...], **synthetic: Any
) -> Sequence[Chart]:
    """Print the use of a contiguous and of paged caches, and how many requests fit.

    A contiguous cache reserves the length of the longest request for each one. Needs no GPU.
    """
    from flashtune.tuner.analysis.cache_use import cache_use, read_trace, synthetic_trace

    source = click.get_current_context().get_parameter_source
    for name in synthetic if trace_file else ():
        if source(name) is click.core.ParameterSource.COMMANDLINE:
            raise UsageError(f"--{name} is of synthetic requests, and --trace has its own: use one of them")
    trace = read_trace(trace_file) if trace_file else synthetic_trace(**synthetic)
    title = trace_file.name if trace_file else f"{len(trace):,} synthetic requests"
    return cache_use(title, trace, cache_tokens, page_sizes, step_ms / 1000)
