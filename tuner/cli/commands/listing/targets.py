"""`flashtune targets`: the values of `--target`."""

from pathlib import Path

import click

from flashtune.core.errors import UsageError
from flashtune.tuner.cli.command import flashtune_command
from flashtune.tuner.cli.options import file_option, json_option
from flashtune.tuner.cli.output import print_json, print_rows, quantity
from flashtune.tuner.cli.report.chart_report import show_charts

HEADS = ("target", "arch", "SRAM a block", "SRAM an SM", "SMs", "L2", "GB/s", "TFLOP/s, 16 bits", "table")


@flashtune_command(
    "targets",
    "flashtune targets",
    "flashtune targets --details",
    "flashtune search --target h100 --model llama-3.1-8b",
)
@click.option("--details", is_flag=True, help="The memory of each GPU, from registers to HBM, with sources.")
@file_option("plot", "With --details: also draw the figure to FILE, as a web page. Needs plotly.")
@json_option
def command(details: bool, plot_file: Path | None, as_json: bool) -> None:
    """List the GPUs that --target knows, and whether a tuned table ships for each.

    Their properties are from datasheets. A GPU of this machine needs no entry: its properties are read from
    the device.
    """
    from flashtune.core.target import TARGETS
    from flashtune.db.table import shipped_table

    if details:
        from flashtune.tuner.analysis.memory_levels import memory_levels

        show_charts(memory_levels(), plot_file, as_json)
        return
    if plot_file is not None:
        raise UsageError("--plot draws the memory of each GPU: add --details")
    if as_json:
        print_json(TARGETS)
        return
    rows = [
        (
            target.short_name,
            target.arch,
            quantity(target.sram_per_block),
            quantity(target.sram_per_sm),
            str(target.sm_count),
            quantity(target.l2_bytes),
            f"{target.hbm_bandwidth:,.0f}",
            f"{target.peak.half:,.0f}",
            "ships" if shipped_table(target.name) else "",
        )
        for target in TARGETS
    ]
    print_rows(HEADS, rows)
