"""Results of `flashtune bench` as a Markdown document."""

from collections.abc import Iterator, Sequence

from flashtune.core.errors import printable
from flashtune.tuner.bench.driver import Report
from flashtune.tuner.bench.results import BenchRun, speed_of
from flashtune.tuner.bench.summary import Against, OfCopy, Ratios
from flashtune.tuner.cli.report.bench_terminal import (
    Panel,
    ceiling_text,
    cells,
    copy_text,
    headers,
    lengths_of,
    notes,
    panels,
)


def markdown(report: Report) -> str:
    """Returns a report, from the summary to the details of each problem."""
    run = report.run
    lines = [f"# Attention on {run.benches[0].target}", "", f"`{printable(run.command)}`", "", *_made_by(run)]
    if report.ratios:
        lines += ["", "## In short", "", *_ratios(report.ratios)]
    if report.against is not None:
        lines += ["", "## Among peers measured elsewhere", "", *_against(report.against)]
    if report.of_copy and run.copy is not None:
        lines += ["", "## Decoding", "", f"{copy_text(run.copy)}.", "", *_of_copy(report.of_copy)]
    lines += ["", "## Speeds"]
    for panel in panels(run.benches):
        lines += ["", f"### {panel.title}, {panel.unit}", "", *_panel(panel, run)]
    lines += ["", "## Every shape"]
    for bench in run.benches:
        rows = [cells(bench, row) for row in bench.rows]
        lines += ["", f"### {bench.problem.key}", "", *_table(headers(bench), rows), "", *notes(bench)]
    return "\n".join(lines) + "\n"


def _made_by(run: BenchRun) -> Iterator[str]:
    bench, peers = run.benches[0], run.environment
    made = bench.versions
    yield (
        f"{peers.gpu}, driver {made.driver}, flashtune {made.flashtune}, torch {made.torch}, "
        f"triton {made.triton}, ptxas {made.ptxas},"
    )
    yield f"CUDA {peers.cuda}, cuDNN {peers.cudnn or 'none'}, flash-attn-4 {peers.flash_attn_4 or 'none'}."
    if bench.sustained:
        order = f"each contestant alone under sustained load, median of {bench.rounds} or more"
    else:
        order = f"contestants in turn, median of {bench.rounds}"
    yield f"GPU time of CUDA-graph replays with a cold L2, {order}."
    yield "TFLOP/s count 4·B·H·Sq·Sk·D operations, half of them when causal. Host time is that of queueing"
    yield "one call. Error is the largest row error against a float64 reference, over what the gate allows."
    if any(bench.problem.is_backward for bench in run.benches):
        yield "Gradients count 2.5 times as many, and are timed alone, as autograd runs them."
    for ceiling in run.ceilings:
        yield f"{ceiling_text(ceiling)}."


def _ratios(ratios: Sequence[Ratios]) -> Iterator[str]:
    heads = ("flashtune over", "shapes", "geometric mean", "worst", "at")
    rows = [
        (
            entry.peer,
            str(len(entry.points)),
            f"{entry.geometric_mean:.3f}",
            f"{entry.worst.ratio:.3f}",
            entry.worst.problem,
        )
        for entry in ratios
    ]
    return _table(heads, rows)


def _against(against: Against) -> Iterator[str]:
    """Yields the figure of each case, and their summary."""
    unit = (
        "TFLOP/s, or as the case says"
        if against.absolute
        else "units of cuDNN's in the same run, theirs or ours"
    )
    yield f"Theirs: {printable(against.source)}. Speeds are in {unit}."
    yield ""
    heads = ("case", "flashtune", "best peer", "its speed", "flashtune over it")
    rows = [
        (point.case, f"{point.ours:.3f}", point.best, f"{point.theirs:.3f}", f"{point.ratio:.3f}")
        for point in against.points
    ]
    yield from _table(heads, rows)
    yield ""
    lengths = ", ".join(f"{point.seqlen}: {point.ratio:.3f}" for point in against.worst_by_length())
    yield f"At worst for each sequence length: {lengths}."
    yield (
        f"Geometric mean {against.geometric_mean:.3f} of {len(against.points)}, "
        f"worst {against.worst.ratio:.3f} at {printable(against.worst.case)}."
    )


def _of_copy(points: Sequence[OfCopy]) -> Iterator[str]:
    rows = [(point.case, f"{point.gbps:.0f}", f"{point.share:.3f}") for point in points]
    return _table(("case", "flashtune, GB/s of keys and values", "of the copy"), rows)


def _panel(panel: Panel, run: BenchRun) -> Iterator[str]:
    """Yields speeds of contestants by length, with a dash for a missing row; and the ceiling."""
    rows: list[tuple[str, ...]] = []
    for name in panel.names:
        speeds = ((bench.problem, bench.row(name)) for bench in panel.benches)
        rows.append((name, *(f"{speed_of(problem, row):.1f}" if row else "–" for problem, row in speeds)))
    rows += [(name, *[f"{speed:.1f}"] * len(panel.benches)) for name, speed in panel.ceilings(run)]
    return _table(("", *(lengths_of(bench.problem) for bench in panel.benches)), rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield _line(heads)
    yield _line(["---", *["---:"] * (len(heads) - 1)])
    yield from map(_line, rows)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(printable(cell).replace('|', chr(92) + '|') for cell in cells)} |"
