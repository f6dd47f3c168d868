import io
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from flashtune.core.record import Outcome, PeerTime, Provenance, Record, Resources
from flashtune.core.target import find_target
from flashtune.db.store import Store, open_store
from flashtune.tuner.cli import main
from flashtune.tuner.execution.backend import SearchWorkers
from flashtune.tuner.search.coverage import Expectation, duration, expect, outlook, usual_compile_seconds
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.progress import Display, Overview, plain, share_done
from flashtune.tuner.search.request import (
    Budget,
    Observer,
    Phase,
    Progress,
    SearchRequest,
    SearchResult,
    Stop,
    Tally,
)
from flashtune.tuner.search.summary import summary_lines
from tests.tuner.search.fakes import FAMILY, FakeCompiler, FakeMeasurer, a_problem, a_space, by_tile

SHAPE = "heads=1,seqlen=64,head_dim=16,dtype=fp16"


@pytest.fixture
def result(store: Store) -> SearchResult:
    request = SearchRequest(
        problem=a_problem(),
        target=find_target("h100"),
        device=0,
        budget=Budget(100, None, None),
        spaces=((FAMILY, a_space()),),
    )
    return run_search(request, store, equipment=SearchWorkers(FakeCompiler(), FakeMeasurer(by_tile)))


def some_progress(phase: Phase = Phase.SEARCHING, **changes: object) -> Progress:
    progress = Progress(
        problem=a_problem(),
        phase=phase,
        counts=Tally({Outcome.OK: 31, Outcome.INFEASIBLE: 12, Outcome.WRONG_RESULT: 4}, pruned=9),
        expected=100,
        best=None,
        seconds=10.0,
        remaining=30.0,
    )
    return msgspec.structs.replace(progress, **changes)


def test_summary_fits_a_screen(result: SearchResult) -> None:
    lines = summary_lines(result, "somewhere/flashtune.sqlite")
    text = "\n".join(lines)
    assert len(lines) <= 20
    assert result.best is not None
    assert result.best.ms is not None
    assert f"best           {result.best.ms:.4f} ms" in text
    assert "of 232,448 B of SRAM" in text
    assert f"sdpa-cudnn     1.0000 ms: the best is {1.0 / result.best.ms:.2f} times as fast" in text
    assert "24 of 24 candidates" in text
    assert f"somewhere/flashtune.sqlite, record {result.best_id}" in text
    assert 'flashtune explain --shape "heads=4' in text


def test_summary_is_wrapped_at_words(result: SearchResult) -> None:
    whole = summary_lines(result, "somewhere/flashtune.sqlite")
    folded = summary_lines(result, "somewhere/flashtune.sqlite", width=60)
    assert len(folded) > len(whole)
    assert "\n".join(folded).replace("\\\n", "").split() == "\n".join(whole).split()
    # A shell reads the folded command as one. Its shape is one word.
    assert [line for line in folded if len(line) > 60] == [folded[-1]]
    assert folded[-2].endswith("--shape \\")


def test_summary_contains_reasons_if_nothing_works(result: SearchResult) -> None:
    failed = msgspec.structs.replace(
        result,
        best=None,
        best_id=None,
        default=None,
        counts=Tally({Outcome.INFEASIBLE: 9, Outcome.COMPILE_ERROR: 3}, pruned=9),
        reasons=(("infeasible: needs at least # B of SRAM", 9), ("compile_error: no compiler", 3)),
        stop=Stop.EXHAUSTED,
    )
    text = "\n".join(summary_lines(failed, "here"))
    assert "none: no candidate computed this right" in text
    assert "3 x compile_error: no compiler" in text
    assert "9 more before compiling" in text
    assert 'flashtune show --records --shape "heads=4' in text


def test_predictions_are_marked(result: SearchResult) -> None:
    assert result.best is not None
    best = msgspec.structs.replace(result.best, provenance=Provenance.PREDICTED)
    predicted = msgspec.structs.replace(result, best=best, provenance=Provenance.PREDICTED)
    text = "\n".join(summary_lines(predicted, "here"))
    assert re.search(r"best .* predicted", text)
    assert "--target h100" in text
    assert "--db 'my results.sqlite'" in "\n".join(summary_lines(predicted, "here", "my results.sqlite"))


def test_a_throttled_clock_is_noted(result: SearchResult) -> None:
    assert result.best is not None
    assert result.best.measurement is not None
    measurement = msgspec.structs.replace(
        result.best.measurement, throttled=True, peers=(PeerTime("unfused", 9.0),)
    )
    best = msgspec.structs.replace(result.best, measurement=measurement)
    text = "\n".join(summary_lines(msgspec.structs.replace(result, best=best), "here"))
    assert "the clock was held down" in text


def test_plain_lines_are_printed_per_phase_and_at_intervals() -> None:
    written: list[str] = []
    overview = Overview(3)
    write = plain(written.append, overview.describe, interval=1000.0)

    def observe(progress: Progress) -> None:
        overview.add(progress)
        write(progress)

    for phase in (Phase.STARTING, Phase.SEARCHING, Phase.SEARCHING, Phase.FINALS, Phase.DONE):
        observe(some_progress(phase))
    assert len(written) == 4
    assert written[0].startswith("[1/3] ")
    assert "at most 30 s left" in written[1]
    assert "31 ok, 12 infeasible" in written[1]
    observe(some_progress(Phase.STARTING, problem=a_problem(batch=2)))
    assert written[-1].startswith("[2/3] ")


def test_a_terminal_shows_a_bar(result: SearchResult) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with Display(console, 1) as display:
        display.show(some_progress(best=result.best))
    assert "━" in screen.getvalue()
    assert "31 ok" in screen.getvalue()


def test_several_searches_have_a_line_each_and_a_common_end() -> None:
    overview = Overview(6)
    for number in range(4):
        phase = Phase.DONE if number == 0 else Phase.SEARCHING
        problem = a_problem(batch=100 + number)
        overview.add(some_progress(phase, problem=problem, worker=f"GPU {number % 3}"))
    lines = overview.lines(80)
    # Three take 30 s more, and the other two about the mean, which is 32.5 s. One took 10 s.
    assert lines[0] == "1 of 6 shapes finished, about 52 s left"
    assert [line.partition(":")[0] for line in lines[1:]] == ["GPU 0", "GPU 1", "GPU 2"]
    assert "searching  10 s,  38 tried, best no time: forward_fp16_d64_h4x4_b103" in lines[1]
    assert max(map(len, lines)) <= 80


def test_share_done_follows_the_budget() -> None:
    assert share_done(some_progress()) == pytest.approx(0.25)
    assert share_done(some_progress(remaining=None)) == 0.0
    assert share_done(some_progress(Phase.FINALS)) == 1.0


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "1 s"), (90.0, "90 s"), (150.0, "3 min"), (12600.0, "3.5 h")]
)
def test_durations_are_rounded_up(seconds: float, words: str) -> None:
    assert duration(seconds) == words


ARGUMENTS = f"search --shape {SHAPE} --target a100 --family {FAMILY} --trials 2 --jobs 2".split()


def test_dry_run_describes_the_search_and_creates_no_files(own_database: Path) -> None:
    done = CliRunner().invoke(main, [*ARGUMENTS, "--dry-run"])
    assert done.exit_code == 0, done.output
    assert f"({FAMILY} " in done.stdout
    assert "about 2 of " in done.stdout
    assert not own_database.exists()
    (expected,) = json.loads(CliRunner().invoke(main, [*ARGUMENTS, "--dry-run", "--json"]).stdout)
    assert expected["families"] == {FAMILY: expected["candidates"]}
    assert (expected["known"], expected["tried"]) == (0, 2)


@pytest.mark.slow
def test_search_command_without_gpu_and_its_verbosity() -> None:
    default = CliRunner().invoke(main, [*ARGUMENTS, "--json"])
    assert default.exit_code == 0, default.output
    assert "flashtune: about 2 of " in default.stderr
    assert "searching" in default.stderr
    (printed,) = json.loads(default.stdout)
    assert printed["best"]["provenance"] == printed["provenance"] == "predicted"
    assert printed["best"]["resources"]["sram_bytes"] >= 0
    with open_store() as store:
        (pinned,) = store.selections()
    assert pinned.id == printed["best_id"]
    silent = CliRunner().invoke(main, [*ARGUMENTS, "--trials", "3", "--quiet"])
    assert silent.stderr == ""
    assert silent.stdout.startswith("problem")
    told = CliRunner().invoke(main, [*ARGUMENTS, "--trials", "4", "--no-progress", "--verbose"])
    assert "flashtune: about 4 of " in told.stderr
    assert "searching" not in told.stderr
    # Three were known before.
    assert len([line for line in told.stderr.splitlines() if f": {FAMILY}: default" in line]) == 1


def test_interrupt_prints_the_best_so_far_and_the_resume_command(
    monkeypatch: pytest.MonkeyPatch, result: SearchResult, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    def interrupted(
        request: SearchRequest, store: Store, observer: Observer, equipment: SearchWorkers, **_: object
    ) -> None:
        observer(some_progress(problem=request.problem, best=result.best))
        raise KeyboardInterrupt

    monkeypatch.setattr("flashtune.tuner.search.executors.local.run_search", interrupted)
    done = CliRunner().invoke(main, [*ARGUMENTS, "--db", "my results.sqlite"])
    assert done.exit_code == 130, done.output
    assert result.best is not None
    assert f"best so far {result.best.ms:.4f} ms" in done.stderr
    resume = next(line for line in done.stderr.splitlines() if line.startswith("resume with: "))
    assert shlex.split(resume.removeprefix("resume with: ")) == [
        "flashtune", *ARGUMENTS, "--db", "my results.sqlite"
    ]  # fmt: skip
    assert done.stderr.endswith("flashtune: interrupted; finished results are stored\n")


# The interrupt arrives at once, while the server of processes imports modules, and while processes start.
@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_an_interrupt_of_a_whole_process_group_prints_no_traceback(delay: float) -> None:
    # A busy machine may be late with the interrupt, and the search must not end before it.
    command = [sys.executable, "-m", "flashtune.tuner.cli", *ARGUMENTS, "--trials", "900"]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = list(itertools.takewhile(lambda line: "starting" not in line, process.stderr))
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGINT)
        said = "".join([*lines, process.stderr.read()])
        # Python itself ends by the signal if that interrupted the text of an `exec`, such as a dataclass's.
        # Shells report 130 for both.
        assert process.wait() in (130, -signal.SIGINT), said
    assert "resume with: flashtune search" in said
    assert "Traceback" not in said


def test_estimates_follow_the_smaller_budget() -> None:
    def expected(trials: int | None, seconds: float | None) -> Expectation:
        request = SearchRequest(
            problem=a_problem(),
            target=find_target("h100"),
            budget=Budget(trials, seconds, None),
            spaces=((FAMILY, a_space()),),
        )
        return expect(request, None, width=2, compile_seconds=4.0)

    by_trials, by_seconds, whole = expected(10, 1000.0), expected(1000, 10.0), expected(None, None)
    assert (by_trials.tried, by_trials.seconds) == (10, 20.0)
    assert (by_seconds.tried, by_seconds.seconds) == (5, 10.0)
    assert (whole.tried, whole.seconds) == (whole.candidates, 2.0 * whole.candidates)
    assert outlook((by_trials,)) == "about 10 of 24 candidates (42%) in about 20 s"
    both = outlook((by_trials, by_seconds))
    assert both == "2 shapes: about 15 of 48 candidates (31%) in about 30 s in all"


def test_cached_compilations_are_excluded_from_the_usual_time(result: SearchResult) -> None:
    best = result.best
    assert best is not None

    def taking(*seconds: float) -> list[Record]:
        resources = (Resources(1024, compile_seconds=value) for value in seconds)
        return [msgspec.structs.replace(best, resources=resource) for resource in resources]

    assert usual_compile_seconds(taking(0.001, 0.002, 0.003, 1.0, 3.0, 2.0)) == 2.0
    assert usual_compile_seconds(()) > 0
    # This machine's come before those of the machine that made a table.
    assert usual_compile_seconds(taking(8.0), taking(1.0, 1.0)) == 8.0
    assert usual_compile_seconds(taking(0.001), taking(1.0)) == 1.0
