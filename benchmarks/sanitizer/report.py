"""Report of a sanitizer's findings by kernel, and of the finished part of a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from benchmarks.sanitizer.sanitizing import Subject, why_left_out
from flashtune.core.record import ShortText

MAX_TOLD = 10


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The finding of one tool for one kernel.

    Attributes:
        tool: The tool.
        digest: The kernel's.
        family: Its family.
        label: A description of the kernel.
        shipped: Whether it ships.
        errors: Errors, of hazards those that the tool counts as errors.
        warnings: Hazards of a lower level.
        failed: The reason for a missing result, or empty.
        first: The first report, empty without one.
        refused: The compiler's error, or empty.
    """

    tool: ShortText
    digest: ShortText
    family: ShortText
    label: str
    shipped: bool
    errors: int = 0
    warnings: int = 0
    failed: str = ""
    first: str = ""
    refused: str = ""

    @property
    def outcome(self) -> str:
        """The column of the table that it counts in."""
        named = {
            "refused": self.refused,
            "failed": self.failed,
            "errors": self.errors,
            "warnings": self.warnings,
        }
        return next((name for name, said in named.items() if said), "clean")


class SanitizerRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many kernels of a family a tool was to look at, and why it was not, if it was not."""

    tool: ShortText
    family: ShortText
    kernels: int
    shipped: int
    left_out: str = ""


class SanitizerReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All findings, the requests, and the versions."""

    target: ShortText
    sanitizer: ShortText
    triton: ShortText
    findings: tuple[Finding, ...]
    asked: tuple[SanitizerRequest, ...] = ()

    def asking(self, tool: str, listed: Sequence[Subject]) -> tuple[SanitizerReport, tuple[Subject, ...]]:
        """Updates the requests of a tool; returns the new report, and the remaining subjects.

        Findings of kernels that are no longer listed are dropped.
        """
        digests = {subject.digest for subject in listed}
        kept = tuple(one for one in self.findings if one.tool != tool or one.digest in digests)
        asked = _asked(tool, self.sanitizer, listed)
        others = tuple(one for one in self.asked if one.tool != tool)
        left_out = {one.family for one in asked if one.left_out}
        known = {one.digest for one in kept if one.tool == tool}
        left = tuple(
            subject
            for subject in listed
            if subject.candidate.family not in left_out and subject.digest not in known
        )
        return msgspec.structs.replace(self, findings=kept, asked=(*others, *asked)), left


def _asked(tool: str, sanitizer: str, listed: Sequence[Subject]) -> tuple[SanitizerRequest, ...]:
    families = sorted({subject.candidate.family for subject in listed})
    asked = []
    for family in families:
        shipped = [subject.shipped for subject in listed if subject.candidate.family == family]
        asked.append(
            SanitizerRequest(tool, family, len(shipped), sum(shipped), why_left_out(tool, family, sanitizer))
        )
    return tuple(asked)


def _unasked(report: SanitizerReport) -> Iterator[SanitizerRequest]:
    """The requests of a report without requests: all of them were run."""
    asked = {(one.tool, one.family) for one in report.asked}
    found: dict[tuple[str, str], list[bool]] = {}
    for one in report.findings:
        if (one.tool, one.family) not in asked:
            found.setdefault((one.tool, one.family), []).append(one.shipped)
    return (SanitizerRequest(*named, len(shipped), sum(shipped)) for named, shipped in found.items())


def report_lines(report: SanitizerReport) -> Iterator[str]:
    """The report in Markdown: a table, omitted families, and the first findings."""
    yield f"On an {report.target}, Triton {report.triton}, compute-sanitizer {report.sanitizer}:"
    yield ""
    yield (
        "| tool | family | kernels | shipped ones | nothing found | errors in | warnings in | no verdict "
        "| did not compile | not run |"
    )
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for one in sorted((*report.asked, *_unasked(report)), key=lambda one: (one.tool, one.family)):
        outcomes = [
            finding.outcome
            for finding in report.findings
            if (finding.tool, finding.family) == (one.tool, one.family)
        ]
        columns = ("clean", "errors", "warnings", "failed", "refused")
        counts = (one.kernels, one.shipped, *map(outcomes.count, columns), one.kernels - len(outcomes))
        yield f"| {one.tool} | {one.family} | {' | '.join(map(str, counts))} |"
    reasons = {(one.tool, one.left_out): "" for one in report.asked if one.left_out}
    for tool, reason in reasons:
        names = ", ".join(one.family for one in report.asked if (one.tool, one.left_out) == (tool, reason))
        yield ""
        yield f"Left out of {tool}: {names} ({reason})."
    told = dict.fromkeys(finding.first or finding.failed for finding in report.findings)
    reports = [text for text in told if text]
    if reports:
        yield ""
        yield "What was found first:"
        yield ""
        yield from (f"- {text}" for text in reports[:MAX_TOLD])
