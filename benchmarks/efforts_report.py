"""Tables and pictures of searches of each effort, from the file of `benchmarks.search_efforts all`.

`python -m benchmarks.documents --write` puts them into docs/search.md.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from benchmarks import charts
from benchmarks.charts import Axis, Panel, Style
from benchmarks.saved import RESULTS, Saved, load, run_of
from benchmarks.search_efforts import Efforts, Searched, shares
from flashtune.tuner.cli.output import table
from flashtune.tuner.search.request import Effort

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SCRIPT = "benchmarks/efforts_report.py"
SAVED = RESULTS / "nvidia-h200-efforts.json.gz"
COLORS = {Effort.QUICK: "#e69f00", Effort.DEFAULT: "#d55e00", Effort.THOROUGH: "#0072b2"}
# Jobs of workers, by their names in the picture.
WORK = {
    "compilers": (Style("compilers", "#5b6475"), ("compile",)),
    "candidates": (Style("GPU: candidates", "#d55e00", 2.0), ("evaluate",)),
    "finals": (Style("GPU: finals", "#0072b2", 2.0), ("finals",)),
    "last": (Style("GPU: last verification", "#009e73", 2.0), ("evaluate_delayed", "machine_code")),
}
LOWEST = 0.6


def results() -> Saved[Efforts]:
    """Returns the saved results."""
    return load(SAVED, Efforts)


def texts(saved: Saved[Efforts] | None = None) -> dict[str, str]:
    """Returns the tables by name."""
    saved = saved or results()
    return {
        "efforts": "\n".join(_efforts(saved)),
        "search-parts": "\n".join(_parts(saved.rows)),
    }


def pictures(saved: Saved[Efforts] | None = None) -> "dict[str, Figure]":
    """Returns the figures by name."""
    searches = (saved or results()).rows.searches
    return {"search-efforts": _curves(searches), "search-work": _work(searches)}


def _efforts(saved: Saved[Efforts]) -> Iterator[str]:
    searches = saved.rows.searches
    more = f", {saved.rows.cores} cores for each GPU"
    yield f"{run_of(saved.source, more)}, new processes with empty caches:"
    yield ""
    rows = []
    for effort in Effort:
        own = [row for row in searches if row.effort is effort and row.alone and not row.cold]
        over = shares(searches, effort)
        if own:
            seconds = [row.seconds for row in own]
            first = statistics.median(row.first_seconds or math.nan for row in own)
            mean = f"{math.exp(statistics.mean(map(math.log, over))):.3f} ({len(over)})" if over else "–"
            rows.append(
                (
                    effort.value,
                    str(len(own)),
                    f"{statistics.median(seconds):.1f}",
                    f"{max(seconds):.1f}",
                    f"{first:.1f}",
                    f"{statistics.median(row.tried for row in own):.0f}",
                    *(f"{statistics.median(busy_share(row, of) for row in own):.0%}" for of in (False, True)),
                    mean,
                    f"{min(over):.3f}" if over else "–",
                )
            )
    heads = (
        "effort", "searches", "seconds, median", "longest", "first result after", "candidates, median",
        "GPU process busy", "compilers busy",
        "speed over thorough, mean (shapes)", "worst",
    )  # fmt: skip
    yield from table(heads, rows)
    later = [row.first_seconds for row in searches if not row.alone and row.first_seconds]
    if later:
        yield ""
        yield (
            f"Later shapes of a command have their first result after {statistics.median(later):.1f} s "
            f"(median of {len(later)}, at most {max(later):.1f} s)."
        )


def _parts(efforts: Efforts) -> Iterator[str]:
    """A row for each part of evaluating a candidate, in ms."""
    names = dict.fromkeys(name for parts in efforts.parts for name in parts.seconds)
    heads = ("ms", *(f"`{parts.problem}`" for parts in efforts.parts))
    rows = (
        (name, *(f"{1e3 * parts.seconds.get(name, math.nan):.0f}" for parts in efforts.parts))
        for name in names
    )
    yield from table(heads, rows)


def _shown(searches: Sequence[Searched]) -> list[str]:
    """Returns four problems: first those with a search from a cold start, then those with all efforts."""
    efforts = list(Effort)
    ordered = sorted(searches, key=lambda row: (not row.cold, -efforts.index(row.effort)))
    return list(dict.fromkeys(row.problem for row in ordered))[:4]


def _curves(searches: Sequence[Searched]) -> "Figure":
    """Best time so far against seconds, as speed over the best of all searches of the shape."""
    panels, styles = [], {}
    for problem in _shown(searches):
        own = [row for row in searches if row.problem == problem and row.turn == 1 and row.best and row.alone]
        fastest = min(ms for row in own for _, ms in row.best)
        longest = max(row.seconds for row in own)
        lines = []
        for row in own:
            name = f"{row.effort.value}{', cold' if row.cold else ''}"
            style = Style(name, COLORS[row.effort], 1.4, "dash" if row.cold else "solid")
            styles[row.cold, [*Effort].index(row.effort)] = style
            # The best so far stays until the next improvement, and until the end.
            steps = [(seconds, fastest / ms) for seconds, ms in row.best]
            points = [steps[0]]
            for step in steps[1:]:
                points += [(step[0], points[-1][1]), step]
            lines.append((style, [*points, (row.seconds, points[-1][1])]))
        up = Axis(LOWEST, 1.02, tuple((share, f"{share:g}") for share in (0.6, 0.7, 0.8, 0.9, 1.0)))
        panels.append(Panel(own[0].shape, _seconds(longest), up, tuple(lines)))
    legend = [styles[key] for key in sorted(styles)]
    return charts.picture("Speed of the best so far over the best of all, against seconds", legend, panels)


def _seconds(longest: float) -> Axis:
    step = 10 if longest > 30 else 5
    return Axis(0, longest, tuple((at, f"{at} s") for at in range(0, int(longest) + 1, step)))


def _work(searches: Sequence[Searched]) -> "Figure":
    """Share of each second in which workers are busy, for default searches in new processes."""
    panels = []
    for problem in _shown(searches):
        row = next(
            (
                row
                for row in searches
                if (row.problem, row.effort, row.turn, row.cold, row.alone)
                == (problem, Effort.DEFAULT, 1, False, True)
            ),
            None,
        )
        if row is None:
            continue
        width = _compilers(row)
        lines = tuple(
            (style, busy(row, names, width if "compile" in names else 1)) for style, names in WORK.values()
        )
        # The title is below zero.
        up = Axis(-0.2, 1.02, tuple((share, f"{share:.0%}") for share in (0.0, 0.5, 1.0)))
        panels.append(Panel(row.shape, _seconds(row.seconds), up, lines))
    styles = [style for style, _ in WORK.values()]
    return charts.picture("Busy share of each second of a default search", styles, panels)


def busy(row: Searched, names: Sequence[str], workers: int) -> list[tuple[float, float]]:
    """Returns the share of each second in which workers have jobs of some names, at the second's middle."""
    points = []
    for second in range(math.ceil(row.seconds)):
        inside = (
            max(0.0, min(end, second + 1) - max(begin, second))
            for name, begin, end in row.spans
            if name in names
        )
        points.append((second + 0.5, min(1.0, sum(inside) / workers)))
    return points


def busy_share(row: Searched, compilers: bool) -> float:
    """Returns the share of a search in which the GPU process, or each of the compilers, has a job."""
    seconds = sum(end - begin for name, begin, end in row.spans if (name == "compile") == compilers)
    return seconds / row.seconds / (_compilers(row) if compilers else 1)


def _compilers(row: Searched) -> int:
    """Returns the largest number of compilations at one time, at least 1."""
    return max(_together([span for span in row.spans if span[0] == "compile"]), 1)


def _together(spans: Sequence[tuple[str, float, float]]) -> int:
    """Returns the largest number of spans at one time."""
    changes = sorted(change for _, begin, end in spans for change in ((begin, 1), (end, -1)))
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
