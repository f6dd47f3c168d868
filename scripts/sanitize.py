"""Runs the shipped kernels and random ones of every family under NVIDIA's compute-sanitizer.

    python -m scripts.sanitize --seconds 500                         # memcheck and racecheck
    python -m scripts.sanitize --tool synccheck --samples 20
    python -m scripts.sanitize --load FILE                           # prints a saved report; needs no GPU

Kernels are compiled and run on all cores, many per process, alternating between families. If a report does
not name a kernel, each kernel of its process runs again alone. An interrupted run has written its results,
and the same command continues it. docs/sanitizer.md describes the limits of each tool for asynchronous
copies.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from benchmarks.reports import read_report, write_report
from benchmarks.sanitizer.points import cases_of, subjects
from benchmarks.sanitizer.report import SanitizerReport, report_lines
from benchmarks.sanitizer.sanitizing import (
    MEMCHECK,
    RACECHECK,
    TOOLS,
    Subject,
    find_sanitizer,
)
from flashtune.core.errors import FlashtuneError, UsageError
from flashtune.core.target import Target, device_target
from flashtune.tuner.execution.cpus import available_cpus

RESULTS = Path("benchmarks/results")


def main() -> None:
    """Runs or loads, and prints."""
    options = _options()
    try:
        if options.work is not None:
            sys.exit(_work(options))
        report = read_report(options.load, SanitizerReport) if options.load else _examined(options)
    except FlashtuneError as error:
        sys.exit(f"error: {error}")
    print(*report_lines(report), sep="\n")
    if any(finding.errors or finding.failed for finding in report.findings):
        sys.exit(1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kernels under compute-sanitizer.")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="memcheck and racecheck if left out")
    parser.add_argument("--samples", type=int, default=50, help="random configs of each family")
    parser.add_argument("--seed", type=int, default=0, help="of the random configs")
    parser.add_argument("--seconds", type=float, default=500.0, help="limit of the run, compiling included")
    parser.add_argument("--jobs", type=int, default=available_cpus(), help="processes at a time")
    parser.add_argument("--out", type=Path, help="where to write; a name in benchmarks/results if left out")
    parser.add_argument("--load", type=Path, metavar="FILE", help="print what was found before")
    parser.add_argument("--work", nargs=3, metavar=("NAME", "UNTIL", "FOLDER"), help=argparse.SUPPRESS)
    return parser.parse_args()


def _work(options: argparse.Namespace) -> int:
    """Runs under the tool: each kernel of a folder, once."""
    import torch

    from benchmarks.sanitizer.tensors import launch_once
    from benchmarks.sanitizer.work import WorkQueue, work

    name, until, folder = options.work
    target = device_target(0)

    def launch(subject: Subject) -> None:
        kernel = subject.kernel
        for case in cases_of(subject, target, busy=options.tool == [MEMCHECK]):
            launch_once(kernel, case, target, torch.device("cuda", 0))

    return work(WorkQueue(Path(folder)), name, float(until), launch)


def _examined(options: argparse.Namespace) -> SanitizerReport:
    """Runs both tools, each with its share of the time."""
    import triton

    until = time.time() + options.seconds
    stopped = threading.Event()
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, lambda *_: stopped.set())
    sanitizer = find_sanitizer()
    target = device_target(0)
    path = options.out or RESULTS / f"{target.name}-sanitizer.json.gz"
    report = SanitizerReport(target.name, _version(sanitizer), triton.__version__, ())
    if path.exists():
        before = read_report(path, SanitizerReport)
        if msgspec.structs.replace(before, findings=(), asked=()) != report or not before.asked:
            raise UsageError(
                f"{path} is of another GPU, sanitizer, Triton or script than this one: name another by --out"
            )
        report = before
    tools = options.tool or [MEMCHECK, RACECHECK]
    for number, tool in enumerate(tools):
        share = (until - time.time()) / (len(tools) - number)
        how = (options, target, sanitizer, tool, time.time() + share, stopped)
        report = _by_tool(report, path, *how)
    return report


def _by_tool(
    report: SanitizerReport,
    path: Path,
    options: argparse.Namespace,
    target: Target,
    sanitizer: Path,
    tool: str,
    until: float,
    stopped: threading.Event,
) -> SanitizerReport:
    """Returns the report of one tool within its time. Writes it after each kernel."""
    from benchmarks.sanitizer.runner import Examination, examine

    listed = subjects(target, options.samples, options.seed)
    report, left = report.asking(tool, listed)
    print(f"{tool}: {len(left)} of {len(listed)} kernels to go", flush=True)
    write_report(report, path)

    def program(name: str, stop: float, folder: Path) -> list[str]:
        given = ["--tool", tool, "--work", name, str(stop), str(folder)]
        return [sys.executable, str(Path(__file__).resolve()), *given]

    cores = available_cpus()
    how = Examination(sanitizer, tool, program, until, options.jobs, cores, target, stopped.is_set)
    for findings in examine(how, left):
        report = msgspec.structs.replace(report, findings=(*report.findings, *findings))
        write_report(report, path)
        done = sum(finding.tool == tool for finding in report.findings)
        print(f"{tool}: {done} kernels done, {until - time.time():.0f} s left", flush=True)
    return report


def _version(sanitizer: Path) -> str:
    """Returns the last line of the tool's version output, such as `Version 2025.4.0.0 (build ...)`."""
    said = subprocess.run([str(sanitizer), "--version"], capture_output=True, text=True, check=False)
    return next((line for line in said.stdout.splitlines() if line.startswith("Version")), "unknown")


if __name__ == "__main__":
    main()
