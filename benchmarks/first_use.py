"""What a kernel that is unproven here costs before it serves, beyond compiling and loading: its self-check.

    python -m benchmarks.first_use --write docs/dispatch.md

Kernels are compiled on all cores first. Each is then loaded and checked with an empty database, in this
process (`here`), and some in processes of their own (`fresh process`), where torch's kernels and the check's
modules are loaded too: the shorter of two, since whatever else goes on there only adds. These have
multiplied matrices before: what that took (`start of cuBLAS`) comes on top. Fails over the limit.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch
import triton

from benchmarks.first_use_cases import CASES, Case
from flashtune.binaries import binary_of
from flashtune.dtypes import TORCH_DTYPES
from flashtune.kernel import Alignment
from flashtune.rendered import kernel_of
from flashtune.self_check import forget_verdicts, passes_self_check
from flashtune.target import Target, device_target
from flashtune.tuner.pages import filled
from flashtune.versions import driver_version

ROOT = Path(__file__).parents[1]
LIMIT_MS = 300.0
# Processes of a kernel's own, each with an empty database.
FRESH_TRIES = 2
BEGIN, END = "<!-- first use: written by benchmarks/first_use.py -->", "<!-- end of first use -->"


class Fresh(msgspec.Struct, frozen=True):
    """What a check and the first product of matrices take in a process of its own, in ms."""

    check_ms: float
    cublas_ms: float


class Row(msgspec.Struct, frozen=True):
    """What the check of one kernel took, in ms; `fresh` None where that was not measured."""

    problem: str
    family: str
    odd: bool
    here_ms: float
    fresh: Fresh | None


def main() -> None:
    """Measures, prints and writes."""
    options = _options()
    if options.one is not None:
        print(_first_product(), _first_check(CASES[options.one], Path(os.environ["FLASHTUNE_DB"])))
        return
    if not torch.cuda.is_available():
        sys.exit("kernels are checked on a GPU here and none is visible: run it on a machine with one")
    print(_head(), flush=True)
    rows: list[Row] = []
    for row in measure(CASES):
        rows.append(row)
        print(_line(row), flush=True)
    print(_longest(rows), flush=True)
    if options.write:
        page, text = options.write.read_text(encoding="utf-8"), (_head(), *map(_line, rows), _longest(rows))
        options.write.write_text(filled(page, BEGIN, END, "\n".join(text)), encoding="utf-8")
    if any(max(row.here_ms, row.fresh.check_ms if row.fresh else 0.0) > LIMIT_MS for row in rows):
        sys.exit(f"over the limit of {LIMIT_MS:.0f} ms")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The cost of self-checks.")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table between the page's marks")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(cases: Sequence[Case]) -> Iterator[Row]:
    """A row for each case; those in fresh processes take some twenty seconds each."""
    target = device_target(torch.cuda.current_device())
    with tempfile.TemporaryDirectory() as folder:
        # The user's own records would choose other kernels here than in fresh processes.
        os.environ["FLASHTUNE_DB"] = str(Path(folder) / "none.sqlite")
        _compile(cases, target)
        # What torch makes at its first use in a process is no check's.
        _first_check(cases[0], Path(folder) / "unused.sqlite")
        for number, case in enumerate(cases):
            check_ms = _first_check(case, Path(folder) / f"{number}.sqlite")
            fresh = _fresh(number, Path(folder)) if case.fresh else None
            yield Row(
                case.problem.key, case.record(target).family, case.alignment is Alignment.ANY, check_ms, fresh
            )


def _compile(cases: Sequence[Case], target: Target) -> None:
    """Leaves all kernels in Triton's cache."""
    # Modules that a fresh process's check must import for itself come along with these.
    from flashtune.tuner.candidates import Candidate, Scope
    from flashtune.tuner.compile_pool import CompilePool
    from flashtune.tuner.processes import usable_cores

    with CompilePool(usable_cores()) as pool:
        jobs = []
        for case in cases:
            record = case.record(target)
            assert record.config is not None
            candidate = Candidate(record.family, record.config)
            jobs.append(pool.submit(Scope(record.problem, target, case.assumed, ()), candidate))
        for job in jobs:
            job.result()


def _first_check(case: Case, database: Path) -> float:
    """What a kernel's check takes, in ms, once it is loaded, on a machine that knows of none."""
    os.environ["FLASHTUNE_DB"] = str(database)
    forget_verdicts()
    device = torch.device("cuda", torch.cuda.current_device())
    target = device_target(device.index)
    record = case.record(target)
    assert record.config is not None
    kernel = kernel_of(record, case.assumed)
    binary = binary_of(kernel, target, device)
    problem = msgspec.structs.replace(case.problem, causal=record.problem.causal)
    # Whoever calls has tensors.
    torch.empty(64, 64, dtype=torch.bfloat16, device=device).normal_().to(TORCH_DTYPES[problem.dtype])
    torch.cuda.synchronize()
    # What a collector of garbage has to do by now, 0.15 s of a slow core, is no check's.
    gc.collect()
    start = time.perf_counter()
    passed = passes_self_check(kernel, problem, record.config, target, device, binary)
    milliseconds = 1e3 * (time.perf_counter() - start)
    assert passed, f"{kernel.digest} of {problem.key} fails"
    return milliseconds


def _first_product() -> float:
    """What this process's first product of matrices takes, in ms: cuBLAS makes its handle."""
    matrix = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    matrix @ matrix
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def _fresh(number: int, folder: Path) -> Fresh:
    """What a check takes in processes that do nothing else, the shortest of some."""
    command = [sys.executable, "-m", "benchmarks.first_use", "--one", str(number)]
    tries = []
    for attempt in range(FRESH_TRIES):
        database = str(folder / f"fresh{number}_{attempt}.sqlite")
        # An installation has the modules' bytecode.
        environment = {**os.environ, "FLASHTUNE_DB": database, "PYTHONDONTWRITEBYTECODE": ""}
        tries.append(
            map(float, subprocess.check_output(command, env=environment, cwd=ROOT, text=True).split())
        )
    cublas_ms, check_ms = map(min, zip(*tries, strict=True))
    return Fresh(check_ms, cublas_ms)


def _head() -> str:
    return (
        f"On an {torch.cuda.get_device_name()} (torch {torch.__version__}, Triton {triton.__version__}, "
        f"driver {driver_version()}), in ms:\n\n"
        "| shape | family | here | fresh process | start of cuBLAS |\n"
        "| --- | --- | ---: | ---: | ---: |"
    )


def _line(row: Row) -> str:
    fresh = f"{row.fresh.check_ms:.0f} | {row.fresh.cublas_ms:.0f}" if row.fresh else " | "
    odd = ", odd strides" if row.odd else ""
    return f"| {row.problem}{odd} | {row.family} | {row.here_ms:.0f} | {fresh} |"


def _longest(rows: Sequence[Row]) -> str:
    found = [row.fresh for row in rows if row.fresh]
    check_ms, cublas_ms = max(one.check_ms for one in found), max(one.cublas_ms for one in found)
    return f"| the longest | | {max(row.here_ms for row in rows):.0f} | {check_ms:.0f} | {cublas_ms:.0f} |"


if __name__ == "__main__":
    main()
