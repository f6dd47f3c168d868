"""A `Bench` as a table for a person, and as Markdown for a file that is kept."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from flashtune.tuner.bench import Bench, Row

SDPA = "sdpa-"
HEADERS = ("", "ms", "p20 to p80", "TFLOP/s", "of best SDPA", "host µs", "error")


def bench_table(bench: Bench) -> Table:
    """One line for each contestant."""
    table = Table(title=escape(f"{bench.problem.key} on {bench.target}"), title_justify="left")
    for number, header in enumerate(HEADERS):
        table.add_column(header, justify="left" if number == 0 else "right")
    for row in bench.rows:
        table.add_row(*map(escape, _cells(bench, row)))
    return table


def notes(bench: Bench) -> tuple[str, ...]:
    """Sentences that belong under the table."""
    found = [f"{row.name} is {row.detail}." for row in bench.rows if row.detail]
    found += [
        f"{left.name} is left out: its error against float64 is {left.error:.2g} of what is allowed."
        for left in bench.left_out
    ]
    if bench.throttled:
        found.append("The clock was held down while sampling: compare within this run alone.")
    return tuple(found)


def markdown(benches: Sequence[Bench], command: str) -> str:
    """All benches as one Markdown document.

    Args:
        benches: At least one.
        command: The command line that made them.
    """
    versions = benches[0].versions
    made_by = (
        f"flashtune {versions.flashtune}, torch {versions.torch}, triton {versions.triton}, "
        f"ptxas {versions.ptxas}, driver {versions.driver}."
    )
    how = (
        f"GPU time of CUDA-graph replays with a cold L2, contestants in turn, median of {benches[0].rounds}.",
        "TFLOP/s count 4·B·H·Sq·Sk·D operations, half of them when causal. Host time is that of queueing one",
        "call. Error is the largest row error against a float64 reference, over what the gate allows.",
    )
    lines = [f"# Attention on {benches[0].target}", "", f"`{command}`", "", made_by, *how]
    for bench in benches:
        lines += [
            "",
            f"## {bench.problem.key}",
            "",
            _line(HEADERS),
            _line(["---", *["---:"] * (len(HEADERS) - 1)]),
        ]
        lines += [_line(_cells(bench, row)) for row in bench.rows]
        lines += ["", *notes(bench)]
    return "\n".join(lines) + "\n"


def _cells(bench: Bench, row: Row) -> tuple[str, ...]:
    best = min((other.ms for other in bench.rows if other.name.startswith(SDPA)), default=None)
    return (
        row.name,
        f"{row.ms:.4f}",
        f"{row.p20:.4f} to {row.p80:.4f}",
        f"{row.tflops:.1f}",
        "" if best is None else f"{best / row.ms:.2f}",
        f"{row.host_us:.1f}",
        f"{row.error:.2f}",
    )


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
