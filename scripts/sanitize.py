"""Runs the shipped kernels and random ones of every family under NVIDIA's compute-sanitizer.

    python scripts/sanitize.py --seconds 500                         # memcheck and racecheck
    python scripts/sanitize.py --tool synccheck --samples 20
    python scripts/sanitize.py --load FILE --write docs/sanitizer.md # fills in the page; needs no GPU

Kernels are compiled on all cores first, then many run in one process under the tool; where it finds
something, each kernel of that process runs again by itself. A run that is cut short has written what it had,
and the same command goes on from there. What each tool sees of asynchronous copies: docs/sanitizer.md.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from flashtune.errors import FlashtuneError, UsageError
from flashtune.target import device_target
from flashtune.tuner.pages import filled
from flashtune.tuner.reports import read_report, write_report
from flashtune.tuner.sanitizing import (
    MEMCHECK,
    RACECHECK,
    TOOLS,
    Finding,
    SanitizerReport,
    find_sanitizer,
    subjects,
)

RESULTS = Path("benchmarks/results")
JOBS = 4
BEGIN, END = "<!-- sanitizer: written by scripts/sanitize.py -->", "<!-- end of sanitizer -->"


def main() -> None:
    """Runs or loads, prints and writes."""
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.work is not None:
            _work(options)
            return
        report = read_report(options.load, SanitizerReport) if options.load else _examined(options)
    except FlashtuneError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: what was found is written")
    text = "\n".join(_lines(report))
    print(text)
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        options.write.write_text(filled(page, BEGIN, END, text), encoding="utf-8")
    if any(finding.errors or finding.failed for finding in report.findings):
        sys.exit(1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kernels under compute-sanitizer.")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="memcheck and racecheck if left out")
    parser.add_argument("--samples", type=int, default=50, help="random configs of each family")
    parser.add_argument("--seed", type=int, default=0, help="of the random configs")
    parser.add_argument("--seconds", type=float, default=500.0, help="limit of the run, compiling included")
    parser.add_argument("--jobs", type=int, default=JOBS, help="processes at a time")
    parser.add_argument("--out", type=Path, help="where to write; a name in benchmarks/results if left out")
    parser.add_argument("--load", type=Path, metavar="FILE", help="print what was found before")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table between the page's marks")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser.parse_args()


def _work(options: argparse.Namespace) -> None:
    """What runs under the tool: each kernel of some numbers, once."""
    import torch

    from flashtune.tuner.sanitizing_run import launch_once

    target = device_target(0)
    listed = subjects(target, options.samples, options.seed, busy=options.tool == [MEMCHECK])
    for number in options.work.split(","):
        launch_once(listed[int(number)], target, torch.device("cuda", 0))


def _examined(options: argparse.Namespace) -> SanitizerReport:
    import triton

    from flashtune.tuner.sanitizing_run import Examination, examine, runnable

    until = time.monotonic() + options.seconds
    sanitizer = find_sanitizer()
    target = device_target(0)
    path = options.out or RESULTS / f"{target.name}-sanitizer.json.gz"
    report = SanitizerReport(target.name, _version(sanitizer), triton.__version__, ())
    if path.exists():
        before = read_report(path, SanitizerReport)
        if msgspec.structs.replace(before, findings=()) != report:
            raise UsageError(f"{path} is of another GPU, sanitizer or Triton: name another file by --out")
        report = before
    for tool in options.tool or (MEMCHECK, RACECHECK):
        listed = subjects(target, options.samples, options.seed, busy=tool == MEMCHECK)
        digests = runnable(listed, target, options.samples)
        known = {finding.digest for finding in report.findings if finding.tool == tool}
        left = {number: digest for number, digest in digests.items() if digest not in known}
        print(f"{tool}: {len(left)} of {len(digests)} kernels left", flush=True)

        def program(numbers: Iterable[int], tool: str = tool) -> list[str]:
            given = ["--tool", tool, "--samples", str(options.samples), "--seed", str(options.seed)]
            chosen = ",".join(map(str, numbers))
            return [sys.executable, str(Path(__file__).resolve()), *given, "--work", chosen]

        for findings in examine(Examination(sanitizer, tool, program, until, options.jobs), listed, left):
            report = msgspec.structs.replace(report, findings=(*report.findings, *findings))
            write_report(report, path)
            done = sum(finding.tool == tool for finding in report.findings)
            print(f"{tool}: {done} of {len(digests)} kernels done", flush=True)
    return report


def _version(sanitizer: Path) -> str:
    """The last line of what it says of itself, such as `Version 2025.4.0.0 (build ...)`."""
    said = subprocess.run([str(sanitizer), "--version"], capture_output=True, text=True, check=False)
    return next((line for line in said.stdout.splitlines() if line.startswith("Version")), "unknown")


def _lines(report: SanitizerReport) -> Iterator[str]:
    yield f"On an {report.target}, Triton {report.triton}, compute-sanitizer {report.sanitizer}:"
    yield ""
    yield "| tool | family | kernels | shipped ones | nothing found | errors in | warnings in | not run |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for (tool, family), findings in _grouped(report.findings).items():
        errors = sum(finding.errors > 0 for finding in findings)
        warned = sum(finding.errors == 0 < finding.warnings for finding in findings)
        failed = sum(bool(finding.failed) for finding in findings)
        shipped = sum(finding.shipped for finding in findings)
        clean = len(findings) - errors - warned - failed
        counts = (len(findings), shipped, clean, errors, warned, failed)
        yield f"| {tool} | {family} | {' | '.join(map(str, counts))} |"
    told = dict.fromkeys(finding.first or finding.failed for finding in report.findings)
    reports = [text for text in told if text]
    if reports:
        yield ""
        yield "What was found first:"
        yield ""
        yield from (f"- {text}" for text in reports[:10])


def _grouped(findings: Iterable[Finding]) -> dict[tuple[str, str], list[Finding]]:
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.tool, finding.family), []).append(finding)
    return dict(sorted(groups.items()))


if __name__ == "__main__":
    main()
