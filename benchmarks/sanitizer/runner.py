"""Runs kernels under compute-sanitizer on all cores, and saves its findings for each. Needs a GPU.

Separate processes compile kernels in the list's order, and only a few ahead. Processes under the tool launch
each when it is compiled. So when time is up, nearly all compiled kernels have run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.sanitizer.report import Finding
from benchmarks.sanitizer.sanitizing import Subject, command, is_warning, read_log
from benchmarks.sanitizer.work import WorkQueue
from benchmarks.saved import ROOT
from flashtune.core.errors import FlashtuneError
from flashtune.core.record import Outcome
from flashtune.core.target import Target
from flashtune.tuner.candidates import SearchTask
from flashtune.tuner.execution.compile_pool import Compiled, CompilePool, Compiler

# Compiled kernels that wait to be launched, for each process: more would only wait.
AHEAD = 3
# A process is replaced after this long, since its findings are read when it ends.
STINT_SECONDS = 90.0
# One that would have less than this is not begun.
MIN_SECONDS = 12.0
# How long processes may take to end when time is up.
END_SECONDS = 25.0
POLL_SECONDS = 0.1
MAX_WORDS = 300
# Processes in a row that end and tell nothing: something is amiss with all of them.
MAX_MUTE = 4

# The program of a worker: its name, when it begins no more by `time.time`, and the folder.
Program = Callable[[str, float, Path], list[str]]


class Examination(msgspec.Struct, frozen=True):
    """How kernels are examined.

    Attributes:
        sanitizer: The compute-sanitizer.
        tool: One of its tools.
        program: The command that it runs.
        until: Time after which no kernel starts, by `time.time`.
        jobs: Processes at a time.
        compilers: Processes that compile.
        target: The GPU.
        stopped: Whether to end early.
    """

    sanitizer: Path
    tool: str
    program: Program
    until: float
    jobs: int
    compilers: int
    target: Target
    stopped: Callable[[], bool] = lambda: False


class _Process(NamedTuple):
    """A worker under the tool, and where its kernels are offered."""

    name: str
    run: subprocess.Popen[bytes]
    log: Path
    desk: WorkQueue


def examine(how: Examination, listed: Sequence[Subject]) -> Generator[tuple[Finding, ...]]:
    """Yields the findings of kernels as processes end, without kernels after the time limit.

    Raises:
        FlashtuneError: Repeated processes end without a result.
    """
    with tempfile.TemporaryDirectory() as folder, CompilePool(how.compilers) as pool:
        yield from _Examiner(how, listed, WorkQueue(Path(folder)), pool).findings()


class _Examiner:
    """Feeds processes, replaces them and reads their logs."""

    def __init__(self, how: Examination, listed: Sequence[Subject], desk: WorkQueue, pool: Compiler) -> None:
        self._how = how
        self._desk = desk
        self._known = {subject.digest: subject for subject in listed}
        desk.open(self._known)
        self._pool = pool
        self._waiting = iter(self._known.items())
        self._compiling: dict[str, Future[Compiled]] = {}
        self._processes: list[_Process] = []
        # The log has no kernel names: each kernel runs again in its own process.
        self._unclear: list[str] = []
        self._started = self._mute = 0

    def findings(self) -> Generator[tuple[Finding, ...]]:
        """As `examine`."""
        try:
            while not self._is_over() and self._is_busy():
                yield from self._compiled()
                self._start()
                yield from self._ended()
                time.sleep(POLL_SECONDS)
            self._desk.close()
            limit = time.time() + END_SECONDS
            while self._processes and time.time() < limit:
                yield from self._ended()
                time.sleep(POLL_SECONDS)
        finally:
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.run.pid, signal.SIGKILL)
                process.run.wait()

    def _is_over(self) -> bool:
        return self._how.stopped() or time.time() >= self._how.until

    def _is_busy(self) -> bool:
        """Whether anything compiles, runs or is still to run; submits the next compilations."""
        while len(self._compiling) + len(self._desk.offered()) < AHEAD * self._how.jobs:
            digest, subject = next(self._waiting, (None, None))
            if digest is None or subject is None:
                break
            scope = SearchTask(subject.problem, self._how.target, subject.specialization, ())
            self._compiling[digest] = self._pool.submit(scope, subject.candidate)
        return bool(self._compiling or self._processes or self._unclear or self._desk.offered())

    def _compiled(self) -> Iterator[tuple[Finding, ...]]:
        for digest in [digest for digest, job in self._compiling.items() if job.done()]:
            made = self._compiling.pop(digest).result()
            if made.outcome is Outcome.OK:
                self._desk.offer(digest)
            else:
                yield (self._finding(digest, refused=f"{made.outcome.value}: {made.message}"[:MAX_WORDS]),)

    def _start(self) -> None:
        """As many processes as there is work for."""
        while self._how.until - time.time() > MIN_SECONDS and len(self._processes) < self._how.jobs:
            # The first ones come up while the first kernels compile.
            ahead = len(self._compiling) if self._started < self._how.jobs else 0
            if self._unclear:
                alone = WorkQueue(self._desk.folder / f"alone-{self._started}")
                digest = self._unclear.pop()
                alone.open({digest: self._known[digest]})
                alone.offer(digest)
                self._begin(alone)
            elif len(self._desk.offered()) + ahead > len(self._processes) * bool(ahead):
                self._begin(self._desk)
            else:
                return

    def _begin(self, desk: WorkQueue) -> None:
        self._started += 1
        name = str(self._started)
        until = min(self._how.until, time.time() + STINT_SECONDS)
        line = command(self._how.sanitizer, self._how.tool, self._how.program(name, until, desk.folder))
        # Every tensor is then a separate allocation, with bounds that the tool checks.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
        # `benchmarks` is not installed.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        log = self._desk.folder / f"log-{name}"
        with log.open("wb") as file:
            run = subprocess.Popen(
                line,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._processes.append(_Process(name, run, log, desk))

    def _ended(self) -> Iterator[tuple[Finding, ...]]:
        for process in [process for process in self._processes if process.run.poll() is not None]:
            self._processes.remove(process)
            yield tuple(self._seen_messages(process))

    def _seen_messages(self, process: _Process) -> Iterator[Finding]:
        """The findings of a process by kernel; unfinished kernels are queued again."""
        text = process.log.read_text(encoding="utf-8", errors="replace")
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "no output")
        died = f"exit code {process.run.returncode}: {last.strip()}"[:MAX_WORDS]
        notes = process.desk.read(process.name)
        log = read_log(text)
        tells = log is not None or any(note.failed or not note.ended for note in notes.values())
        self._mute = 0 if tells else self._mute + 1
        if self._mute >= MAX_MUTE:
            raise FlashtuneError(f"processes under {self._how.tool} come to nothing: {died}")
        named = {digest: log.of(self._known[digest].files) if log else () for digest in notes}
        if log and len(notes) == 1 and log.counted:
            named = {digest: reports or log.reports or (died,) for digest, reports in named.items()}
        is_clear = log is not None and sum(map(len, named.values())) >= log.counted
        for digest, note in notes.items():
            reports = named[digest]
            if reports:
                warnings = sum(map(is_warning, reports))
                counts = {"errors": len(reports) - warnings, "warnings": warnings}
                yield self._finding(digest, first=reports[0][:MAX_WORDS], **counts)
            elif note.failed or not note.ended:
                yield self._finding(digest, failed=(note.failed or died)[:MAX_WORDS])
            elif is_clear:
                yield self._finding(digest)
            elif log is None:
                self._desk.offer(digest)
            else:
                self._unclear.append(digest)

    def _finding(self, digest: str, **said: Any) -> Finding:
        subject = self._known[digest]
        blank = Finding(self._how.tool, digest, subject.candidate.family, subject.label, subject.shipped)
        return msgspec.structs.replace(blank, **said)
