"""Tables and charts of saved comparisons of search strategies.

`python -m benchmarks.documents --write` puts the tables and the charts of benchmarks/results into docs/.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from benchmarks import charts
from benchmarks.charts import Axis, Panel, Style
from benchmarks.saved import RESULTS, decoded
from benchmarks.search_replay.replays import JUDGED_SHARE
from flashtune.core.errors import TableError
from flashtune.tuner.cli.output import table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SCRIPT = "benchmarks/search_replay/policies_report.py"
SAVED = tuple(RESULTS / f"nvidia-h200-policies{part}.json.gz" for part in ("", "-samplers"))
# The default policy without measurements of other problems.
COLD = "cold"
# The styles also differ without colours; the default is emphasised.
COLORS = {
    "default": "#d55e00",
    COLD: "#e69f00",
    "tpe": "#0072b2",
    "gp": "#009e73",
    "random": "#5b6475",
    "exhaustive": "#cc79a7",
}
# Where the pictures' shares begin; what is less lies on the border.
LOWEST = 0.6
# Simulated seconds after which answers are held against each other.
SECONDS = 10

# How near to the true best an answer must be, of which the trials are counted.
NEAR = 0.98


class Summary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The results of one strategy on one table, over all seeds."""

    policy: str  # The strategy.
    problem: str  # The problem's key.
    family: str  # The searched family.
    candidates: int  # Number of candidates.
    median: tuple[float, ...]  # Median share of the true best after each trial.
    worst: tuple[float, ...]  # The worst seed's.
    # Median share of the true best after each simulated second, from the first on.
    by_second: tuple[float, ...]
    worst_by_second: tuple[float, ...]  # The worst seed's.
    # Share of the true best with the judged share of the space tried, for each seed.
    judged: tuple[float, ...]
    # Trials until the answer was near the best, for each seed; None where it never was.
    trials: tuple[int | None, ...]


Curve = Callable[[Summary], Sequence[tuple[float, float]]]


def texts() -> dict[str, str]:
    """Returns the table by its name."""
    return {"policies": "\n".join(_lines(summaries()))}


def pictures() -> "dict[str, Figure]":
    """Returns the figures by name."""
    replays = whole(summaries())
    return {name: picture(replays, title, curve) for name, (title, curve) in CURVES.items()}


def summaries() -> list[Summary]:
    """Returns the compared policies of the saved files."""
    return [summary for path in SAVED for summary in decoded(path, list[Summary])]


def whole(replays: Iterable[Summary]) -> list[Summary]:
    """The policies that were replayed until half of a space was tried: all but the cold one."""
    return [summary for summary in replays if summary.policy != COLD]


def policies_of(replays: Sequence[Summary]) -> list[str]:
    """The policies that were compared, the default first."""
    present = {summary.policy for summary in replays}
    return [name for name in COLORS if name in present]


def problems_of(replays: Sequence[Summary]) -> list[tuple[str, str]]:
    """Family and problem of each table, in order."""
    return list(dict.fromkeys((summary.family, summary.problem) for summary in replays))


def summary_of(replays: Sequence[Summary], policy: str, problem: tuple[str, str]) -> Summary:
    """One policy on one table."""
    for summary in replays:
        if (summary.policy, summary.family, summary.problem) == (policy, *problem):
            return summary
    raise TableError(f"{policy} was not simulated on {problem[1]}: add a file of results that has it")


def mean_trials(summary: Summary) -> float:
    """Trials until the result was near the best, or all trials."""
    return statistics.mean(trials or len(summary.median) for trials in summary.trials)


def _lines(everything: Sequence[Summary]) -> Iterator[str]:
    seeds = len(everything[0].judged)
    replays = whole(everything)
    for when, several, judged in (
        (f"with {JUDGED_SHARE:.0%} of the space tried", everything, _after_trials),
        (f"after {SECONDS} simulated seconds, 15 compilers", replays, _after_seconds),
    ):
        yield f"Share of the true best {when}, median of {seeds} seeds (worst seed):"
        yield ""
        yield from table(("problem", *policies_of(several)), _shares(several, judged))
        yield ""
    policies, problems = policies_of(replays), problems_of(replays)
    yield f"Trials until the answer reaches {NEAR} of the true best, mean of {seeds} seeds:"
    yield ""
    rows = [
        (_title(*problem), *(_trials(summary_of(replays, policy, problem)) for policy in policies))
        for problem in problems
    ]
    ratios = (f"**{_over_random(replays, policy, problems):.2f}**" for policy in policies)
    rows.append(("**over random, geometric mean**", *ratios))
    yield from table(("problem", *policies), rows)
    yield ""
    yield "`>`: some seeds did not reach it. They count with all their trials, so the mean is a lower bound."


def _shares(
    replays: Sequence[Summary], judged: Callable[[Summary], tuple[float, float]]
) -> Iterator[tuple[str, ...]]:
    """A row for each problem, and two for all of them: median and worst, of medians and of worst seeds."""
    policies = policies_of(replays)
    shares: dict[str, list[tuple[float, float]]] = {policy: [] for policy in policies}
    for problem in problems_of(replays):
        cells = []
        for policy in policies:
            shares[policy].append(judged(summary_of(replays, policy, problem)))
            cells.append("{:.3f} ({:.3f})".format(*shares[policy][-1]))
        yield _title(*problem), *cells
    for name, of in (("median", statistics.median), ("worst", min)):
        both = (tuple(map(of, zip(*shares[policy], strict=True))) for policy in policies)
        yield f"**{name}**", *(f"**{median:.3f}** ({worst:.3f})" for median, worst in both)


def _after_trials(summary: Summary) -> tuple[float, float]:
    return statistics.median(summary.judged), min(summary.judged)


def _after_seconds(summary: Summary) -> tuple[float, float]:
    """Extends shorter results by their last value."""
    last = min(SECONDS, len(summary.by_second)) - 1
    return summary.by_second[last], summary.worst_by_second[last]


def _trials(summary: Summary) -> str:
    return f"{'> ' if None in summary.trials else ''}{mean_trials(summary):.1f}"


def _over_random(replays: Sequence[Summary], policy: str, problems: Sequence[tuple[str, str]]) -> float:
    logs = (
        math.log(mean_trials(summary_of(replays, policy, problem)))
        - math.log(mean_trials(summary_of(replays, "random", problem)))
        for problem in problems
    )
    return math.exp(statistics.mean(logs))


def _title(family: str, problem: str) -> str:
    return f"{family}, {problem_title(problem)}"


def problem_title(problem: str) -> str:
    """`D128 causal S=2048` of a forward problem's key."""
    parts = problem.split("_")
    mask = "full" if parts[-1] == "none" else "causal"
    length = next(part[1:] for part in parts if part.startswith("k") and part[1:].isdigit())
    width = next(part[1:] for part in parts if part.startswith("d") and part[1:].isdigit())
    heads, kv_heads = next(part[1:] for part in parts if part.startswith("h")).split("x")
    grouped = "" if heads == kv_heads else f", {heads} heads on {kv_heads}"
    return f"D{width} {mask} S={length}{grouped}"


def _over_trials(summary: Summary, shares: Sequence[float]) -> list[tuple[float, float]]:
    return [(trial / summary.candidates, share) for trial, share in enumerate(shares, 1)]


def _over_seconds(shares: Sequence[float]) -> list[tuple[float, float]]:
    return [(float(second), share) for second, share in enumerate(shares, 1)]


# Pictures by the name of their file: title, and the curve of a summary.
CURVES: dict[str, tuple[str, Curve]] = {
    "search-trials": (
        "Share of the true best over the share of the space that is tried, median seed",
        lambda summary: _over_trials(summary, summary.median),
    ),
    "search-trials-worst": (
        "Share of the true best over the share of the space that is tried, worst seed",
        lambda summary: _over_trials(summary, summary.worst),
    ),
    "search-seconds": (
        "Share of the true best over simulated seconds, 15 compilers, median seed",
        lambda summary: _over_seconds(summary.by_second),
    ),
    "search-seconds-worst": (
        "Share of the true best over simulated seconds, 15 compilers, worst seed",
        lambda summary: _over_seconds(summary.worst_by_second),
    ),
}


def picture(replays: Sequence[Summary], title: str, curve: Curve) -> "Figure":
    """A panel for each problem, a line for each policy."""
    styles = [_style(policy) for policy in policies_of(replays)]
    return charts.picture(
        title, styles, [_panel(replays, problem, curve) for problem in problems_of(replays)]
    )


def _panel(replays: Sequence[Summary], problem: tuple[str, str], curve: Curve) -> Panel:
    lines = tuple(
        (_style(policy), curve(summary_of(replays, policy, problem))) for policy in policies_of(replays)
    )
    last = max(points[-1][0] for _, points in lines)
    marks = tuple(
        (part * last, f"{part * last:.0%}" if last <= 1 else f"{part * last:.0f} s")
        for part in (0.0, 0.5, 1.0)
    )
    shares = tuple((share, f"{share}") for share in (0.7, 0.8, 0.9))
    return Panel(_title(*problem), Axis(0.0, last, marks), Axis(LOWEST, 1.0, shares), lines)


def _style(policy: str) -> Style:
    return Style(policy, COLORS[policy], 2.4 if policy == "default" else 1.4)
