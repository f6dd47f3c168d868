"""Output of `flashtune verify`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from flashtune.tuner.cli.output import is_set, note, printable, say

if TYPE_CHECKING:
    from flashtune.tuner.tables.admission import Receipt
    from flashtune.tuner.verify.record_checks import Report

MAX_SHOWN = 20


def counts_of(report: Report) -> dict[str, int]:
    """Returns the number of kernels by kind of comparison, and of those that failed or were missed."""
    from flashtune.tuner.verify.record_checks import CheckMethod

    counts = {means.value: report.count(means) for means in CheckMethod}
    return {
        "kernels": len(report.results),
        **counts,
        "failed": len(report.failures),
        "missed": report.missed,
        "baselines": report.baselines,
    }


def _source(receipt: Receipt) -> str:
    versions = f"Triton {receipt.triton}, ptxas {receipt.ptxas}, torch {receipt.torch}"
    return printable(f"{receipt.device}, driver {receipt.driver}, {versions}")


def print_report(report: Report) -> None:
    """Prints the counts, the receipts and the failures."""
    from flashtune.templates.registry import find_family
    from flashtune.tuner.verify.record_checks import CheckMethod

    counts = counts_of(report)
    total = counts["kernels"]
    say(
        f"of {total} selected kernels {counts['gpu'] + counts['interpreter']} were checked here "
        f"({counts['gpu']} on the GPU, {counts['interpreter']} under the interpreter), "
        f"{counts['receipt']} by receipt alone and {counts['none']} not at all; {counts['failed']} failed"
    )
    by_receipt = {result.family for result in report.results if result.means is CheckMethod.RECEIPT}
    alone = sorted(name for name in by_receipt if not find_family(name).interpreted)
    if alone:
        say(f"no interpreter runs {' or '.join(alone)}: without its GPU a receipt is all there is")
    receipts = Counter(_source(result.receipt) for result in report.results if result.receipt)
    for source, count in sorted(receipts.items()):
        say(f"{count} of {total} have a receipt: {source}")
    if report.missed:
        say(f"{report.missed} more were not reached before the run ended")
    if report.baselines:
        say(f"{report.baselines} selections are torch's own and were not checked")
    if is_set("verbose"):
        for result in report.results:
            note(f"{result.problem} on {result.target}: {result.failed or 'passed'} ({result.means.value})")
    for result in report.failures[:MAX_SHOWN]:
        say(f"failed: {result.problem} on {result.target}: {result.failed}")
    if len(report.failures) > MAX_SHOWN:
        note(f"{len(report.failures) - MAX_SHOWN} more failed: --json lists them all")
