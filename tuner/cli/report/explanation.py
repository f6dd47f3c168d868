"""Prints an `Explanation`."""

from rich.console import Console
from rich.table import Table

from flashtune.core.notices import search_command
from flashtune.templates.config_text import default_label, differing_axes
from flashtune.tuner.analysis.explain import Explanation, Roofline, SramBudget, Traffic
from flashtune.tuner.cli.output import plain, print_heading, quantity


def print_explanation(out: Console, explanation: Explanation, top: int) -> None:
    """Prints one explanation with the best `top` candidates."""
    print_heading(out, f"{explanation.problem.key} on {explanation.target}")
    out.print(plain(f"{explanation.family}: {explanation.config.label()}"))
    if explanation.order is not None:
        out.print(plain(f"Order of arithmetic: {explanation.order}"))
    out.print(plain(_origin(explanation)))
    out.print()
    out.print(_sram_table(explanation.sram))
    out.print(_roofline_line(explanation.roofline))
    out.print()
    out.print(_traffic_table(explanation.traffic))
    out.print(plain(_occupancy_line(explanation)))
    out.print()
    if explanation.candidates or explanation.failures:
        out.print(_rivals_table(explanation, top))
        out.print(plain(_failures_line(explanation, top)))
    else:
        out.print(plain(f"No candidate of this shape is stored: run {search_command(explanation.problem)}"))
    out.print()


def _origin(explanation: Explanation) -> str:
    origins = {
        "command line": "Named on the command line.",
        "database": "Selected in the database.",
        "shipped": "Selected in the table that ships.",
        "estimated": f"Selected for {explanation.tuned_for}: the lowest estimated time at this shape.",
        "default": "The default: nothing is selected for this shape.",
    }
    time = "" if explanation.ms is None else f" {explanation.ms:.4f} ms, {explanation.provenance}."
    share = ""
    if explanation.ms:
        share = f" That is {explanation.roofline.bound_ms / explanation.ms:.0%} of the roofline."
    return origins[explanation.source] + time + share


def _sram_table(sram: SramBudget) -> Table:
    table = _table("SRAM of one block", "bytes", "of capacity")
    for item in sram.items:
        table.add_row(plain(item.name), f"{item.bytes:,}", f"{item.bytes / sram.capacity:.1%}")
    table.add_section()
    table.add_row("model, at the least", f"{sram.modelled:,}", f"{sram.modelled / sram.capacity:.1%}")
    if sram.compiled is not None:
        table.add_row("compiled", f"{sram.compiled:,}", f"{sram.compiled / sram.capacity:.1%}")
    table.add_row("capacity", f"{sram.capacity:,}", "")
    if sram.tensor_memory_capacity:
        share = sram.tensor_memory_columns / sram.tensor_memory_capacity
        columns = f"{sram.tensor_memory_columns} of {sram.tensor_memory_capacity}"
        table.add_row("tensor memory columns", columns, f"{share:.1%}")
    return table


def _roofline_line(roofline: Roofline) -> str:
    return (
        f"Roofline: at least {roofline.bound_ms:.4f} ms, bound by {roofline.bound_by} "
        f"(matrix units {roofline.matrix_ms:.4f}, softmax {roofline.softmax_ms:.4f}, "
        f"memory {roofline.memory_ms:.4f}). "
        f"{roofline.flops / 1e9:,.1f} GFLOP over at least {quantity(roofline.minimal_bytes)}: "
        f"{roofline.intensity:,.0f} FLOP per byte, and memory bounds below {roofline.ridge:,.0f}."
    )


def _traffic_table(ways: tuple[Traffic, ...]) -> Table:
    table = _table("HBM traffic", "bytes", "of this kernel's")
    least = max(ways[0].bytes, 1)
    for way in ways:
        table.add_row(f"[bold]{plain(way.name)}[/bold]", quantity(way.bytes), f"{way.bytes / least:,.1f}x")
        for item in way.items:
            table.add_row(f"  {plain(item.name)}", quantity(item.bytes), "")
    return table


def _occupancy_line(explanation: Explanation) -> str:
    resources, resident = explanation.resources, explanation.occupancy
    if resources is None or resident is None:
        return f"Occupancy: unknown, since the compiler refused the kernel ({explanation.compile_error})."
    if resident.blocks == 0:
        return f"Occupancy: none, since one block exceeds the {resident.limit} of a multiprocessor."
    serialized = " Matrix instructions are serialised." if resources.serialized_wgmma else ""
    return (
        f"Occupancy: {resident.blocks} blocks of {resident.warps // resident.blocks} warps on a "
        f"multiprocessor, limited by {resident.limit}; {resources.registers} registers a thread, "
        f"{resources.spill_bytes} bytes spilled.{serialized}"
    )


def _rivals_table(explanation: Explanation, top: int) -> Table:
    """Returns the fastest candidates, with the axes in which they differ from their family's default."""
    table = _table("Candidates", "ms", "of the best", "", "config")
    rivals = explanation.candidates[:top]
    for rival in rivals:
        default = default_label(rival.family, explanation.problem, explanation.target) if rival.config else ""
        table.add_row(
            plain(rival.family),
            f"{rival.ms:.4f}",
            f"{rival.ms / rivals[0].ms:.2f}x" if rivals[0].ms else "",
            rival.provenance.value,
            plain(differing_axes(rival.config, default)),
        )
    return table


def _failures_line(explanation: Explanation, top: int) -> str:
    more = len(explanation.candidates) - top
    hidden = f"{more} more ended well. " if more > 0 else ""
    failed = ", ".join(f"{count} {outcome.value}" for outcome, count in explanation.failures.items())
    return hidden + (f"Not chosen because they failed: {failed}." if failed else "None failed.")


def _table(title: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(title)
    for column in columns:
        is_text = column in ("", "config")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text)
    return table
