"""Results of `flashtune bench` for a terminal, and their groups: a panel for each head dim and mask."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.table import Table

from flashtune.core.errors import printable
from flashtune.core.problem import Causal, Dtype, Problem, feature_words
from flashtune.tuner.bench.driver import Report
from flashtune.tuner.bench.results import (
    Bench,
    BenchRun,
    Ceiling,
    Copy,
    LeftOut,
    Row,
    speed_of,
)
from flashtune.tuner.bench.summary import Against
from flashtune.tuner.cli.output import console, grid, note, plain, print_table, say
from flashtune.tuner.workloads.work import Unit, is_decode, unit_of

# Name of the ceilings in lists of contestants.
CEILING = "matrix product"
COPY = "device copy"

SDPA = "sdpa-"
# Up to this many shapes are shown as tables, more as a line each.
TABLES = 6


class Panel(NamedTuple):
    """Benches that differ only in lengths and batch, shortest first."""

    title: str  # Their common properties.
    dtype: Dtype  # Element type, which selects their ceiling.
    benches: tuple[Bench, ...]  # At least one.

    @property
    def unit(self) -> Unit:
        """Returns the unit of speeds."""
        return unit_of(self.benches[0].problem)

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the contestants with a row in the panel, ours first."""
        return tuple(dict.fromkeys(row.name for bench in self.benches for row in bench.rows))

    def ceilings(self, run: BenchRun) -> tuple[tuple[str, float], ...]:
        """Returns names and values of the ceilings of the same run in the panel's unit."""
        if self.unit is Unit.GBPS:
            return ((COPY, run.copy.gbps),) if run.copy else ()
        return tuple((CEILING, entry.tflops) for entry in run.ceilings if entry.dtype is self.dtype)


def panels(benches: Sequence[Bench]) -> tuple[Panel, ...]:
    """Returns the panels of a run, in the order of their first problems."""
    groups: dict[str, list[Bench]] = {}
    for bench in benches:
        groups.setdefault(title_of(bench.problem), []).append(bench)
    return tuple(
        Panel(title, group[0].problem.dtype, tuple(sorted(group, key=_lengths)))
        for title, group in groups.items()
    )


def title_of(problem: Problem) -> str:
    """Returns the common properties of a panel: `bf16, head dim 128, 16 heads, causal`."""
    width = f"head dim {problem.head_dim}"
    if problem.value_head_dim != problem.head_dim:
        width += f" (values {problem.value_head_dim})"
    heads = f"{problem.heads} heads"
    if problem.kv_heads != problem.heads:
        heads += f" on {problem.kv_heads}"
    what = "decode, " if is_decode(problem) else "backward, " if problem.is_backward else ""
    features = feature_words(problem).replace("_", ", ")
    return f"{what}{problem.dtype}, {width}, {heads}, {_mask(problem)}{features}"


def _mask(problem: Problem) -> str:
    if problem.causal is Causal.NONE:
        return "full"
    if problem.seqlen_q == problem.seqlen_kv or is_decode(problem):
        return "causal"
    return f"causal {problem.causal.value.replace('_', '-')}"


def lengths_of(problem: Problem) -> str:
    """Returns the properties in which problems of a panel differ: `4096`, or `1 to 4096`, and the batch."""
    lengths = str(problem.seqlen_kv)
    if problem.seqlen_q != problem.seqlen_kv:
        lengths = f"{problem.seqlen_q} to {lengths}"
    return f"{lengths}, batch {problem.batch}"


def _lengths(bench: Bench) -> tuple[int, int, int]:
    return bench.problem.seqlen_kv, bench.problem.seqlen_q, bench.problem.batch


def headers(bench: Bench) -> tuple[str, ...]:
    """Returns the headers of `cells`."""
    return ("", "ms", "p20 to p80", unit_of(bench.problem).value, "of best SDPA", "host µs", "error")


def show_bench(bench: Bench, problems: int) -> None:
    """Prints one problem's results on arrival: a table, or a line if there are many problems."""
    if problems > TABLES:
        say(bench_line(bench), "  ")
        return
    out = console()
    out.print(plain(f"{bench.problem.key} on {bench.target}"), style="bold")
    print_table(out, bench_table(bench))
    for sentence in notes(bench):
        note(sentence)


def bench_table(bench: Bench) -> Table:
    """Returns a table with one line for each contestant."""
    heads = headers(bench)
    return grid(heads, (map(plain, cells(bench, row)) for row in bench.rows), heads[1:], framed=True)


def bench_line(bench: Bench) -> str:
    """Returns the speeds of all contestants in the problem's unit, on one line."""
    parts = [f"{row.name} {speed_of(bench.problem, row):.1f}" for row in bench.rows]
    parts += [f"{left.name} left out" for left in bench.left_out]
    parts += ["throttled"] if bench.throttled else []
    unit = f" ({unit_of(bench.problem)})" if is_decode(bench.problem) else ""
    return printable(f"{title_of(bench.problem)}, {lengths_of(bench.problem)}{unit}: {', '.join(parts)}")


def notes(bench: Bench) -> tuple[str, ...]:
    """Returns the notes under the table."""
    sentences = [f"{row.name} is {row.detail}." for row in bench.rows if row.detail]
    sentences += [f"{left.name} is left out: {_why(left)}." for left in bench.left_out]
    if bench.sustained:
        sentences.append("Each was timed alone, under sustained load.")
    if bench.throttled:
        sentences.append("The clock was held down while sampling: compare within this run alone.")
    return tuple(map(printable, sentences))


def _why(left: LeftOut) -> str:
    if left.message:
        return left.message.rstrip(".")
    if left.error is None:
        return "its output is not finite where it should be"
    return f"its error against float64 is {left.error:.2g} of what is allowed"


def cells(bench: Bench, row: Row) -> tuple[str, ...]:
    """Returns a row under `headers`."""
    best = min((other.ms for other in bench.rows if other.name.startswith(SDPA)), default=None)
    return (
        row.name,
        f"{row.ms:.4f}",
        f"{row.p20:.4f} to {row.p80:.4f}",
        f"{speed_of(bench.problem, row):.1f}",
        "" if best is None else f"{best / row.ms:.2f}",
        f"{row.host_us:.1f}",
        f"{row.error:.2f}",
    )


def show_summary(report: Report) -> None:
    """Prints the summary of all results."""
    for sentence in summary(report):
        say(sentence)


def summary(report: Report) -> Iterator[str]:
    """Yields the sentences of the summary."""
    run = report.run
    for ceiling in run.ceilings:
        yield f"{ceiling_text(ceiling)}."
    if run.copy is not None and report.of_copy:
        yield f"{copy_text(run.copy)}."
    for point in report.of_copy:
        yield printable(f"{point.case}: {point.gbps:.0f} GB/s, {point.share:.3f} of the copy.")
    for entry in report.ratios:
        mean = f"{entry.geometric_mean:.3f} in the geometric mean of {len(entry.points)}"
        yield printable(
            f"flashtune over {entry.peer}: {mean}, {entry.worst.ratio:.3f} at worst ({entry.worst.problem})."
        )
    if report.against is not None:
        yield from against_text(report.against)
    if len(run.benches) > TABLES:
        yield from left_out_text(run.benches)
    seconds = sum(bench.seconds for bench in run.benches)
    yield f"{len(run.benches)} shapes in {seconds:.0f} s."


def ceiling_text(ceiling: Ceiling) -> str:
    """Returns a ceiling as text."""
    return (
        f"A {ceiling.dtype} matrix product of {ceiling.side}³ reaches {ceiling.tflops:.1f} TFLOP/s, "
        f"with the clock at {ceiling.clock_mhz:.0f} MHz after it"
    )


def copy_text(copy: Copy) -> str:
    """Returns a copy of device memory as text."""
    return f"A copy of device memory moves {copy.gbps:.0f} GB/s, reads and writes together"


def against_text(against: Against) -> Iterator[str]:
    """Yields the comparison with figures measured elsewhere: a line for each case and one for all."""
    for point in against.points:
        # A case names its unit if it is not TFLOP/s.
        unit = "of cuDNN " if not against.absolute else "" if "[" in point.case else "TFLOP/s "
        theirs = f"{point.best} {point.theirs:.3f} there"
        yield printable(f"{point.case}: {point.ours:.3f} {unit}here, {theirs}: {point.ratio:.3f}")
    lengths = ", ".join(f"{point.seqlen}: {point.ratio:.3f}" for point in against.worst_by_length())
    yield f"At worst for each sequence length: {lengths}."
    mean = f"{against.geometric_mean:.3f} in the geometric mean of {len(against.points)}"
    worst = f"{against.worst.ratio:.3f} at worst ({against.worst.case})"
    yield printable(f"Against the best of the peers {against.source}: {mean}, {worst}.")


def left_out_text(benches: Sequence[Bench]) -> Iterator[str]:
    """Yields the contestants without a row and the reasons, each reason once."""
    reasons = Counter((left.name, _why(left)) for bench in benches for left in bench.left_out)
    for (name, why), count in reasons.items():
        yield printable(f"{name} is left out at {count} of {len(benches)} shapes: {why}.")
