"""Runs kernels under compute-sanitizer on all cores, and returns a finding for each. Needs a GPU.

A process launches a batch of compiled kernels under the tool. If its log has an error, or it fails, each
kernel of the batch runs again in a process of its own.
"""

import contextlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.sanitizer.points import Subject
from benchmarks.sanitizer.report import Finding
from benchmarks.saved import ROOT
from flashtune.core.errors import FlashtuneError
from flashtune.core.record import Outcome
from flashtune.core.target import Target
from flashtune.tuner.candidates import SearchTask
from flashtune.tuner.execution.compile_pool import CompilePool

NAME = "compute-sanitizer"
MEMCHECK, RACECHECK, SYNCCHECK = "memcheck", "racecheck", "synccheck"
TOOLS = (MEMCHECK, RACECHECK, SYNCCHECK)
# Folders of toolkits, besides PATH and CUDA_HOME.
TOOLKITS = ("/usr/local/cuda", "/opt/cuda")
BATCH = 8
# No process starts with less time than this.
MIN_SECONDS = 12.0
# Processes may need this long to end after the time limit.
END_SECONDS = 25.0
POLL_SECONDS = 0.1
MAX_WORDS = 300
# With this many processes in a row without a log, none of them works.
MAX_WITHOUT_LOG = 4
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
LAUNCHED = re.compile(r"^launched (\d+)$", re.MULTILINE)
PREFIX = "========="


class Examination(msgspec.Struct, frozen=True):
    """How kernels are examined: the tool, the GPU, processes at a time, and the time limit by `time.time`."""

    sanitizer: Path
    tool: str
    target: Target
    jobs: int
    until: float


class Log(NamedTuple):
    """The errors and hazards that a tool counted, and each report's lines joined."""

    counted: int
    reports: tuple[str, ...]


class Run(NamedTuple):
    """A process that launches kernels under the tool, and its log."""

    batch: tuple[Subject, ...]
    process: subprocess.Popen[bytes]
    log: Path


def find_sanitizer() -> Path:
    """Returns the path of compute-sanitizer."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [str(Path(home, part)) for home in (*homes, *TOOLKITS) for part in ("bin", NAME)]
    path = shutil.which(NAME) or shutil.which(NAME, path=os.pathsep.join(folders))
    if path is None:
        raise FlashtuneError(
            f"{NAME} is not on PATH, in CUDA_HOME or in /usr/local/cuda: install the CUDA toolkit, or its "
            "package cuda-sanitizer"
        )
    return Path(path)


def command(sanitizer: Path, tool: str, program: Sequence[str]) -> list[str]:
    """Returns the command that runs a program under a tool."""
    options = ["--tool", tool, "--target-processes", "application-only", "--show-backtrace", "no"]
    # Each of many processes needs a port, and may take long to reach the GPU.
    options += ["--max-connections", "256", "--launch-timeout", "120"]
    if tool == MEMCHECK:
        # torch asks the driver for functions that may be missing, which is no error of a kernel.
        options += ["--padding", "512", "--report-api-errors", "no"]
    return [str(sanitizer), *options, *program]


def read_log(text: str) -> Log | None:
    """Returns the contents of a tool's log, or None if it is incomplete."""
    summary = SUMMARY.search(text)
    if summary is None:
        return None
    reports: list[list[str]] = [[]]
    for line in text.splitlines():
        words = line.removeprefix(PREFIX).strip()
        if line.startswith(PREFIX) and words and "SUMMARY" not in words and NAME.upper() not in words:
            reports[-1].append(words)
        elif line.startswith(PREFIX):
            reports.append([])
    return Log(int(summary[1]), tuple(" ".join(lines) for lines in reports if lines))


def examine(how: Examination, subjects: Sequence[Subject]) -> Iterator[Finding]:
    """Yields the finding of each kernel that was compiled and launched within the time limit."""
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder, CompilePool(how.jobs) as pool:
        tasks = {
            subject: SearchTask(subject.problem, how.target, subject.specialization, ())
            for subject in subjects
        }
        kernels = Path(folder, "kernels")
        kernels.write_bytes(pickle.dumps({subject.digest: subject for subject in subjects}))
        compiling = {subject: pool.submit(task, subject.candidate) for subject, task in tasks.items()}
        ready: deque[Subject] = deque()
        alone: deque[Subject] = deque()
        started = without_log = 0
        try:
            while (compiling or ready or alone or runs) and time.time() < how.until + END_SECONDS:
                for subject in [subject for subject, job in compiling.items() if job.done()]:
                    compiled = compiling.pop(subject).result()
                    if compiled.outcome is Outcome.OK:
                        ready.append(subject)
                    else:
                        yield finding(how.tool, subject, refused=f"{compiled.outcome}: {compiled.message}")
                while len(runs) < how.jobs and how.until - time.time() > MIN_SECONDS:
                    batch = _next_batch(ready, alone, more=bool(compiling))
                    if not batch:
                        break
                    started += 1
                    runs.append(_start(how, batch, kernels, kernels.with_name(f"log-{started}")))
                for run in [run for run in runs if run.process.poll() is not None]:
                    runs.remove(run)
                    text = run.log.read_text(encoding="utf-8", errors="replace")
                    without_log = without_log + 1 if read_log(text) is None else 0
                    if without_log >= MAX_WITHOUT_LOG:
                        raise FlashtuneError(f"{how.tool} gives no log: {_failure(run, text)}")
                    yield from _findings(how, run, text, alone)
                if not runs and time.time() > how.until - MIN_SECONDS:
                    break
                time.sleep(POLL_SECONDS)
        finally:
            for run in runs:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(run.process.pid, signal.SIGKILL)
                run.process.wait()


def finding(tool: str, subject: Subject, **values: Any) -> Finding:
    """Returns the finding of a tool for a kernel."""
    short: dict[str, Any] = {
        name: value[:MAX_WORDS] if isinstance(value, str) else value for name, value in values.items()
    }
    return Finding(tool, subject.digest, subject.candidate.family, subject.label, subject.shipped, **short)


def _next_batch(ready: deque[Subject], alone: deque[Subject], *, more: bool) -> tuple[Subject, ...]:
    if alone:
        return (alone.popleft(),)
    if more and len(ready) < BATCH:
        return ()
    return tuple(ready.popleft() for _ in range(min(BATCH, len(ready))))


def _start(how: Examination, batch: tuple[Subject, ...], kernels: Path, log: Path) -> Run:
    program = [sys.executable, "-m", "benchmarks.sanitizer.launch", how.tool, str(kernels), str(how.until)]
    program += [subject.digest for subject in batch]
    # Every tensor is then a separate allocation, with bounds that the tool checks.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(how.sanitizer, how.tool, program),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return Run(batch, process, log)


def _findings(how: Examination, run: Run, text: str, alone: deque[Subject]) -> Iterator[Finding]:
    """Yields the findings of an ended process; queues the kernels of an unclear batch."""
    log = read_log(text)
    clean = log is not None and log.counted == 0 and run.process.returncode == 0
    if clean:
        launched = max(map(int, LAUNCHED.findall(text)), default=0)
        yield from (finding(how.tool, subject) for subject in run.batch[:launched])
    elif len(run.batch) > 1:
        alone.extend(run.batch)
    elif log is not None and log.counted:
        warnings = sum(report.startswith("Warning") for report in log.reports)
        errors = max(0, log.counted - warnings)
        first = next(iter(log.reports), "no report")
        yield finding(how.tool, run.batch[0], errors=errors, warnings=warnings, first=first)
    else:
        yield finding(how.tool, run.batch[0], failed=_failure(run, text))


def _failure(run: Run, text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(PREFIX)]
    return f"exit code {run.process.returncode}: {lines[-1] if lines else 'no output'}"
