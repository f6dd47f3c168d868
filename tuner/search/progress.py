"""Display of a running search: live lines on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from flashtune.core.record import Outcome
from flashtune.templates.config_text import config_text
from flashtune.tuner.search.request import Observer, Phase, Progress, Tally
from flashtune.tuner.search.summary import describe_time

if TYPE_CHECKING:
    from rich.console import Console

# Seconds between plain lines of one phase.
PLAIN_INTERVAL = 5.0
BAR_WIDTH = 24


def finished_lines(progress: Progress) -> Iterator[str]:
    """Yields a line for each compiled candidate that finished since the last report."""
    for record in progress.finished:
        if record.config is None or record.kernel is None:
            continue
        time = f"{record.ms:.4f} ms" if record.ms else record.message
        yield f"{record.outcome.value}: {record.family}: {config_text(record)}: {time or 'no time'}"


@contextlib.contextmanager
def shown(console: Console, position: Place) -> Iterator[Observer]:
    """Gives an observer that shows one search on a console while the context is open."""
    if console.is_terminal:
        with _live(console, position) as observer:
            yield observer
    else:
        yield plain(lambda line: console.print(line, markup=False, highlight=False), position)


@contextlib.contextmanager
def _live(console: Console, position: Place) -> Iterator[Observer]:
    """Shows a line with a bar and the remaining time, and below it the best kernel and the counts."""
    from rich.live import Live
    from rich.text import Text

    # Other output of the program may go to another stream than this console, so it is not redirected.
    with Live(console=console, transient=True, redirect_stdout=False, refresh_per_second=8) as live:

        def observe(progress: Progress) -> None:
            live.update(Text("\n".join((_bar(progress) + position.of(progress), *status_lines(progress)))))

        yield observe


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


def plain(write: Callable[[str], None], position: Place, interval: float = PLAIN_INTERVAL) -> Observer:
    """Returns an observer that writes a line when the phase changes, and every `interval` seconds."""
    last_phase: tuple[str, Phase] | None = None
    last_time = 0.0

    def observe(progress: Progress) -> None:
        nonlocal last_phase, last_time
        phase, now = (progress.problem.key, progress.phase), time.monotonic()
        if phase == last_phase and now - last_time < interval:
            return
        last_phase, last_time = phase, now
        write("; ".join((position.of(progress), *status_lines(progress)[:2])))

    return observe


class Place:
    """The number of the running search, and the estimated end of all searches."""

    def __init__(self, searches: int) -> None:
        self._searches = searches
        self._keys: list[str] = []
        self._started = time.monotonic()

    def of(self, progress: Progress) -> str:
        """Returns a search's number, name, phase and times."""
        if progress.problem.key not in self._keys:
            self._keys.append(progress.problem.key)
        number = len(self._keys)
        words = f"{progress.problem.key}: {progress.phase.value}, {progress.seconds:.0f} s"
        if progress.remaining is not None and progress.phase is Phase.SEARCHING:
            words += f", at most {progress.remaining:.0f} s left"
        if self._searches == 1:
            return words
        return f"[{number}/{self._searches}] {words}{self._all_left(number, progress)}"

    def _all_left(self, number: int, progress: Progress) -> str:
        """Returns the remaining time of all searches, from the mean time of the searches so far."""
        if progress.remaining is None:
            return ""
        before = time.monotonic() - self._started - progress.seconds
        this = progress.seconds + progress.remaining
        each = (before + this) / number
        return f" (all: {progress.remaining + each * (self._searches - number):.0f} s)"


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
