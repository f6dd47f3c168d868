"""Runs the shipped kernels and random ones of every family under NVIDIA's compute-sanitizer.

    python -m scripts.sanitize --seconds 500                         # memcheck and racecheck
    python -m scripts.sanitize --tool synccheck --samples 20
    python -m scripts.sanitize --load FILE                           # prints a saved report; needs no GPU

An interrupted run has written its results, and the same command continues it. docs/sanitizer.md describes the
limits of each tool for asynchronous copies.
"""

import argparse
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

from benchmarks.sanitizer.points import subjects
from benchmarks.sanitizer.report import Listed, SanitizerReport, report_lines
from benchmarks.sanitizer.runner import MEMCHECK, RACECHECK, TOOLS, Examination, examine, find_sanitizer
from benchmarks.saved import RESULTS, decoded, write
from flashtune.core.errors import FlashtuneError, UsageError
from flashtune.core.target import device_target
from flashtune.templates.registry import find_family
from flashtune.tuner.execution.cpus import available_cpus

VERSION = re.compile(r"Version (\d+)\.(\d+).*")
# Earlier versions do not support barriers of some warps of a block, by the release notes.
PARTIAL_BARRIERS = (2026, 1)


def main() -> None:
    """Runs the tools or loads a report, and prints the report."""
    parser = argparse.ArgumentParser(description="Kernels under compute-sanitizer.")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="memcheck and racecheck if left out")
    parser.add_argument("--samples", type=int, default=50, help="random configs of each family")
    parser.add_argument("--seed", type=int, default=0, help="of the random configs")
    parser.add_argument("--seconds", type=float, default=500.0, help="limit of the run, compiling included")
    parser.add_argument("--jobs", type=int, default=available_cpus(), help="processes at a time")
    parser.add_argument("--out", type=Path, help="where to write; a name in benchmarks/results if left out")
    parser.add_argument("--load", type=Path, metavar="FILE", help="print a saved report")
    options = parser.parse_args()
    try:
        report = decoded(options.load, SanitizerReport) if options.load else _examine(options)
    except FlashtuneError as error:
        sys.exit(f"error: {error}")
    print(*report_lines(report), sep="\n")
    if any(finding.errors or finding.failed for finding in report.findings):
        sys.exit(1)


def why_left_out(tool: str, family: str, version: str) -> str:
    """Returns the reason to skip a family's kernels with a tool, or an empty text.

    Args:
        tool: The tool.
        family: The family's name.
        version: Output of the sanitizer, such as `Version 2025.3.1.0 (build ...)`.
    """
    match = VERSION.search(version)
    supported = match is not None and (int(match[1]), int(match[2])) >= PARTIAL_BARRIERS
    # The interpreter runs all families but those with specialised warps.
    if tool != RACECHECK or supported or find_family(family).interpreted:
        return ""
    return "its warps are specialised, and racecheck supports their barriers since 2026.1"


def _examine(options: argparse.Namespace) -> SanitizerReport:
    """Runs each tool with its share of the time, and writes the report after each finding."""
    import triton

    until = time.time() + options.seconds
    sanitizer, target = find_sanitizer(), device_target(0)
    output = subprocess.run([str(sanitizer), "--version"], capture_output=True, text=True, check=False).stdout
    match = VERSION.search(output)
    report = SanitizerReport(target.name, match[0] if match else "unknown", triton.__version__)
    path = options.out or RESULTS / f"{target.name}-sanitizer.json.gz"
    if path.exists():
        earlier = decoded(path, SanitizerReport)
        if msgspec.structs.replace(earlier, findings=(), listed=()) != report:
            raise UsageError(f"{path} is of another GPU, sanitizer or Triton: choose another file with --out")
        report = earlier
    kernels = {subject.digest: subject for subject in subjects(target, options.samples, options.seed)}
    count = Counter(subject.candidate.family for subject in kernels.values())
    shipped = Counter(subject.candidate.family for subject in kernels.values() if subject.shipped)
    tools = options.tool or [MEMCHECK, RACECHECK]
    for index, tool in enumerate(tools):
        listed = tuple(
            Listed(tool, name, count[name], shipped[name], why_left_out(tool, name, report.sanitizer))
            for name in sorted(count)
        )
        findings = tuple(row for row in report.findings if row.tool != tool or row.digest in kernels)
        others = tuple(row for row in report.listed if row.tool != tool)
        report = msgspec.structs.replace(report, findings=findings, listed=(*others, *listed))
        skipped = {row.family for row in listed if row.left_out}
        done = {row.digest for row in findings if row.tool == tool}
        left = [
            subject
            for digest, subject in kernels.items()
            if digest not in done and subject.candidate.family not in skipped
        ]
        print(f"{tool}: {len(left)} of {len(kernels)} kernels to run", flush=True)
        write(path, msgspec.json.encode(report))
        limit = time.time() + (until - time.time()) / (len(tools) - index)
        for finding in examine(Examination(sanitizer, tool, target, options.jobs, limit), left):
            report = msgspec.structs.replace(report, findings=(*report.findings, finding))
            write(path, msgspec.json.encode(report))
    return report


if __name__ == "__main__":
    main()
