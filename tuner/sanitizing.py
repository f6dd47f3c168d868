"""What runs under NVIDIA's compute-sanitizer: which kernels, on which tensors, and what its report says.

The shipped kernels and random points of each family's space, each launched once on small tensors that end
where their memory ends. The list is the same in every process: workers are told numbers.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from flashtune.db.table import shipped_table
from flashtune.errors import FlashtuneError
from flashtune.kernel import Alignment, Specialization
from flashtune.problem import Causal, Problem
from flashtune.record import ShortText
from flashtune.templates.registry import families, find_family
from flashtune.templates.rendering import render
from flashtune.tuner.audit_points import computes_anything, draw_points
from flashtune.tuner.candidates import Candidate, Scope, demand

if TYPE_CHECKING:
    from flashtune.target import Target

MEMCHECK, RACECHECK, SYNCCHECK = "memcheck", "racecheck", "synccheck"
NAME = "compute-sanitizer"
TOOLS = (MEMCHECK, RACECHECK, SYNCCHECK)
# Of this many drawn points as many as are asked for compile and fit.
DRAWN_FOR_ONE = 2
# Launches of every GPU's programs more than once, so that persistent programs go from tile to tile.
ROUNDS_OF_TILES = 1.3
BUSY_HEADS = 48
FEW_HEADS = 2
GROUP = 2
# The exit code of the sanitizer where it found something, told from those of a program.
FOUND = 86
# Beside PATH and CUDA_HOME, where toolkits are installed.
USUAL_FOLDERS = ("/usr/local/cuda", "/opt/cuda")
# The kernels of rendered modules; torch's own are not looked at.
KERNELS = (
    "forward_",
    "transpose_values",
    "backward_",
    "delta",
    "gradient_of_queries",
    "convert_sums",
    "prepare",
    "finish",
    "decode_",
    "combine",
)
MAX_FINDING = 300

_SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: ([^\n]*)")
_HAZARDS = re.compile(r"(\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
_ERRORS = re.compile(r"(\d+) errors?")


class Subject(msgspec.Struct, frozen=True):
    """One kernel to run.

    Attributes:
        problem: What it computes, in a size that makes a launch quick and its tiles ragged.
        candidate: The config.
        specialization: What the kernel assumes of its tensors.
        shipped: Whether it is a kernel of a shipped table.
    """

    problem: Problem
    candidate: Candidate
    specialization: Specialization
    shipped: bool

    @property
    def digest(self) -> str:
        """The kernel's digest."""
        family = find_family(self.candidate.family)
        return render(family, self.problem, self.candidate.config, self.specialization).digest

    @property
    def label(self) -> str:
        """The kernel in words."""
        assumed = self.specialization
        lse = ", lse" if assumed.lse else ""
        how = f"strides of {int(assumed.alignment)}, {assumed.index_bits} bits{lse}"
        return f"{self.problem.key} {self.candidate.family} {self.candidate.config.label()} ({how})"


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one tool said of one kernel.

    Attributes:
        tool: Which tool.
        digest: The kernel's.
        family: Its family.
        label: The kernel in words.
        shipped: Whether it ships.
        errors: Errors, of hazards those that the tool counts as errors.
        warnings: Hazards of a lower level.
        failed: Why the tool said nothing, empty where it did.
        first: The first lines of the first report, empty without one.
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


class SanitizerReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All findings, and what made them."""

    target: ShortText
    sanitizer: ShortText
    triton: ShortText
    findings: tuple[Finding, ...]


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


def subjects(target: Target, samples: int, seed: int, *, busy: bool) -> tuple[Subject, ...]:
    """The shipped kernels, none twice, then random points of each family, about twice as many as asked for.

    Args:
        target: The GPU.
        samples: Points of each family that must run; some that are drawn do not compile.
        seed: Of the draw.
        busy: Whether to fill the GPU more than once, so that persistent programs take several tiles.
    """
    resize = functools.partial(_resized, target=target, busy=busy)
    found: dict[str, Subject] = {}
    table = shipped_table(target.name)
    for record in table.records if table else ():
        if record.config is not None:
            candidate = Candidate(record.family, record.config)
            subject = Subject(record.problem, candidate, record.specialization, shipped=True)
            found.setdefault(subject.digest, resize(subject))
    return (*found.values(), *map(resize, _sampled(target, samples, seed)))


def _sampled(target: Target, samples: int, seed: int) -> Iterator[Subject]:
    for family in families():
        if computes_anything(family, target):
            points = (
                Subject(point.problem, point.candidate, point.specialization, shipped=False)
                for point in draw_points(family, target, seed)
            )
            fitting = (
                subject
                for subject in points
                if not demand(
                    Scope(subject.problem, target, subject.specialization, ()), subject.candidate
                ).excess
            )
            yield from itertools.islice(fitting, DRAWN_FOR_ONE * samples)


def _resized(subject: Subject, target: Target, *, busy: bool) -> Subject:
    """The same kernel on a small problem with a ragged end on both sides of its tile."""
    config = subject.candidate.config
    block_m, block_n = (int(getattr(config, name, 128)) for name in ("block_m", "block_n"))
    seqlen_kv = (config.num_stages + 1) * block_n + 1
    # Under a mask that is aligned top-left no query sees a key that comes after all queries.
    seqlen_q = seqlen_kv if subject.problem.causal is Causal.TOP_LEFT else block_m + 1
    heads = BUSY_HEADS if busy else FEW_HEADS
    tiles = heads * -(-seqlen_q // block_m)
    batch = -(-int(ROUNDS_OF_TILES * target.sm_count) // tiles) if busy else 1
    problem = msgspec.structs.replace(
        subject.problem,
        heads=heads,
        kv_heads=heads // GROUP,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
    )
    return msgspec.structs.replace(subject, problem=problem)


def row_stride(width: int, alignment: Alignment) -> int:
    """Elements from row to row of an alignment class and of no better one; at least the width."""
    step = int(alignment)
    steps = -(-width // step)
    return steps * step if alignment is Alignment.SIXTEEN else (steps | 1) * step


def command(sanitizer: Path, tool: str, program: Iterable[str]) -> list[str]:
    """How a program is run under a tool."""
    options = ["--tool", tool, "--target-processes", "application-only", "--error-exitcode", str(FOUND)]
    options += ["--show-backtrace", "no", "--print-limit", "20"]
    if tool == MEMCHECK:
        # Whoever asks what is not there, as torch does, makes no mistake of a kernel's.
        options += ["--padding", "512", "--report-api-errors", "no"]
    names = (option for name in KERNELS for option in ("--kernel-name", f"kernel_substring={name}"))
    return [str(sanitizer), *options, *names, *program]


def read_log(log: str) -> tuple[int, int, str] | None:
    """Errors, warnings and the first report of a tool's output; None where it came to no end."""
    summary = _SUMMARY.search(log)
    if summary is None:
        return None
    hazards = _HAZARDS.search(summary[2])
    if hazards is not None:
        errors, warnings = int(hazards[2]), int(hazards[3])
    else:
        counted = _ERRORS.search(summary[2])
        errors, warnings = int(counted[1]) if counted else 0, 0
    lines = [line.lstrip("= ").strip() for line in log.splitlines() if line.startswith("=====")]
    told = [line for line in lines if line and not line.startswith("COMPUTE-SANITIZER")]
    first = " ".join(told[:4])[:MAX_FINDING] if errors or warnings else ""
    return errors, warnings, first
