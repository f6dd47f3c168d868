"""`flashtune report`: stored kernels and searches as pages for a browser."""

from __future__ import annotations

import contextlib
import functools
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashtune.core.errors import UsageError
from flashtune.tuner.cli.command import flashtune_command
from flashtune.tuner.cli.options import (
    database_option,
    file_option,
    optional_problem_options,
    target_filter_option,
)
from flashtune.tuner.cli.output import note

if TYPE_CHECKING:
    from flashtune.core.problem import Problem


@flashtune_command(
    "report",
    "flashtune report --out report",
    "flashtune report --shipped --target h200 --out report --serve",
    "flashtune report --study sqlite:///study.db",
)
@optional_problem_options
@target_filter_option
@click.option("--shipped", is_flag=True, help="The tables that ship with flashtune, instead of the database.")
@file_option("table", "A tuned table, instead of the database.", "table", exists=True)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the pages into this folder. index.html is the first one.",
)
@click.option("--serve", is_flag=True, help="Also serve the pages to browsers of this machine, until Ctrl-C.")
@click.option(
    "--study",
    metavar="URL",
    help="Write each search as an Optuna study into a new storage, such as sqlite:///study.db. "
    "optuna-dashboard opens it.",
)
@click.option("--refresh", type=click.IntRange(min=1), hidden=True, help="Seconds between loads of a page.")
@database_option
def command(
    problems: tuple[Problem, ...],
    target_name: str | None,
    shipped: bool,
    table: Path | None,
    out: Path | None,
    serve: bool,
    study: str | None,
    refresh: int | None,
    db: str | None,
) -> None:
    """Write stored kernels and searches as pages for a browser, or as Optuna studies.

    The leaderboard lists all shapes with times, speeds, and shares of the roofline and of other
    implementations. The page of a shape has the times, SRAM map and evidence of its kernels, and the plots of
    its search. The page of a model has its memory, traffic and roofline over sequence length.

    The pages need neither a server nor a network. Their plots need plotly.
    """
    from flashtune.tuner.cli.html_report.stored_shapes import read_source
    from flashtune.tuner.cli.report.chart_report import require_plotly

    if out is None and (serve or study is None):
        raise UsageError("a report needs a folder: pass --out DIR, or --study URL alone for Optuna studies")
    if out is not None:
        require_plotly("--out")
    source = read_source(db, table, shipped, target_name, problems)
    if not source.shapes and refresh is None:
        raise UsageError(f"{source.place} has no such record: run flashtune search, or pass --shipped")
    if study is not None:
        from flashtune.tuner.cli.html_report.study import write_studies

        note(f"wrote {write_studies(source.shapes, study)} searches: optuna-dashboard opens them")
    if out is None:
        return
    from flashtune.tuner.cli.html_report.write_report import write_report

    note(f"wrote {write_report(source, out, db, refresh)}")
    if serve:
        handler = functools.partial(SimpleHTTPRequestHandler, directory=str(out))
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            note(f"serving http://127.0.0.1:{server.server_port}/ until Ctrl-C")
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever()
