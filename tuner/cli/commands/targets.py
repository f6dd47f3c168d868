"""`flashtune targets`: the values of `--target`."""

from flashtune.tuner.cli.command import flashtune_command
from flashtune.tuner.cli.options import json_option
from flashtune.tuner.cli.output import print_json, print_rows, quantity

HEADS = ("target", "arch", "SRAM a block", "SRAM an SM", "SMs", "L2", "GB/s", "TFLOP/s, 16 bits", "table")


@flashtune_command("targets", "flashtune targets", "flashtune search --target h100 --model llama-3.1-8b")
@json_option
def command(as_json: bool) -> None:
    """List the GPUs that --target knows, and whether a tuned table ships for each.

    Their properties are from datasheets. A GPU of this machine needs no entry: its properties are read from
    the device.
    """
    from flashtune.core.target import TARGETS
    from flashtune.db.table import shipped_table

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
