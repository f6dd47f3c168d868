"""What a kernel that is unproven here costs before it serves, beyond compiling and loading: its self-check.

    python benchmarks/first_use.py --write docs/dispatch.md

Kernels are compiled on all cores first. Each is then called for the first time with an empty database, in
this process (`here`), and some in processes of their own (`fresh process`), where torch's kernels and the
check's modules are loaded too: the shortest of a few, since whatever else goes on there only adds. These have
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
from typing import Any, cast
from unittest import mock

import msgspec
import torch
import triton
from torch import Tensor

import flashtune
from flashtune import choices
from flashtune.calls import forget_servers
from flashtune.decision import needed_specialization
from flashtune.dispatch import select
from flashtune.dtypes import TORCH_DTYPES
from flashtune.options import CausalOption
from flashtune.problem import Problem
from flashtune.request import read_request
from flashtune.self_check import forget_verdicts, passes_self_check
from flashtune.tables import tuned_records
from flashtune.target import Target, device_target
from flashtune.tuner.candidates import Candidate, Scope
from flashtune.tuner.compile_pool import CompilePool
from flashtune.tuner.pages import filled
from flashtune.tuner.processes import usable_cores
from flashtune.tuner.shapes import parse_shape
from flashtune.versions import driver_version

LIMIT_MS = 300.0
# Processes of a kernel's own, each with an empty database.
FRESH_TRIES = 4
BEGIN, END = "<!-- first use: written by benchmarks/first_use.py -->", "<!-- end of first use -->"


class Case(msgspec.Struct, frozen=True):
    """A shape; whether its rows lie at odd strides, which no copy engine addresses; where it is measured."""

    shape: str
    odd: bool = False
    fresh: bool = False

    @property
    def problem(self) -> Problem:
        """What is computed."""
        return parse_shape(self.shape)[0]


class Fresh(msgspec.Struct, frozen=True):
    """What a check and the first product of matrices take a process of its own, in ms."""

    check_ms: float
    cublas_ms: float


class Row(msgspec.Struct, frozen=True):
    """What the check of one kernel took, in ms; `fresh` None where that was not measured."""

    problem: str
    family: str
    odd: bool
    here_ms: float
    fresh: Fresh | None


CASES = (
    Case("heads=16,seqlen=2048,head_dim=128,batch=8,causal", fresh=True),
    Case("heads=16,seqlen=2048,head_dim=128,batch=8,causal", odd=True, fresh=True),
    Case("heads=64,kv_heads=8,seqlen=8192,head_dim=128,dtype=e4m3,causal", fresh=True),
    Case("heads=12,seqlen=1024,head_dim=64,batch=4,dtype=fp32,causal", fresh=True),
    Case("heads=8,seqlen=65536,head_dim=128,causal", fresh=True),
    Case("heads=8,seqlen=4096,head_dim=256,batch=4,dtype=fp16"),
    Case("heads=32,kv_heads=8,seqlen=131072,head_dim=64"),
    Case("heads=32,seqlen=512,head_dim=64,batch=32"),
    Case("heads=32,seqlen=512,head_dim=64,batch=32,causal"),
    Case("heads=8,seqlen=16384,head_dim=256,causal"),
    Case("heads=16,seqlen=1024,head_dim=96,batch=2,causal"),
    Case("heads=16,seqlen=1024,head_dim=40,batch=2,dtype=fp16"),
    Case("heads=16,seqlen=1024,head_dim=192,value_head_dim=128,batch=2,causal"),
    Case("heads=32,kv_heads=8,seqlen_q=1,seqlen_kv=8192,head_dim=128,batch=16", fresh=True),
    Case("heads=32,kv_heads=1,seqlen_q=16,seqlen_kv=8192,head_dim=128,causal"),
    Case("heads=16,seqlen_q=1000,seqlen_kv=5000,head_dim=128,causal=top_left"),
    Case("heads=8,seqlen=2048,head_dim=256", odd=True),
    Case("heads=8,seqlen=2048,head_dim=64,dtype=fp16,causal", odd=True),
    Case("heads=8,seqlen=2048,head_dim=256,dtype=fp32"),
    Case("heads=64,kv_heads=8,seqlen=4096,head_dim=64,dtype=e4m3"),
)


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
    families = _compiled(cases, device_target(torch.cuda.current_device()))
    with tempfile.TemporaryDirectory() as folder:
        # What torch makes at its first use in a process is no check's.
        _first_check(cases[0], Path(folder) / "unused.sqlite")
        for number, (case, family) in enumerate(zip(cases, families, strict=True)):
            check_ms = _first_check(case, Path(folder) / f"{number}.sqlite")
            fresh = _fresh(number, Path(folder)) if case.fresh else None
            yield Row(case.problem.key, family, case.odd, check_ms, fresh)


def _compiled(cases: Sequence[Case], target: Target) -> list[str]:
    """Leaves all kernels in Triton's cache; each one's family."""
    with CompilePool(usable_cores()) as pool:
        jobs = []
        for case in cases:
            q, k, v = _tensors(case, "meta")
            request = read_request(q, k, v, case.problem.causal.value, "bhsd", True, "generated")
            needed = needed_specialization(request, q, k, v)
            record = select(case.problem, target, tuned_records(target.name), needed, generated=True).record
            assert record.config is not None
            candidate = Candidate(record.family, record.config)
            jobs.append((record.family, pool.submit(Scope(record.problem, target, needed, ()), candidate)))
        for _, job in jobs:
            job.result()
    return [family for family, _ in jobs]


def _tensors(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a case, in its type."""
    problem = case.problem

    def make(heads: int, length: int, width: int) -> Tensor:
        row = width + 3 if case.odd else width
        rows = torch.empty(problem.batch, heads, length, row, dtype=torch.bfloat16, device=device)
        return rows.normal_().to(TORCH_DTYPES[problem.dtype])[..., :width]

    q = make(problem.heads, problem.seqlen_q, problem.head_dim)
    k = make(problem.kv_heads, problem.seqlen_kv, problem.head_dim)
    return q, k, make(problem.kv_heads, problem.seqlen_kv, problem.value_head_dim)


def _first_check(case: Case, database: Path) -> float:
    """What a first call's check takes, in ms: it wants the log-sum-exp, which no receipt covers."""
    os.environ["FLASHTUNE_DB"] = str(database)
    forget_servers()
    forget_verdicts()
    torch.manual_seed(3)
    q, k, v = _tensors(case, "cuda")
    causal = cast("CausalOption", case.problem.causal.value)
    torch.cuda.synchronize()
    # What a collector of garbage has to do by now, 0.15 s of a slow core, is no check's.
    gc.collect()
    spent = []

    def timed(*asked: Any) -> bool:
        start = time.perf_counter()
        passed = passes_self_check(*asked)
        spent.append(1e3 * (time.perf_counter() - start))
        assert passed, f"{asked[0].digest} of {case.problem.key} fails"
        return True

    with mock.patch.object(choices, "passes_self_check", timed):
        flashtune.attention(q, k, v, causal=causal, return_lse=True, prefer="generated")
    return spent[0]


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
    command = [sys.executable, str(Path(__file__).resolve()), "--one", str(number)]
    tries = []
    for attempt in range(FRESH_TRIES):
        database = str(folder / f"fresh{number}_{attempt}.sqlite")
        # An installation has the modules' bytecode.
        environment = {**os.environ, "FLASHTUNE_DB": database, "PYTHONDONTWRITEBYTECODE": ""}
        tries.append(map(float, subprocess.check_output(command, env=environment, text=True).split()))
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
