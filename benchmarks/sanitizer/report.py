"""The findings of compute-sanitizer by kernel, and their table."""

from collections.abc import Iterator

import msgspec

from flashtune.tuner.cli.output import table

MAX_REPORTS = 10
OUTCOMES = ("clean", "errors", "warnings", "failed", "refused")


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The finding of one tool for one kernel."""

    tool: str
    digest: str
    family: str
    label: str
    shipped: bool  # Whether the kernel is in a shipped table.
    errors: int = 0  # Number of errors, and of hazards that the tool counts as errors.
    warnings: int = 0  # Number of hazards of a lower level.
    failed: str = ""  # Why there is no result, or empty.
    first: str = ""  # The first report, or empty.
    refused: str = ""  # The compiler's error, or empty.

    @property
    def outcome(self) -> str:
        """The column of the table that counts it."""
        return next((name for name in reversed(OUTCOMES[1:]) if getattr(self, name)), "clean")


class Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of a family's kernels that a tool should run, and why it runs none, if so."""

    tool: str
    family: str
    kernels: int
    shipped: int
    left_out: str = ""


class SanitizerReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The findings and the listed kernels, with the versions."""

    target: str
    sanitizer: str
    triton: str
    findings: tuple[Finding, ...] = ()
    listed: tuple[Listed, ...] = ()


def report_lines(report: SanitizerReport) -> Iterator[str]:
    """Yields the lines of the report in Markdown: the table, families left out, and the first findings."""
    yield f"On an {report.target}, Triton {report.triton}, compute-sanitizer {report.sanitizer}:"
    yield ""
    heads = ("nothing found", "errors in", "warnings in", "no verdict", "did not compile", "not run")
    rows = []
    for row in report.listed:
        outcomes = [
            finding.outcome
            for finding in report.findings
            if (finding.tool, finding.family) == (row.tool, row.family)
        ]
        counts = (row.kernels, row.shipped, *map(outcomes.count, OUTCOMES), row.kernels - len(outcomes))
        rows.append((row.tool, row.family, *map(str, counts)))
    yield from table(("tool", "family", "kernels", "shipped ones", *heads), rows)
    yield ""
    for row in report.listed:
        if row.left_out:
            yield f"- {row.tool} leaves out {row.family}: {row.left_out}."
    reports = dict.fromkeys(finding.first or finding.failed for finding in report.findings)
    yield from (f"- {text}" for text in list(filter(None, reports))[:MAX_REPORTS])
