"""`flashtune bench`: selected kernels side by side with other implementations."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashtune.errors import FlashtuneError, VerificationError
from flashtune.tuner.cli.options import database_option, json_option, problem_options
from flashtune.tuner.cli.output import console, note, print_json

if TYPE_CHECKING:
    from flashtune.problem import Problem
    from flashtune.tuner.bench import Bench


@click.command("bench")
@problem_options
@click.option(
    "--device",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="INDEX",
    help="Which GPU to use.",
)
@click.option(
    "--peers/--no-peers",
    default=True,
    show_default=True,
    help="Time SDPA's backends and the standard computation too.",
)
@click.option(
    "--rounds",
    type=click.IntRange(3, 1000),
    default=21,
    show_default=True,
    help="Samples of each contestant.",
)
@click.option(
    "--markdown",
    "markdown_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the tables there as well, with versions and this command line.",
)
@database_option
@json_option
def command(
    problems: tuple[Problem, ...],
    device: int,
    peers: bool,
    rounds: int,
    markdown_file: Path | None,
    db: str | None,
    as_json: bool,
) -> None:
    """Time the selected kernel of a shape, SDPA's backends and the standard computation in one run.

    GPU time is that of CUDA-graph replays with a cold L2, contestants in turn; host time stands
    apart. The kernel is always a generated one. Whoever's output differs from the float64 reference
    is left out, and the exit code is 1 if that is the kernel.
    """
    from flashtune.tuner.bench import OURS, run_bench
    from flashtune.tuner.cli.bench_report import bench_table, notes

    if db is not None:
        # What is timed is what a program gets, and programs name their database so.
        os.environ["FLASHTUNE_DB"] = db
    benches: list[Bench] = []
    for problem in problems:
        bench = run_bench(problem, device, peers=peers, rounds=rounds)
        benches.append(bench)
        if not as_json:
            console().print(bench_table(bench))
            for sentence in notes(bench):
                note(sentence)
    if as_json:
        print_json(benches)
    if markdown_file is not None:
        _write(markdown_file, benches)
    wrong = [bench.problem.key for bench in benches if any(left.name == OURS for left in bench.left_out)]
    if wrong:
        raise VerificationError(
            f"the selected kernel of {', '.join(wrong)} is wrong here: run flashtune verify"
        )


def _write(path: Path, benches: list[Bench]) -> None:
    from flashtune.tuner.cli.bench_report import markdown

    try:
        path.write_text(markdown(benches, shlex.join(["flashtune", *sys.argv[1:]])), encoding="utf-8")
    except OSError as error:
        raise FlashtuneError(f"cannot write {path}: {error.strerror}; name another file") from error
