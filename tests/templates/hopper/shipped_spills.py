"""Prints shipped records of Hopper families with spilled registers or serialised products.

python -m tests.templates.hopper.shipped_spills
"""

import sys
from collections.abc import Iterator
from typing import NamedTuple

import click

from flashtune.core.record import Resources
from tests.support.records import shipped_table_of

GPUS = ("nvidia-h100", "nvidia-h200")
FAMILIES = ("forward_hopper", "backward_hopper")


class Compiled(NamedTuple):
    """A shipped kernel and what the compiler reported of it."""

    gpu: str
    family: str
    problem: str
    resources: Resources


def shipped_kernels() -> Iterator[Compiled]:
    """The kernels of all shipped records of the Hopper families."""
    for gpu in GPUS:
        table = shipped_table_of(gpu)
        for record in table.records:
            if record.family in FAMILIES:
                assert record.resources is not None, record.problem.key
                yield Compiled(gpu, record.family, record.problem.key, record.resources)


def main() -> int:
    """Prints the kernels, the most spilled bytes first, and counts them."""
    kernels = list(shipped_kernels())
    slow = [kernel for kernel in kernels if kernel.resources.spill_bytes or kernel.resources.serialized_wgmma]
    for kernel in sorted(slow, key=lambda entry: (entry.gpu, entry.family, -entry.resources.spill_bytes)):
        note = "  serialised" if kernel.resources.serialized_wgmma else ""
        click.echo(
            f"{kernel.gpu}  {kernel.family}  {kernel.resources.spill_bytes:3} B  {kernel.problem}{note}"
        )
    spilling = sum(kernel.resources.spill_bytes > 0 for kernel in kernels)
    serialized = sum(kernel.resources.serialized_wgmma for kernel in kernels)
    click.echo(f"{len(kernels)} kernels: {spilling} spill, {serialized} have serialised products")
    return 0


if __name__ == "__main__":
    sys.exit(main())
