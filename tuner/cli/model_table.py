"""A model's attention over sequence length as a person reads it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from flashtune.tuner.cli.output import plain, quantity
from flashtune.tuner.model_overview import Overview, Way
from flashtune.tuner.model_sizes import Phase

WHAT = {
    Phase.PREFILL: "of a whole prompt",
    Phase.DECODE: "of one new token of each sequence",
    Phase.TRAINING: "on whole sequences, both passes",
}


def print_overview(out: Console, overview: Overview) -> None:
    """Prints one overview."""
    title = (
        f"{overview.model}, {overview.phase.value} {WHAT[overview.phase]} on {overview.target}: "
        f"{overview.layers} layers, batch {overview.batch}, {overview.dtype.value}"
    )
    out.rule(plain(title), align="left")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    heads = ("layer memory", "HBM traffic", "at least, ms", "bound by")
    pairs = (f"{head}\n{way}" for head in heads for way in ("standard", "flash"))
    for name in ("length", "KV", *pairs):
        table.add_column(name, justify="right")
    table.add_column("speed-up", justify="right")
    for point in overview.points:
        table.add_row(
            f"{point.seqlen:,}",
            quantity(point.kv_bytes),
            *_pair(point.standard, point.flash),
            f"{point.speedup:.1f}x",
        )
    out.print(table)
    families = ", ".join(dict.fromkeys(family for point in overview.points for family in point.families))
    out.print(
        plain(
            f"Flash is {families}; of what is read again, the share that misses L2 counts. KV "
            "(contiguous), traffic and times are of all layers. At least: by peak rates and the bytes that "
            "cannot be saved; speed-up is of these, and not measured."
        )
    )
    out.print()


def _pair(standard: Way, flash: Way) -> tuple[str, ...]:
    both = (standard, flash)
    return (
        *(quantity(way.memory) for way in both),
        *(quantity(way.traffic) for way in both),
        *(f"{way.bound_ms:,.3f}" for way in both),
        *(way.bound_by for way in both),
    )
