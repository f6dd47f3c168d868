"""Tables and pictures of what `benchmarks/policies.py --save` has written.

python benchmarks/policies_report.py policies.json              # prints the tables, in Markdown
python benchmarks/policies_report.py policies.json --write      # and puts them and the pictures into docs/
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from flashtune.errors import TableError
from flashtune.tuner.pages import filled
from flashtune.tuner.replays import JUDGED_SHARE, NEAR, Summary

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/search.md"
PICTURES = ROOT / "docs/pictures"
BEGIN, END = "<!-- policies: written by benchmarks/policies_report.py -->", "<!-- end of policies -->"
# Told apart by those who see no colours too; the default stands out.
COLORS = {
    "default": "#d55e00",
    "tpe": "#0072b2",
    "gp": "#009e73",
    "random": "#5b6475",
    "exhaustive": "#cc79a7",
}
# A grid of panels, in pixels.
ACROSS, PANEL_WIDTH, PANEL_HEIGHT, GAP, TOP = 2, 400, 170, 46, 70
LOWEST = 0.8

Curve = Callable[[Summary], Sequence[tuple[float, float]]]


def main() -> None:
    """Reads, prints and writes."""
    parser = argparse.ArgumentParser(description="Tables and pictures of compared policies.")
    parser.add_argument("saved", type=Path, help="what benchmarks/policies.py --save has written")
    parser.add_argument("--write", action="store_true", help="put them into docs/search.md and docs/pictures")
    options = parser.parse_args()
    try:
        found = msgspec.json.decode(options.saved.read_bytes(), type=list[Summary])
    except (OSError, msgspec.DecodeError) as error:
        sys.exit(f"error: {options.saved} holds no compared policies: {error}")
    text = "\n".join(_lines(found))
    print(text)
    if options.write:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), BEGIN, END, text), encoding="utf-8")
        for name, title, curve in (
            ("search-trials", "Share of the true best over the share of the space that is tried", by_trials),
            ("search-seconds", "Share of the true best over simulated seconds, 15 compilers", by_seconds),
        ):
            (PICTURES / f"{name}.svg").write_text(picture(found, title, curve), encoding="utf-8")


def policies_of(found: Sequence[Summary]) -> list[str]:
    """The policies that were compared, the default first."""
    present = {summary.policy for summary in found}
    return [name for name in COLORS if name in present]


def problems_of(found: Sequence[Summary]) -> list[tuple[str, str]]:
    """Family and problem of each table, in order."""
    return list(dict.fromkeys((summary.family, summary.problem) for summary in found))


def summary_of(found: Sequence[Summary], policy: str, problem: tuple[str, str]) -> Summary:
    """One policy on one table.

    Raises:
        TableError: It was not replayed.
    """
    for summary in found:
        if (summary.policy, summary.family, summary.problem) == (policy, *problem):
            return summary
    raise TableError(
        f"{policy} was not replayed on {problem[1]}: run benchmarks/policies.py for all policies"
    )


def mean_trials(summary: Summary) -> float:
    """Trials until the answer was near the best; where it never was, as many as were made."""
    return statistics.mean(trials or len(summary.median) for trials in summary.trials)


def _lines(found: Sequence[Summary]) -> Iterator[str]:
    policies, problems = policies_of(found), problems_of(found)
    head = f"| problem | {' | '.join(policies)} |"
    rule = f"| --- |{' ---: |' * len(policies)}"
    seeds = len(found[0].judged)
    tried = f"{JUDGED_SHARE:.0%} of the space tried"
    yield f"Share of the true best with {tried}, median of {seeds} seeds (worst seed):"
    yield ""
    yield from (head, rule)
    for problem in problems:
        cells = (_judged(summary_of(found, policy, problem)) for policy in policies)
        yield f"| {_title(*problem)} | {' | '.join(cells)} |"
    medians = {
        policy: [statistics.median(summary_of(found, policy, problem).judged) for problem in problems]
        for policy in policies
    }
    yield f"| **median** | {' | '.join(f'**{statistics.median(medians[name]):.3f}**' for name in policies)} |"
    yield f"| **worst** | {' | '.join(f'**{min(medians[name]):.3f}**' for name in policies)} |"
    yield ""
    yield f"Trials until the answer reaches {NEAR} of the true best, mean of {seeds} seeds:"
    yield ""
    yield from (head, rule)
    for problem in problems:
        cells = (_trials(summary_of(found, policy, problem)) for policy in policies)
        yield f"| {_title(*problem)} | {' | '.join(cells)} |"
    ratios = (f"**{_over_random(found, policy, problems):.2f}**" for policy in policies)
    yield f"| **over random, geometric mean** | {' | '.join(ratios)} |"
    yield ""
    yield "`>`: some seeds never did; they count with all trials that they made: the truth is more."


def _judged(summary: Summary) -> str:
    return f"{statistics.median(summary.judged):.3f} ({min(summary.judged):.3f})"


def _trials(summary: Summary) -> str:
    return f"{'> ' if None in summary.trials else ''}{mean_trials(summary):.1f}"


def _over_random(found: Sequence[Summary], policy: str, problems: Sequence[tuple[str, str]]) -> float:
    logs = (
        math.log(mean_trials(summary_of(found, policy, problem)))
        - math.log(mean_trials(summary_of(found, "random", problem)))
        for problem in problems
    )
    return math.exp(statistics.mean(logs))


def _title(family: str, problem: str) -> str:
    """`forward_hopper, D128 causal S=2048` of a problem's key."""
    parts = problem.split("_")
    mask = "full" if parts[-1] == "none" else "causal"
    length = next(part[1:] for part in parts if part.startswith("k") and part[1:].isdigit())
    width = next(part[1:] for part in parts if part.startswith("d") and part[1:].isdigit())
    heads, kv_heads = next(part[1:] for part in parts if part.startswith("h")).split("x")
    grouped = "" if heads == kv_heads else f", {heads} heads on {kv_heads}"
    return f"{family}, D{width} {mask} S={length}{grouped}"


def by_trials(summary: Summary) -> list[tuple[float, float]]:
    """Median share of the true best over the share of the space that was tried."""
    return [(trial / summary.candidates, share) for trial, share in enumerate(summary.median, 1)]


def by_seconds(summary: Summary) -> list[tuple[float, float]]:
    """Median share of the true best over simulated seconds."""
    return [(float(second), share) for second, share in enumerate(summary.by_second, 1)]


def picture(found: Sequence[Summary], title: str, curve: Curve) -> str:
    """A panel for each problem, a line for each policy."""
    policies, problems = policies_of(found), problems_of(found)
    rows = math.ceil(len(problems) / ACROSS)
    width, height = ACROSS * (PANEL_WIDTH + GAP) + GAP, TOP + rows * (PANEL_HEIGHT + GAP)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    font = 'font-family="Helvetica, Arial, sans-serif" font-size="11"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {font}>',
        f"  <title>{title}</title>",
        f'  <rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        f'  <text x="{GAP}" y="24" font-size="14" font-weight="bold" fill="#1f2430">{title}</text>',
    ]
    for number, policy in enumerate(policies):
        left = GAP + 110 * number
        parts.append(f'  <line x1="{left}" y1="42" x2="{left + 24}" y2="42" {_stroke(policy)}/>')
        parts.append(f'  <text x="{left + 30}" y="46" fill="#1f2430">{policy}</text>')
    for number, problem in enumerate(problems):
        lines = [(policy, curve(summary_of(found, policy, problem))) for policy in policies]
        left = GAP + number % ACROSS * (PANEL_WIDTH + GAP)
        top = TOP + number // ACROSS * (PANEL_HEIGHT + GAP)
        parts += _panel(left, top, _title(*problem), lines)
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    left: int, top: int, title: str, lines: Sequence[tuple[str, Sequence[tuple[float, float]]]]
) -> Iterator[str]:
    last = max(points[-1][0] for _, points in lines)
    bottom = top + PANEL_HEIGHT
    yield (
        f'  <rect x="{left}" y="{top}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="none" '
        'stroke="#8a93a6"/>'
    )
    yield f'  <text x="{left + 6}" y="{bottom - 8}" fill="#1f2430">{title}</text>'
    for share in (0.85, 0.9, 0.95):
        y = bottom - (share - LOWEST) / (1 - LOWEST) * PANEL_HEIGHT
        yield f'  <line x1="{left}" y1="{y:.1f}" x2="{left + PANEL_WIDTH}" y2="{y:.1f}" stroke="#eef0f4"/>'
        yield f'  <text x="{left - 4}" y="{y + 4:.1f}" fill="#5b6475" text-anchor="end">{share}</text>'
    for part in (0.0, 0.5, 1.0):
        label = f"{part * last:.0%}" if last <= 1 else f"{part * last:.0f} s"
        x = left + part * PANEL_WIDTH
        yield f'  <text x="{x:.0f}" y="{bottom + 14}" fill="#5b6475" text-anchor="middle">{label}</text>'
    for policy, points in reversed(lines):
        places = " ".join(
            f"{left + x / last * PANEL_WIDTH:.1f},"
            f"{bottom - max(0.0, share - LOWEST) / (1 - LOWEST) * PANEL_HEIGHT:.1f}"
            for x, share in _corners(points)
        )
        yield f'  <polyline points="{places}" fill="none" {_stroke(policy)}/>'


def _corners(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points of a line without those that lie on a level stretch."""
    inner = zip(points, points[1:], points[2:], strict=False)
    bends = [point for before, point, after in inner if not before[1] == point[1] == after[1]]
    return [points[0], *bends, points[-1]]


def _stroke(policy: str) -> str:
    return f'stroke="{COLORS[policy]}" stroke-width="{2.4 if policy == "default" else 1.4}"'


if __name__ == "__main__":
    main()
