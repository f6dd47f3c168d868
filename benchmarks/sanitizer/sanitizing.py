"""Interface to NVIDIA's compute-sanitizer: kernels, command line, logs.

Many kernels run in one process. A finding belongs to the kernel whose file the report names. Rendered kernels
are compiled with line numbers, and the file names are the kernels' digests.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from flashtune.core.errors import FlashtuneError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import Candidate

if TYPE_CHECKING:
    from flashtune.core.kernel import Kernel

MEMCHECK, RACECHECK, SYNCCHECK = "memcheck", "racecheck", "synccheck"
NAME = "compute-sanitizer"
TOOLS = (MEMCHECK, RACECHECK, SYNCCHECK)
# Beside PATH and CUDA_HOME, where toolkits are installed.
USUAL_FOLDERS = ("/usr/local/cuda", "/opt/cuda")
# Before this one racecheck does not follow barriers of some of a block's warps, by its release notes: all
# kernels whose warps are specialised show a hazard, always the same one, that is none.
FOLLOWS_PARTIAL_BARRIERS = (2026, 1)
# Reports of one process, beyond which the tool only counts.
MAX_REPORTS = 1000
MAX_PORTS = 256
# Rendered kernels to keep. Many subjects differ in extents only.
MAX_KERNELS = 1024
START_SECONDS = 120
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: ([^\n]*)")
_HAZARDS = re.compile(r"(\d+) hazards? displayed")
_ERRORS = re.compile(r"(\d+) errors?")
_FILE = re.compile(r"_([0-9a-f]{32})\.py\b")
_VERSION = re.compile(r"Version (\d+)\.(\d+)")


@functools.lru_cache(maxsize=MAX_KERNELS)
def _rendered(computation: Problem, candidate: Candidate, specialization: Specialization) -> Kernel:
    return render(find_family(candidate.family), computation, candidate.config, specialization)


class Subject(msgspec.Struct, frozen=True):
    """One kernel to run.

    Attributes:
        problem: The problem, of any size.
        candidate: The config.
        specialization: The kernel's assumptions about its tensors.
        shipped: Whether it is a kernel of a shipped table.
    """

    problem: Problem
    candidate: Candidate
    specialization: Specialization
    shipped: bool

    @property
    def kernel(self) -> Kernel:
        """The kernel, rendered."""
        return _rendered(self.problem.computation, self.candidate, self.specialization)

    @property
    def digest(self) -> str:
        """The kernel's digest."""
        return self.kernel.digest

    @property
    def files(self) -> tuple[str, ...]:
        """Digests in the names of the files that it and its steps are compiled from."""
        return tuple(part.digest for part in self.kernel.parts)

    @property
    def label(self) -> str:
        """The kernel in words."""
        assumed = self.specialization
        lse = ", lse" if assumed.lse else ""
        how = f"strides of {int(assumed.alignment)}, {assumed.index_bits} bits{lse}"
        return f"{self.problem.key} {self.candidate.family} {self.candidate.config.label()} ({how})"


class Log(msgspec.Struct, frozen=True):
    """The contents of a process's log.

    Attributes:
        counted: Errors and hazards by the tool's own count.
        reports: Each report's lines as one, in order.
    """

    counted: int
    reports: tuple[str, ...]

    def of(self, files: Iterable[str]) -> tuple[str, ...]:
        """The reports that name one of some kernels' files."""
        named = set(files)
        return tuple(report for report in self.reports if named & set(_FILE.findall(report)))


def find_sanitizer() -> Path:
    """The compute-sanitizer of this machine.

    Raises:
        FlashtuneError: There is none.
    """
    homes = [home for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    folders = [str(Path(home, part)) for home in (*homes, *USUAL_FOLDERS) for part in ("bin", NAME)]
    found = shutil.which(NAME) or shutil.which(NAME, path=os.pathsep.join(folders))
    if found is None:
        raise FlashtuneError(
            f"there is no {NAME} on PATH, in CUDA_HOME or in /usr/local/cuda: install the CUDA toolkit, or "
            "its package cuda-sanitizer alone"
        )
    return Path(found)


def why_left_out(tool: str, family: str, version: str) -> str:
    """The reason to skip a family's kernels with a tool, or empty.

    Args:
        tool: The tool.
        family: The family's name.
        version: Output of the sanitizer, such as `Version 2025.3.1.0 (build ...)`.
    """
    found = _VERSION.search(version)
    follows = found is not None and (int(found[1]), int(found[2])) >= FOLLOWS_PARTIAL_BARRIERS
    # Triton's interpreter runs all portable kernels, and none whose warps are specialised.
    if tool != RACECHECK or follows or find_family(family).interpreted:
        return ""
    since = ".".join(map(str, FOLLOWS_PARTIAL_BARRIERS))
    return f"warps are specialised, and this version does not follow their barriers, as {since} does"


def command(sanitizer: Path, tool: str, program: Iterable[str]) -> list[str]:
    """How a program is run under a tool."""
    options = ["--tool", tool, "--target-processes", "application-only", "--show-backtrace", "no"]
    options += ["--print-limit", str(MAX_REPORTS)]
    # Many at a time look for a port each, and take their time until they reach the GPU.
    options += ["--max-connections", str(MAX_PORTS), "--launch-timeout", str(START_SECONDS)]
    if tool == MEMCHECK:
        # Whoever asks what is not there, as torch does, makes no mistake of a kernel's. A kernel with an
        # error ends there, and those after it run.
        options += ["--padding", "512", "--report-api-errors", "no", "--destroy-on-device-error", "kernel"]
    return [str(sanitizer), *options, *program]


def read_log(log: str) -> Log | None:
    """The log of a tool, or None if it is incomplete."""
    summary = _SUMMARY.search(log)
    if summary is None:
        return None
    counted = _HAZARDS.search(summary[1]) or _ERRORS.search(summary[1])
    reports: list[list[str]] = [[]]
    for line in log.splitlines():
        text = line.removeprefix("=========")
        if text != line and text.strip() and "SUMMARY" not in text and NAME.upper() not in text:
            reports[-1].append(text.strip())
        elif text != line:
            reports.append([])
    joined = tuple(" ".join(lines) for lines in reports if lines)
    return Log(int(counted[1]) if counted else 0, joined)


def is_warning(report: str) -> bool:
    """Whether a report is of a lower level than an error."""
    return report.startswith("Warning")
