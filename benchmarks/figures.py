"""Numbers within sentences of the pages, by name, each computed from a file of saved results.

A page contains one as `<!-- figure NAME -->text<!-- end -->`. `python -m benchmarks.documents --write` writes
the text.
"""

import functools
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import headline, tables
from benchmarks.exhaustive.truth_table import read_tables
from benchmarks.kernels import tritons
from benchmarks.saved import RESULTS, ROOT, document, sources
from benchmarks.search_replay import policies_report
from flashtune.core.errors import UsageError
from flashtune.core.problem import Direction
from flashtune.core.record import Record, Verdict
from flashtune.core.target import TARGETS
from flashtune.templates.registry import families
from flashtune.tuner.tables.lookup import shipped_tables
from tests.mutants.catalogue import gpu_mutants
from tests.mutants.pages import pages_runs
from tests.mutants.results import Control

MARK = re.compile(r"<!-- figure ([\w-]+) -->(.*?)<!-- end -->", re.DOTALL)
OURS, CUDNN = "flashtune", "sdpa-cudnn"
TO_SIX = ("no", "one", "two", "three", "four", "five", "six")
WORDS = (*TO_SIX, "seven", "eight", "nine", "ten", "eleven", "twelve")


@functools.cache
def result(name: str) -> Any:
    """The plain values of `benchmarks/results/nvidia-h200-NAME.json.gz`."""
    return document(RESULTS / f"nvidia-h200-{name}.json.gz")


def with_figures(page: str) -> str:
    """The page with each figure's text worked out again."""

    def text(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in FIGURES:
            raise UsageError(f"there is no figure {name}: see benchmarks/figures.py")
        return f"<!-- figure {name} -->{FIGURES[name]()}<!-- end -->"

    return MARK.sub(text, page)


def in_words(number: int) -> str:
    """Returns a count up to twelve in words, and a larger one in digits."""
    return WORDS[number] if number < len(WORDS) else str(number)


def _versions(name: str) -> str:
    """Returns the versions of torch and Triton of a saved run, without their patch levels."""
    source = sources()[f"benchmarks/results/nvidia-h200-{name}.json.gz"]
    torch, triton = (".".join(version.split(".")[:2]) for version in (source.torch, source.triton))
    return f"torch {torch}, Triton {triton}"


def _fleet(name: str) -> list[float]:
    """Returns a value of one simulated worker, and of the simulated fleet."""
    return [row[name] for row in document(RESULTS / "fleet.json.gz")["rows"]]


def _tokens() -> str:
    """Returns the number of tokens of each shape of the paper's grid, in thousands."""
    problems = [bench["problem"] for bench in result("bench")["run"]["benches"]]
    (tokens,) = {problem["batch"] * problem["seqlen_q"] for problem in problems}
    return f"{tokens // 1024}k"


def _audit_points() -> str:
    """Returns the points of each family and GPU in the saved audit."""
    (points,) = {row["points"] for row in document(RESULTS / "sram-audit.json.gz")["rows"]}
    return in_words(points)


def _truth_families(family: str) -> str:
    return in_words(sum(table.family == family for table in read_tables(ROOT / "tests/data/truth")))


def _rows(name: str, contestant: str) -> Iterator[dict[str, Any]]:
    """One contestant's rows of a saved `flashtune bench`."""
    for bench in result(name)["run"]["benches"]:
        yield from (row for row in bench["rows"] if row["name"] == contestant)


def _ratios(name: str) -> list[float]:
    """Our speed over cuDNN's, bench by bench."""
    pairs = zip(_rows(name, OURS), _rows(name, CUDNN), strict=True)
    return [theirs["ms"] / ours["ms"] for ours, theirs in pairs]


def _flex_mean(name: str) -> str:
    return f"{statistics.geometric_mean(row['speedup'] for row in result(name)['rows']):.2f}"


def _host_us(contestant: str) -> float:
    return statistics.median(float(row["host_us"]) for row in _rows("bench", contestant))


def _first_seconds() -> list[float]:
    """Seconds of the first search of each shape, which shares nothing with others."""
    return [row["seconds"][0] for row in result("stability-thrice")]


def _judged(policy: str) -> list[float]:
    """A policy's median share of the true best on each truth table, with the judged share tried."""
    chosen = [summary for summary in policies_report.summaries() if summary.policy == policy]
    return [statistics.median(summary.judged) for summary in chosen]


def _truth_rows() -> str:
    return f"{sum(len(table.rows) for table in read_tables(ROOT / 'tests/data/truth')):,}"


@functools.cache
def _shipped() -> list[Record]:
    """Returns the records of all shipped tables."""
    return [record for table in shipped_tables() for record in table.records]


def _verdicts() -> list[Verdict]:
    """Returns the verdicts of the shipped records."""
    return [record.verdict for record in _shipped() if record.verdict]


@functools.cache
def _random_summaries() -> list[dict[str, Any]]:
    """Returns the saved comparisons of random problems, of both passes."""
    return [document(path)["rows"] for path in sorted(RESULTS.glob("*-random-*.json.gz"))]


def _controls() -> list[Control]:
    """Returns the verified kernels of random configs."""
    return [control for run in pages_runs(()) if not run.found for control in run.controls]


@functools.cache
def _mutants() -> Counter[str]:
    """The number of mutants of each family."""
    return Counter(mutant.subject.family for mutant in gpu_mutants())


def _mutants_of(*families: str) -> str:
    return str(sum(_mutants()[family] for family in families))


FIGURES: dict[str, Callable[[], str]] = {
    "backward-least": lambda: f"{min(_ratios('backward')):.2f}",
    "backward-most": lambda: f"{max(_ratios('backward')):.2f}",
    "flex-mean": lambda: _flex_mean("flex"),
    "flex-flash-mean": lambda: _flex_mean("flex-flash"),
    "bench-versions": lambda: _versions("bench"),
    "bench-date": lambda: str(sources()["benchmarks/results/nvidia-h200-bench.json.gz"].date),
    "bench-tokens": _tokens,
    "bench-length": lambda: str(tables.USUAL),
    "bench-shapes": lambda: str(len(_ratios("bench"))),
    "bench-shipped": lambda: str(len(_ratios("bench")) - len(headline.not_shipped())),
    "search-shapes": lambda: in_words(len(_first_seconds())),
    "targets": lambda: in_words(len(TARGETS)),
    "tritons": lambda: in_words(len(tritons.SAVED)),
    "truth-hopper": lambda: _truth_families("forward_hopper"),
    "truth-portable": lambda: _truth_families("forward_q_outer"),
    "audit-points": _audit_points,
    "backward-families": lambda: in_words(
        sum(family.direction is Direction.BACKWARD for family in families())
    ),
    "host-ours": lambda: f"{_host_us(OURS):.1f}",
    "host-cudnn": lambda: f"{_host_us(CUDNN):.1f}",
    "fp8-ceiling": lambda: f"{result('fp8')['run']['ceilings'][0]['tflops']:,.0f}",
    "search-least-seconds": lambda: f"{min(_first_seconds()):.0f}",
    "search-most-seconds": lambda: f"{max(_first_seconds()):.0f}",
    "cold-least": lambda: f"{min(_judged('cold')):.3f}",
    "cold-most": lambda: f"{max(_judged('cold')):.3f}",
    "random-least": lambda: f"{min(_judged('random')):.3f}",
    "random-most": lambda: f"{max(_judged('random')):.3f}",
    "truth-rows": _truth_rows,
    "shipped-records": lambda: str(len(_shipped())),
    "shipped-passed": lambda: str(sum(verdict.passed for verdict in _verdicts())),
    "shipped-checks": lambda: f"{statistics.median(verdict.checks for verdict in _verdicts()):,.0f}",
    "shipped-worst": lambda: f"{max(verdict.worst_ratio for verdict in _verdicts()):.2f}",
    "random-problems": lambda: f"{sum(rows['problems'] for rows in _random_summaries()):,}",
    "random-wrong": lambda: str(sum(len(rows["wrong"]) for rows in _random_summaries())),
    "fleet-shapes": lambda: f"{_fleet('shapes_per_hour')[1] / _fleet('shapes_per_hour')[0]:.0f}",
    "fleet-cores": lambda: f"{100 * _fleet('server_cores')[1]:.0f}%",
    "fleet-rate": lambda: f"{_fleet('shapes_per_hour')[1] / 3600:.0f}",
    "controls": lambda: str(len(_controls())),
    "controls-refused": lambda: str(sum(not control.passed for control in _controls())),
    "mutants": lambda: str(_mutants().total()),
    "mutants-serving": lambda: _mutants_of("forward_masked", "decode_split_kv"),
    "mutants-gradients": lambda: _mutants_of("backward_split", "backward_fused", "backward_hopper"),
}
