"""`flashtune search`: finds the fastest correct kernel of each shape."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashtune.core.errors import KernelError, UsageError
from flashtune.tuner.cli.command import flashtune_command
from flashtune.tuner.cli.options import (
    database_option,
    family_option,
    file_option,
    jobs_option,
    json_option,
    problem_options,
    quiet_options,
    targets_options,
)
from flashtune.tuner.cli.output import (
    command_line,
    is_set,
    line_width,
    note,
    print_json,
    say,
    shows_progress,
)
from flashtune.tuner.workloads.model_sizes import Phase

if TYPE_CHECKING:
    from rich.console import Console

    from flashtune.core.problem import Problem
    from flashtune.core.target import Target
    from flashtune.db.store import Store
    from flashtune.tuner.search.coverage import Expectation
    from flashtune.tuner.search.executors.executor import Executor
    from flashtune.tuner.search.progress import Display
    from flashtune.tuner.search.request import Observer, Progress, SearchRequest, SearchResult

DEFAULT_TOP = 20
EFFORTS = ("quick", "default", "thorough")


def with_workers_ahead(command: Callable[..., None]) -> Callable[..., None]:
    """Starts the server of worker processes before the other options are read, which takes seconds."""

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:
        if not (arguments["dry_run"] or arguments["enqueue"] or arguments["ray_address"]):
            from flashtune.tuner.execution.processes import start_server

            start_server()
        command(**arguments)

    return wrapped


@flashtune_command(
    "search",
    'flashtune search --shape "heads=32,kv_heads=8,seqlen=4096,head_dim=128,causal"',
    "flashtune search --model llama-3.1-8b --seqlen 512..8192 --dry-run",
    "flashtune search --target h100 --model llama-3.1-8b --seconds 30",
    "flashtune search --from calls.jsonl --top 10",
    "flashtune search --db postgresql+psycopg://me@host/tuning --target h100 --model llama-3.1-8b --enqueue",
)
@with_workers_ahead
@problem_options(recorded_file="--from")
@file_option(
    "from",
    "Search the shapes of a program, from a file that flashtune.record_calls or FLASHTUNE_RECORD wrote. "
    "Shapes with the largest total time come first.",
    "recorded_file",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Number of shapes of --from. Default: {DEFAULT_TOP}.",
)
@targets_options
@click.option(
    "--effort",
    type=click.Choice(EFFORTS),
    default="default",
    show_default=True,
    help="How long to look for a faster kernel. quick and default stop if none is expected to be faster by "
    "more than about the noise of timing, thorough after many candidates without one.",
)
@click.option(
    "--trials",
    type=click.IntRange(min=1),
    metavar="N",
    help="Stop after N compiled candidates of a shape, including earlier searches.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Stop proposing after S seconds per shape. The final measurement takes a few more.",
)
@family_option("families", multiple=True, help="Search only this kernel family. Repeatable.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    metavar="N",
    default=0,
    show_default=True,
    help="Seed of the sampler.",
)
@jobs_option
@click.option(
    "--retry-failed",
    is_flag=True,
    help="Try failed candidates of earlier searches again, except those that do not fit the GPU.",
)
@click.option(
    "--repeat",
    type=click.IntRange(min=2),
    metavar="N",
    help="Search each shape N times from an empty database, and print how many picks differ and what each "
    "costs in one common run. Nothing is stored. Uses one GPU.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the planned searches and their approximate duration, then exit.",
)
@click.option(
    "--ray",
    "ray_address",
    metavar="ADDRESS",
    help="Search on the free GPUs of a Ray cluster, of the model of --target or of this machine, and compile "
    "on all of its nodes. auto: the cluster of this machine. local: start one here.",
)
@click.option(
    "--enqueue",
    is_flag=True,
    help="Queue the shapes in a PostgreSQL database for workers with this GPU, then exit. flashtune "
    "worker searches them.",
)
@click.option(
    "--wait",
    is_flag=True,
    help="With --enqueue, search on the GPUs of this host too, unless --target is given, and wait for all "
    "results.",
)
@click.option(
    "--priority",
    type=click.IntRange(-1000, 1000),
    default=0,
    show_default=True,
    help="Jobs of --enqueue with a larger number run first.",
)
@click.option(
    "--predicted",
    is_flag=True,
    help="With --enqueue, rehearse: workers without a GPU predict the times.",
)
@click.option(
    "--report",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write a report into this folder during the search, as flashtune report does. Its pages reload "
    "themselves. Needs plotly.",
)
@quiet_options
@database_option
@json_option
def command(
    problems: tuple[Problem, ...],
    recorded_file: Path | None,
    top: int | None,
    target: Target,
    devices: tuple[int, ...],
    effort: str,
    trials: int | None,
    seconds: float | None,
    families: tuple[str, ...],
    seed: int,
    jobs: int | None,
    retry_failed: bool,
    repeat: int | None,
    dry_run: bool,
    ray_address: str | None,
    enqueue: bool,
    wait: bool,
    priority: int,
    predicted: bool,
    report: Path | None,
    db: str | None,
    as_json: bool,
) -> None:
    """Find the fastest correct kernel for shapes; without a GPU, rank candidates.

    Each candidate is checked against the SRAM model, compiled, verified against a float64 reference,
    measured and stored. The best ones are then timed again, interleaved with SDPA's backends, and one is
    selected. With --target, kernels are compiled for that GPU and their times are predicted.

    With an H200 and 16 cores, a forward pass takes about 17 s with --effort quick, 35 s by default and 70 s
    with thorough. A gradient takes up to 31 s with quick. With --devices, each GPU searches one shape at a
    time, and all times of a shape come from one GPU. --trials or --seconds replaces the limits;
    with both, the first one reached ends the search. Ctrl-C prints the best result so far and the command
    that resumes the search.
    """
    from flashtune.tuner.search.request import Effort, SearchRequest, budget_of
    from flashtune.tuner.workloads.models import saving_lse, training_passes

    if ray_address is not None:
        _refuse_with_ray(db)
    if enqueue and repeat is not None:
        raise UsageError("--enqueue and --repeat exclude each other: use one of them")
    if (wait or predicted or priority) and not enqueue:
        raise UsageError("--wait, --predicted and --priority need --enqueue: add it")
    if wait and priority:
        raise UsageError("--priority and --wait exclude each other: use one of them")
    problems = _with_recorded(problems, recorded_file, top, target)
    if click.get_current_context().params["phase"] == Phase.TRAINING:
        # Recorded calls contain only the forward pass.
        problems = training_passes(problems)
    trained = saving_lse(problems)
    # Further GPUs would have no work.
    devices = () if predicted else devices[: len(problems)]
    requests = tuple(
        SearchRequest(
            problem=problem,
            target=target,
            # Jobs are for workers with a GPU.
            device=next(iter(devices), None if predicted or not enqueue else 0),
            budget=budget_of(Effort(effort), trials, seconds),
            families=families,
            seed=seed,
            jobs=jobs,
            retry_failed=retry_failed,
            lse=problem in trained,
        )
        for problem in problems
    )
    if dry_run:
        print_expected(expected_of(requests, devices, db), as_json, len(devices))
        return
    if enqueue and not wait:
        from flashtune.tuner.cli.commands.queue import enqueue_jobs

        enqueue_jobs(requests, priority, db, as_json=as_json)
        return
    if repeat is not None:
        _repeat(requests, repeat, as_json)
        return
    results = _search(requests, devices, db, as_json, report, enqueue=enqueue, ray_address=ray_address)
    if as_json:
        print_json(results)
    _refuse_failures(results)


def _refuse_with_ray(db: str | None) -> None:
    """Raises if an option of the running command cannot be used with --ray."""
    from flashtune.db.location import without_password

    given = click.get_current_context().params
    for name in ("device", "devices", "dry_run", "enqueue", "repeat"):
        if given[name] is not None and given[name] is not False:
            raise UsageError(f"--ray and --{name.replace('_', '-')} exclude each other: use one of them")
    if db is not None and ("***" in without_password(db) or "pass" in db.partition("?")[2].lower()):
        raise UsageError(
            "Ray shows the command lines of its programs, and --db has a password: set FLASHTUNE_DB instead, "
            "or write the password into ~/.pgpass"
        )


def _repeat(requests: tuple[SearchRequest, ...], times: int, as_json: bool) -> None:
    """Searches each shape several times, and prints the picks."""
    from rich.console import Console

    from flashtune.tuner.execution.backend import open_workers
    from flashtune.tuner.search.progress import Display
    from flashtune.tuner.search.repeat import repeat_lines, repeat_search

    console = Console(stderr=True)
    with (
        open_workers(requests[0].device, requests[0].jobs) as equipment,
        Display(console, len(requests)) as display,
    ):
        observer = observed(console, display, {})
        repeats = tuple(repeat_search(request, times, observer, equipment) for request in requests)
    if as_json:
        print_json(repeats)
    else:
        click.echo("\n".join(repeat_lines(repeats)))


def _search(
    requests: tuple[SearchRequest, ...],
    devices: tuple[int, ...],
    db: str | None,
    as_json: bool,
    report: Path | None,
    *,
    enqueue: bool,
    ray_address: str | None,
) -> list[SearchResult]:
    """Runs all searches, prints each summary when it is available, and returns the results in order.

    Raises:
        KeyboardInterrupt: Raised again, after printing the best kernel so far and the command that resumes.
    """
    from rich.console import Console

    from flashtune.db.location import database_url, describe
    from flashtune.db.queue import Queue
    from flashtune.db.store import open_store
    from flashtune.tuner.cli.html_report.live_report import live_report
    from flashtune.tuner.cli.report.chart_report import require_plotly
    from flashtune.tuner.search.coverage import outlook
    from flashtune.tuner.search.executors.executor import longest_first
    from flashtune.tuner.search.progress import Display
    from flashtune.tuner.search.summary import summary_lines

    if report is not None:
        require_plotly("--report")
    # The GPUs and cores of a cluster are not known yet.
    if ray_address is None and not is_set("quiet"):
        note(outlook(expected_of(requests, devices, db), len(devices)))
    target, url = requests[0].target.name, database_url(db)
    database, width = describe(url), line_width()
    ordered = requests if len(devices) == 1 else longest_first(requests)
    results: dict[str, SearchResult] = {}
    latest: dict[str, Progress] = {}
    console = Console(stderr=True)
    with (
        Queue(db) if enqueue else open_store(db) as store,
        live_report(report, target, url) if report else contextlib.nullcontext(lambda: None) as renew,
        _executor(store, requests, devices, ray_address) as executor,
    ):
        try:
            with (
                Display(console, len(requests)) as display,
                contextlib.closing(executor.run(ordered, observed(console, display, latest, renew))) as run,
            ):
                for result in run:
                    results[result.problem.key] = result
                    if not as_json:
                        display.hide()
                        click.echo("\n".join(summary_lines(result, database, db, width)))
        except KeyboardInterrupt:
            # Before the processes end, which takes seconds.
            print_interrupted(latest.values())
            raise
    return [results[request.problem.key] for request in requests]


def _executor(
    store: Store, requests: tuple[SearchRequest, ...], devices: tuple[int, ...], ray_address: str | None
) -> contextlib.AbstractContextManager[Executor]:
    """Returns the executor of the searches. Its processes start and end with the context."""
    from flashtune.core.machine import use_own_triton_folder
    from flashtune.db.queue import Queue
    from flashtune.tuner.fleet.executor import open_queue
    from flashtune.tuner.fleet.ray_cluster import open_ray
    from flashtune.tuner.search.executors.local import open_local

    jobs = requests[0].jobs
    if ray_address is not None:
        return open_ray(store, ray_address, requests[0].target, jobs)
    if isinstance(store, Queue):
        use_own_triton_folder()
        return open_queue(store, devices, jobs)
    return open_local(store, devices, jobs)


def _with_recorded(
    problems: tuple[Problem, ...], path: Path | None, top: int | None, target: Target
) -> tuple[Problem, ...]:
    """Returns the named problems, and those of a file of recorded calls that take most time."""
    if path is None:
        if top is not None:
            raise UsageError("--top says how many recorded problems to search: name their file with --from")
        return problems
    from flashtune.tuner.analysis.recorded import read_weighted, summary

    recorded = read_weighted(path, target)
    # torch served the calls that no family computes.
    weighted = tuple(entry for entry in recorded if _is_computed(entry.problem, target))
    if not weighted:
        raise UsageError(
            f"no kernel family computes any problem of {path} on {target.name}: record other calls"
        )
    if len(weighted) < len(recorded):
        note(
            f"{len(recorded) - len(weighted)} recorded problems are left out: no kernel family computes them"
        )
    top = top or DEFAULT_TOP
    note(summary(weighted, top))
    return tuple(dict.fromkeys((*problems, *(entry.problem for entry in weighted[:top]))))


def _is_computed(problem: Problem, target: Target) -> bool:
    """Returns whether some family computes a problem for the best alignment."""
    from flashtune.core.kernel import Specialization
    from flashtune.templates.family import unsupported_reason
    from flashtune.templates.registry import families

    return any(unsupported_reason(family, problem, target, Specialization()) is None for family in families())


def _refuse_failures(results: list[SearchResult]) -> None:
    """Exits with code 1 if a shape has no kernel."""
    failed = [result.problem.key for result in results if result.best is None]
    if failed:
        raise KernelError(
            f"no candidate of {', '.join(failed)} worked: flashtune show --records lists why, "
            "flashtune doctor checks this machine, and --retry-failed tries again"
        )


def observed(
    console: Console,
    display: Display,
    latest: dict[str, Progress],
    renew: Callable[[], None] = lambda: None,
) -> Observer:
    """Returns an observer that stores the latest progress of running searches, and shows it."""
    from flashtune.tuner.search.progress import finished_lines
    from flashtune.tuner.search.request import Phase as SearchPhase

    def observe(progress: Progress) -> None:
        latest[progress.problem.key] = progress
        if progress.phase is SearchPhase.DONE:
            del latest[progress.problem.key]
        renew()
        if is_set("verbose"):
            for line in finished_lines(progress):
                console.print(line, markup=False, highlight=False)
        if shows_progress():
            display.show(progress)

    return observe


def print_interrupted(latest: Iterable[Progress]) -> None:
    """Prints the best kernel of each interrupted search, and the command that resumes them."""
    from flashtune.core.notices import folded_command
    from flashtune.templates.config_text import config_text
    from flashtune.tuner.search.summary import describe_time

    for progress in latest:
        best = progress.best
        result = "nothing right was found yet"
        if best is not None and best.config is not None:
            result = f"best so far {describe_time(best)}, {best.family}: {config_text(best)}"
        say(f"{progress.problem.key}: {result}", indent="  ", err=True)
    click.echo(f"resume with: {folded_command(command_line(), line_width(err=True))}", err=True)


def expected_of(
    requests: tuple[SearchRequest, ...], devices: tuple[int, ...], db: str | None
) -> tuple[Expectation, ...]:
    """Returns the estimate of each search without creating a database."""
    from flashtune.tuner.execution.backend import compilers_of
    from flashtune.tuner.search.coverage import expect, usual_compile_seconds
    from flashtune.tuner.tables.lookup import database_selections, existing_store, shipped_selections

    # This machine's compile times are a better estimate than those in the shipped tables.
    compile_seconds = usual_compile_seconds(
        [entry.record for entry in database_selections(db)], [entry.record for entry in shipped_selections()]
    )
    at_once = max(1, min(len(devices), len(requests)))
    width = max(1, compilers_of(devices, requests[0].jobs) // at_once)
    with existing_store(db) as store:
        return tuple(expect(request, store, width, compile_seconds) for request in requests)


def print_expected(expected: tuple[Expectation, ...], as_json: bool, gpus: int) -> None:
    """Prints a line for each search of a dry run, and their sum."""
    from flashtune.tuner.search.coverage import duration, outlook

    if as_json:
        print_json(expected)
        return
    for expectation in expected:
        spaces = ", ".join(f"{name} {count:,}" for name, count in expectation.families.items())
        say(
            f"{expectation.problem} on {expectation.target}: {expectation.candidates:,} candidates "
            f"({spaces}), {expectation.known:,} known from before, about {expectation.tried:,} in about "
            f"{duration(expectation.seconds)}"
        )
    say(outlook(expected, gpus))
