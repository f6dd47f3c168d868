"""Display of running searches: live lines on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self

from flashtune.core.record import Outcome
from flashtune.templates.config_text import config_text
from flashtune.tuner.search.coverage import duration
from flashtune.tuner.search.request import Observer, Phase, Progress, Tally
from flashtune.tuner.search.summary import describe_time

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

# Seconds between plain lines of one phase.
PLAIN_INTERVAL = 5.0
BAR_WIDTH = 24


def finished_lines(progress: Progress) -> Iterator[str]:
    """Yields a line for each compiled candidate that finished since the last report."""
    worker = f"{progress.worker}: " if progress.worker else ""
    for record in progress.finished:
        if record.config is None or record.kernel is None:
            continue
        time = f"{record.ms:.4f} ms" if record.ms else record.message
        yield f"{worker}{record.outcome.value}: {record.family}: {config_text(record)}: {time or 'no time'}"


class Display:
    """Shows running searches on a console, for as long as a context is open."""

    def __init__(self, console: Console, searches: int) -> None:
        self._console = console
        self._overview = Overview(searches)
        self._live: Live | None = None
        self._write = plain(
            lambda line: console.print(line, markup=False, highlight=False), self._overview.describe
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hide()

    def show(self, progress: Progress) -> None:
        """Shows the progress of a search, and of the others as they were shown last."""
        self._overview.add(progress)
        if not self._console.is_terminal:
            self._write(progress)
            return
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            # Other output of the program may go to another stream than this console, so it is not redirected.
            self._live = Live(
                console=self._console, transient=True, redirect_stdout=False, refresh_per_second=8
            )
            self._live.start()
        lines = self._overview.lines(self._console.width)
        self._live.update(Text("\n".join(lines)))

    def hide(self) -> None:
        """Removes the live lines, so that other output can follow. The next progress shows them again."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _bar(progress: Progress) -> str:
    done = round(BAR_WIDTH * share_done(progress))
    return f"{'━' * done}{'╌' * (BAR_WIDTH - done)} "


def share_done(progress: Progress) -> float:
    """Returns the finished fraction of a search, from 0 to 1, by the budget that ends first."""
    if progress.phase in (Phase.FINALS, Phase.DONE):
        return 1.0
    if progress.remaining is None:
        return 0.0
    return progress.seconds / max(progress.seconds + progress.remaining, 1e-9)


def plain(
    write: Callable[[str], None], describe: Callable[[Progress], str], interval: float = PLAIN_INTERVAL
) -> Observer:
    """Returns an observer that writes a line when a search's phase changes, and every `interval` seconds."""
    last: dict[str, tuple[Phase, float]] = {}

    def observe(progress: Progress) -> None:
        phase, before = last.get(progress.problem.key, (None, 0.0))
        now = time.monotonic()
        if progress.phase == phase and now - before < interval:
            return
        last[progress.problem.key] = progress.phase, now
        write("; ".join((describe(progress), *status_lines(progress)[:2])))

    return observe


class Overview:
    """The latest progress of running searches, the number of finished ones, and the estimated end of all."""

    def __init__(self, searches: int) -> None:
        self._searches = searches
        self._numbers: dict[str, int] = {}
        self._running: dict[str, Progress] = {}
        self._seconds: dict[str, float] = {}  # Of finished searches.

    def add(self, progress: Progress) -> None:
        """Takes the progress of a search."""
        key = progress.problem.key
        self._numbers.setdefault(key, len(self._numbers) + 1)
        self._running[key] = progress
        if progress.phase is Phase.DONE:
            self._seconds[key] = self._running.pop(key).seconds

    def lines(self, width: int) -> tuple[str, ...]:
        """Returns the lines of a terminal: details of a search alone, or a line for each that is cut off."""
        if len(self._running) == 1:
            (progress,) = self._running.values()
            return _bar(progress) + self.describe(progress), *status_lines(progress)
        running = sorted(self._running.values(), key=lambda progress: progress.worker)
        left = self._all_left()
        end = "" if left is None else f", about {duration(left)} left"
        head = f"{len(self._seconds)} of {self._searches} shapes finished{end}"
        return head, *(_short_line(progress)[:width] for progress in running)

    def describe(self, progress: Progress) -> str:
        """Returns a search's number, GPU, name, phase and times."""
        worker = f"{progress.worker}: " if progress.worker else ""
        words = f"{worker}{progress.problem.key}: {progress.phase.value}, {progress.seconds:.0f} s"
        if progress.remaining is not None and progress.phase is Phase.SEARCHING:
            words += f", at most {progress.remaining:.0f} s left"
        if self._searches == 1:
            return words
        left = self._all_left()
        end = "" if left is None else f" (all: {left:.0f} s)"
        return f"[{self._numbers[progress.problem.key]}/{self._searches}] {words}{end}"

    def _all_left(self) -> float | None:
        """Returns the remaining time of all searches, from the mean time of those that began."""
        left = [progress.remaining for progress in self._running.values() if progress.remaining is not None]
        if not left or len(left) < len(self._running):
            return None
        taken = [progress.seconds for progress in self._running.values()]
        each = (sum(self._seconds.values()) + sum(taken) + sum(left)) / len(self._numbers)
        waiting = each * (self._searches - len(self._numbers))
        return max(*left, (sum(left) + waiting) / len(left))


def _short_line(progress: Progress) -> str:
    """Returns a line of one of several searches, with its name at the end."""
    best = f"{progress.best.ms:.4f} ms" if progress.best and progress.best.ms else "no time"
    return (
        f"{progress.worker}: {progress.phase.value:<9} {progress.seconds:3.0f} s, "
        f"{progress.counts.tried:3} tried, best {best}: {progress.problem.key}"
    )


def status_lines(progress: Progress) -> tuple[str, ...]:
    """Returns a line with the counts, and lines with the time and the config of the best kernel."""
    best = progress.best
    limit = f" of {progress.expected}" if progress.expected else ""
    tried = f"{progress.counts.tried}{limit} tried: {counts(progress.counts)}"
    if best is None or best.config is None:
        return (tried,)
    return (
        tried,
        f"best {describe_time(best)}, {best.family}",
        config_text(best),
    )


def counts(tally: Tally) -> str:
    """Formats counts as `31 ok, 4 wrong_result, 12 infeasible (9 pruned by the model)`."""
    present = (outcome for outcome in Outcome if tally.outcomes.get(outcome))
    parts = [f"{tally.outcomes[outcome]} {outcome.value}" for outcome in present]
    pruned = f" ({tally.pruned} pruned by the model)" if tally.pruned else ""
    return (", ".join(parts) + pruned) if parts else "nothing finished yet"
