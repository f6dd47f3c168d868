"""The summary of a finished search."""

import shlex
import textwrap
from collections.abc import Iterator

from flashtune.core.canonical import shape_text
from flashtune.core.notices import folded_command
from flashtune.core.record import Outcome, Provenance, Record
from flashtune.db.location import without_password
from flashtune.templates.config_text import config_text
from flashtune.tuner.search.request import SearchResult
from flashtune.tuner.workloads.work import rate, unit_of

LABEL_WIDTH = 15
UNLIMITED = 10**6
BEFORE_COMPILING = "more before compiling, for want of SRAM or tensor memory"
# Words of the reason of a candidate that was pruned.
PRUNED = "needs at least"


def summary_lines(
    result: SearchResult, location: str, db: str | None = None, width: int | None = None
) -> tuple[str, ...]:
    """Returns lines with the best kernel, the baselines, the failures, and the next command.

    Lines are folded at `width` columns. Of configs, the axes that differ from the default are shown.
    """
    pruned = result.counts.pruned
    labelled = [
        ("problem", f"{result.problem.key} on {result.target.name}"),
        *_best(result),
        *_fallback(result),
        *_rivals(result),
        ("tried", _tried(result)),
        *((("pruned", f"{pruned} {BEFORE_COMPILING}"),) if pruned else ()),
        *(("failed", f"{count} x {reason}") for reason, count in result.reasons if PRUNED not in reason),
        ("stored", f"{location}, record {result.best_id}" if result.best_id else location),
    ]
    folded = (line for label, text in labelled for line in _folded(label, text, width))
    # Shapes are long words, so the following lines of the command start further left than other texts.
    command = folded_command(f"{'next':<{LABEL_WIDTH}}{next_command(result, db)}", width or UNLIMITED)
    return (*folded, *command.splitlines())


def _folded(label: str, text: str, width: int | None) -> list[str]:
    """Returns the lines of a label and its text, folded at the width."""
    # Several spaces separate columns and must remain; a word longer than a line is not divided.
    return textwrap.wrap(
        text,
        UNLIMITED if width is None else max(LABEL_WIDTH + 20, width),
        initial_indent=f"{label:<{LABEL_WIDTH}}",
        subsequent_indent=" " * LABEL_WIDTH,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    ) or [label]


def _best(result: SearchResult) -> Iterator[tuple[str, str]]:
    best = result.best
    if best is None:
        yield "best", "none: no candidate computed this right"
        return
    yield "best", f"{describe_time(best)}   {best.family}: {config_text(best, result.target)}"
    if best.resources:
        sram, capacity = best.resources.sram_bytes, result.target.sram_per_block
        spills = f", {best.resources.spill_bytes} B spilled" if best.resources.spill_bytes else ""
        registers = best.resources.registers
        yield "", f"{sram:,} of {capacity:,} B of SRAM, {registers} registers a thread{spills}"
    if not result.is_selected:
        yield "", "not selected: what was selected before is faster, or was measured"
    if best.measurement and best.measurement.throttled:
        yield "", "the clock was held down while timing: compare within this run only"
    if best.provenance is Provenance.PREDICTED:
        yield "", "predicted by a model, not measured: dispatch will not take it for a measurement"


def _fallback(result: SearchResult) -> Iterator[tuple[str, str]]:
    record = result.fallback
    if record is None or record.config is None:
        return
    yield "other strides", f"{describe_time(record)}   {record.family}: {config_text(record, result.target)}"


def _rivals(result: SearchResult) -> Iterator[tuple[str, str]]:
    best = result.best
    if best is None or not best.ms:
        return
    if result.default and result.default.ms and result.default.config:
        yield "default", _against(result.default.ms, best.ms)
    for peer in best.measurement.peers if best.measurement else ():
        yield peer.name, _against(peer.ms, best.ms)


def _against(ms: float, best_ms: float) -> str:
    return f"{ms:.4f} ms: the best is {ms / best_ms:.2f} times as fast"


def describe_time(record: Record) -> str:
    """Describes a record's time, its speed in the problem's unit, and whether it is predicted."""
    if not record.ms:
        return "no time"
    speed = f"{rate(record.problem, record.ms):.0f} {unit_of(record.problem)}"
    spread = ""
    measurement = record.measurement
    if measurement and measurement.samples:
        spread = f" ({measurement.p20:.4f} to {measurement.p80:.4f})"
    predicted = " predicted" if record.provenance is Provenance.PREDICTED else ""
    return f"{record.ms:.4f} ms{spread}{predicted}, {speed}"


def _tried(result: SearchResult) -> str:
    tally = result.counts
    right = tally.outcomes.get(Outcome.OK, 0)
    reused = f", {tally.reused} known from before" if tally.reused else ""
    return (
        f"{tally.tried} of {result.candidates} candidates in {result.seconds:.0f} s: {right} ok, "
        f"{tally.tried - right} failed{reused}; stopped because {result.stop.value}"
    )


def next_command(result: SearchResult, db: str | None = None) -> str:
    """Returns the command for details: why the best kernel is fast, or why all candidates failed."""
    command = "explain" if result.best else "show --records"
    offline = result.provenance is Provenance.PREDICTED
    target = f" --target {result.target.short_name}" if offline else ""
    database = f" --db {shlex.quote(without_password(db))}" if db else ""
    return f'flashtune {command} --shape "{shape_text(result.problem)}"{target}{database}'
