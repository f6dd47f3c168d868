"""Repeated searches of one problem, each from an empty database, and the cost of their different picks."""

import tempfile
from pathlib import Path

import msgspec

from flashtune.db.store import open_store
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.execution.backend import SearchWorkers
from flashtune.tuner.search.driver import run_search, search_scope
from flashtune.tuner.search.request import Observer, SearchRequest
from flashtune.tuner.search.selection import candidate_of


class Pick(msgspec.Struct, frozen=True):
    """The kernel that one search selected."""

    seconds: float  # Wall-clock time of the search.
    tried: int  # Number of candidates.
    candidate: Candidate | None  # None if no candidate works.
    ms: float | None  # Its time in the common run; None without one.
    cost: float | None  # The fraction by which that time exceeds the fastest pick's.


class Repeats(msgspec.Struct, frozen=True):
    """The picks of repeated searches of one problem."""

    problem: str  # The problem's key.
    picks: tuple[Pick, ...]

    @property
    def differing(self) -> int:
        """Returns the number of picks that differ from the first."""
        return sum(pick.candidate != self.picks[0].candidate for pick in self.picks)


def repeat_search(
    request: SearchRequest, times: int, observer: Observer, equipment: SearchWorkers
) -> Repeats:
    """Searches a problem several times, and times the different picks interleaved in one run.

    Each search has a database of its own, with no record. Triton's cache has the kernels of earlier searches.
    """
    results = []
    for _ in range(times):
        with (
            tempfile.TemporaryDirectory() as folder,
            open_store(str(Path(folder, "records.sqlite"))) as store,
        ):
            results.append(run_search(request, store, observer, equipment))
    picks = [candidate_of(result.best) if result.best else None for result in results]
    different = tuple(dict.fromkeys(pick for pick in picks if pick is not None))
    job = equipment.measurer.finals(search_scope(request), different, request.budget.closest_seconds)
    equipment.clock.wait_for_all((job,))
    times_ms = {pick: timed.ms for pick, timed in zip(different, job.result(), strict=False)}
    fastest = min(times_ms.values(), default=0.0)
    return Repeats(
        request.problem.key,
        tuple(
            Pick(
                result.seconds,
                result.counts.tried,
                pick,
                ms := times_ms.get(pick) if pick else None,
                None if ms is None else ms / fastest - 1,
            )
            for result, pick in zip(results, picks, strict=True)
        ),
    )


def repeat_lines(repeats: tuple[Repeats, ...]) -> tuple[str, ...]:
    """Returns a line for each search, and one for all of them."""
    lines = []
    for entry in repeats:
        different = list(dict.fromkeys(pick.candidate for pick in entry.picks))
        for pick in entry.picks:
            number = different.index(pick.candidate) + 1
            name = f"{pick.candidate.family} {number}" if pick.candidate else "no kernel"
            timed = "" if pick.ms is None else f", {pick.ms:.4f} ms, {pick.cost:+.2%}"
            lines.append(f"{entry.problem}: {pick.seconds:.0f} s, {pick.tried} tried, {name}{timed}")
    later = sum(len(entry.picks) - 1 for entry in repeats)
    costs = [pick.cost for entry in repeats for pick in entry.picks if pick.cost is not None]
    worst = f"; the slowest pick costs {max(costs):.2%}" if costs else ""
    differing = sum(entry.differing for entry in repeats)
    return (*lines, f"{differing} of {later} repeated searches selected another config than the first{worst}")
