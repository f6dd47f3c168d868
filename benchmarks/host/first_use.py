"""Time of the self-check of an unverified kernel at its first use, without compilation and loading.

    python -m benchmarks.host.first_use --save benchmarks/results/nvidia-h200-first-use.json.gz

Kernels are compiled on all cores first. Each is then loaded and checked with an empty database, in this
process (`at work`). Some are also checked in new processes, which load torch's kernels and the check's
modules too. There the kernel is either compiled or in Triton's cache. Each is measured twice, and the shorter
time counts, since other work only adds. The new processes have multiplied matrices before. That time (`start
of cuBLAS`) is additional. Fails over the limit.

Modules and kernels of the check are preloaded during compilation, which may take longer. A run without
preloading shows the difference.
"""

import argparse
import contextlib
import enum
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

from benchmarks.saved import RESULTS, ROOT, Source, load, run_of, save, this_run
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.layouts import TORCH_DTYPES
from flashtune.core.problem import Problem
from flashtune.core.record import Record
from flashtune.core.target import Target, device_target
from flashtune.dispatch.lookup import select
from flashtune.dispatch.tables import tuned_records
from flashtune.launch.kernel_cache import Binaries, kernel_of
from flashtune.runtime.self_check import CheckTask, SelfChecks
from flashtune.tuner.cli.output import table
from flashtune.tuner.workloads.shapes import parse_shape

LIMIT_MS = 300.0
# Processes of a kernel's own, each with an empty database.
FRESH_TRIES = 2
SCRIPT = "benchmarks/host/first_use.py"
SAVED = RESULTS / "nvidia-h200-first-use.json.gz"


class Case(msgspec.Struct, frozen=True):
    """A kernel."""

    shape: str  # In the syntax of `flashtune search`.
    alignment: Alignment = Alignment.SIXTEEN  # Of the strides; TMA cannot address 1.
    fresh: bool = False  # Whether it is also measured in separate processes.

    @property
    def problem(self) -> Problem:
        """The problem."""
        return parse_shape(self.shape)[0]

    @property
    def assumed(self) -> Specialization:
        """Of the tensors, with a log-sum-exp or its gradient."""
        return Specialization(alignment=self.alignment, lse=True)

    def record(self, target: Target) -> Record:
        """The generated kernel that serves it."""
        tables = tuned_records(target.name)
        return select(self.problem, target, tables, self.assumed, generated=True).record


CASES = (
    Case("heads=16,seqlen=2048,head_dim=128,batch=8,causal", fresh=True),
    Case("heads=16,seqlen=2048,head_dim=128,batch=8,causal", Alignment.ANY, fresh=True),
    Case("heads=64,kv_heads=8,seqlen=8192,head_dim=128,dtype=e4m3,causal", fresh=True),
    Case("heads=12,seqlen=1024,head_dim=64,batch=4,dtype=fp32,causal"),
    Case("heads=8,seqlen=65536,head_dim=128,causal"),
    Case("heads=8,seqlen=4096,head_dim=256,batch=4,dtype=fp16"),
    Case("heads=32,kv_heads=8,seqlen=131072,head_dim=64"),
    Case("heads=32,seqlen=512,head_dim=64,batch=32"),
    Case("heads=32,seqlen=512,head_dim=64,batch=32,causal"),
    Case("heads=8,seqlen=16384,head_dim=256,causal"),
    Case("heads=8,seqlen=2048,head_dim=64,dtype=fp16,causal", Alignment.ANY),
    Case("heads=16,seqlen=1024,head_dim=96,batch=2,causal"),
    Case("heads=16,seqlen=1024,head_dim=40,batch=2,dtype=fp16", Alignment.EIGHT),
    Case("heads=16,seqlen=1024,head_dim=192,value_head_dim=128,batch=2,causal"),
    Case("heads=32,kv_heads=8,seqlen_q=1,seqlen_kv=8192,head_dim=128,batch=16"),
    Case("heads=32,kv_heads=1,seqlen_q=16,seqlen_kv=8192,head_dim=128,causal"),
    Case("heads=16,seqlen_q=1000,seqlen_kv=5000,head_dim=128,causal=top_left"),
    Case("heads=8,seqlen=2048,head_dim=256", Alignment.ANY),
    Case("heads=8,seqlen=2048,head_dim=256,dtype=fp32"),
    Case("heads=64,kv_heads=8,seqlen=4096,head_dim=64,dtype=e4m3"),
    Case("heads=32,kv_heads=8,seqlen=8192,head_dim=128,causal,window=1023", fresh=True),
    Case("heads=16,kv_heads=8,seqlen=4096,head_dim=256,causal,window=1023,softcap", fresh=True),
    Case("heads=32,seqlen=2048,head_dim=128,causal,alibi"),
    Case("heads=16,seqlen=1024,head_dim=64,batch=4,bias=additive", fresh=True),
    Case("heads=16,seqlen=4096,head_dim=128,causal,block_mask=64"),
    Case("heads=64,kv_heads=8,seqlen=4096,head_dim=64,causal,sinks"),
    Case("heads=16,kv_heads=4,seqlen=2048,head_dim=128,batch=4,packed=4096,causal", fresh=True),
    Case("heads=16,seqlen=2048,head_dim=64,batch=4,causal,dropout", fresh=True),
    Case("heads=32,kv_heads=8,seqlen_q=1,seqlen_kv=8192,head_dim=128,batch=16,page_size=16", fresh=True),
    Case(
        "heads=32,kv_heads=8,seqlen_q=1,seqlen_kv=8192,head_dim=128,batch=16,page_size=64,kv_dtype=e4m3",
        fresh=True,
    ),
    Case(
        "heads=128,kv_heads=1,seqlen_q=1,seqlen_kv=4096,head_dim=576,value_head_dim=512,page_size=64,mla",
        fresh=True,
    ),
    Case("heads=16,seqlen=2048,head_dim=128,batch=8,causal,backward", fresh=True),
    Case("heads=32,seqlen=2048,head_dim=64,batch=8,backward"),
    Case("heads=8,seqlen=4096,head_dim=256,batch=4,causal,backward"),
    Case("heads=16,seqlen=2048,head_dim=128,batch=8,causal,backward,deterministic"),
    Case("heads=12,seqlen=1024,head_dim=64,batch=4,dtype=fp32,causal,backward", fresh=True),
    Case("heads=32,kv_heads=8,seqlen=4096,head_dim=128,causal,window=1023,backward", fresh=True),
    Case("heads=16,seqlen=1024,head_dim=64,batch=4,bias=additive,backward", fresh=True),
    Case(
        "heads=16,kv_heads=4,seqlen=2048,head_dim=128,batch=4,packed=4096,causal,dropout,backward", fresh=True
    ),
)


class Way(enum.StrEnum):
    """The purpose of a kernel's own process."""

    COMPILED = "compiled"
    CACHED = "cached"
    ALONE = "alone"


class Fresh(msgspec.Struct, frozen=True):
    """The time of a first use in separate processes, in ms."""

    compiled_ms: float  # From compilation and loading in the process to the end of the self-check.
    cached_ms: float  # Likewise with a kernel that was compiled before.
    cublas_ms: float  # The first matrix product, not included in the latter.
    compiling_ms: float  # Compilation and loading.
    alone_ms: float  # Compilation and loading without other work.


class First(msgspec.Struct, frozen=True):
    """One sample: compilation and loading of a kernel, and the rest until it was verified, in ms."""

    compiling_ms: float
    check_ms: float


class Row(msgspec.Struct, frozen=True):
    """The time of the self-check of one kernel, in ms; `fresh` is None if not measured."""

    problem: str
    family: str
    odd: bool
    at_work_ms: float
    fresh: Fresh | None

    @property
    def check_ms(self) -> float:
        """The longest time of the check beyond compilation and, if that is over, loading."""
        if self.fresh is None:
            return self.at_work_ms
        return max(self.at_work_ms, self.fresh.compiled_ms, self.fresh.cached_ms)


def main() -> None:
    """Measures, prints and saves."""
    options = _options()
    if options.one is not None:
        _one(CASES[options.one], Way(options.way))
        return
    if not torch.cuda.is_available():
        sys.exit("kernels are checked on a GPU here and none is visible: run it on a machine with one")
    rows: list[Row] = []
    for row in measure(CASES):
        rows.append(row)
        print(*_cells_of(row), sep=" | ", flush=True)
    print(*_lines(this_run(), rows), sep="\n", flush=True)
    if options.save:
        save(options.save, rows)
    if any(row.check_ms > LIMIT_MS for row in rows):
        sys.exit(f"over the limit of {LIMIT_MS:.0f} ms")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The cost of self-checks.")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep what was measured, in JSON")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(cases: Sequence[Case]) -> Iterator[Row]:
    """A row for each case; those in fresh processes take some twenty seconds each."""
    target = device_target(torch.cuda.current_device())
    with tempfile.TemporaryDirectory() as folder:
        # The user's own records would choose other kernels here than in fresh processes.
        os.environ["FLASHTUNE_DB"] = str(Path(folder) / "none.sqlite")
        _compile(cases, target)
        # A check does not count the objects that torch makes at its first use in a process.
        _first_use(cases[0], Path(folder) / "unused.sqlite")
        for number, case in enumerate(cases):
            check_ms = _first_use(case, Path(folder) / f"{number}.sqlite").check_ms
            fresh = _fresh(number, Path(folder)) if case.fresh else None
            yield Row(
                case.problem.key, case.record(target).family, case.alignment is Alignment.ANY, check_ms, fresh
            )


def _compile(cases: Sequence[Case], target: Target) -> None:
    """Leaves all kernels in Triton's cache."""
    # Modules that a fresh process's check must import for itself come along with these.
    from flashtune.tuner.candidates import Candidate, SearchTask
    from flashtune.tuner.execution.compile_pool import CompilePool
    from flashtune.tuner.execution.cpus import available_cpus

    with CompilePool(available_cpus()) as pool:
        jobs = []
        for case in cases:
            record = case.record(target)
            assert record.config is not None
            candidate = Candidate(record.family, record.config)
            jobs.append(pool.submit(SearchTask(record.problem, target, case.assumed, ()), candidate))
        for job in jobs:
            job.result()


def _first_use(case: Case, database: Path, *, preloaded: bool = True) -> First:
    """Compiles or finds, loads and checks a kernel with an empty database."""
    os.environ["FLASHTUNE_DB"] = str(database)
    checks = SelfChecks()
    device = torch.device("cuda", torch.cuda.current_device())
    target = device_target(device.index)
    record = case.record(target)
    assert record.config is not None
    kernel = kernel_of(record, case.assumed)
    problem = msgspec.structs.replace(case.problem, causal=record.problem.causal)
    # Whoever calls has tensors.
    torch.empty(64, 64, dtype=torch.bfloat16, device=device).normal_().to(TORCH_DTYPES[problem.dtype])
    torch.cuda.synchronize()
    # A check does not count the garbage collection, which takes 0.15 s of a slow core by now.
    gc.collect()
    start = time.perf_counter()
    task = CheckTask(kernel, problem, record.config, target, device)
    preload = checks.preloading(task)
    with preload if preloaded else contextlib.nullcontext():
        binary = Binaries().of(kernel, target, device)
        loaded = time.perf_counter()
    passed = checks.passes(task, binary)
    proven = time.perf_counter()
    assert passed, f"{kernel.digest} of {problem.key} fails"
    return First(1e3 * (loaded - start), 1e3 * (proven - loaded))


def _first_product() -> float:
    """The time of the first matrix product in ms: cuBLAS creates its handle."""
    matrix = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    matrix @ matrix
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def _one(case: Case, way: Way) -> None:
    """Prints the times of the first matrix product and the first use; runs in a separate process."""
    product_ms = _first_product() if way is Way.CACHED else 0.0
    first = _first_use(case, Path(os.environ["FLASHTUNE_DB"]), preloaded=way is not Way.ALONE)
    print(product_ms, first.compiling_ms, first.check_ms)


def _fresh(number: int, folder: Path) -> Fresh:
    """The shortest time of a first use over several separate processes."""

    def tries(way: Way, count: int) -> list[tuple[float, ...]]:
        return list(zip(*(_in_a_process(number, way, folder) for _ in range(count)), strict=True))

    _, compiling_ms, compiled_ms = tries(Way.COMPILED, FRESH_TRIES)
    cublas_ms, _, cached_ms = tries(Way.CACHED, FRESH_TRIES)
    _, alone_ms, _ = tries(Way.ALONE, 1)
    return Fresh(min(compiled_ms), min(cached_ms), min(cublas_ms), compiling_ms[0], alone_ms[0])


def _in_a_process(number: int, way: Way, folder: Path) -> tuple[float, ...]:
    """The first product of matrices, compiling and loading, and the check, in ms."""
    command = [sys.executable, "-m", "benchmarks.host.first_use", "--one", str(number), "--way", way]
    with tempfile.TemporaryDirectory(dir=folder) as own:
        # An installation has the modules' bytecode.
        environment = {**os.environ, "FLASHTUNE_DB": f"{own}/none.sqlite", "PYTHONDONTWRITEBYTECODE": ""}
        if way is not Way.CACHED:
            environment["TRITON_CACHE_DIR"] = f"{own}/triton"
        said = subprocess.check_output(command, env=environment, cwd=ROOT, text=True)
    return tuple(map(float, said.split()))


def texts() -> dict[str, str]:
    """The tables of the saved run, by name."""
    saved = load(SAVED, list[Row])
    return {"first-use": "\n".join(_lines(saved.source, saved.rows))}


def _lines(source: Source, rows: Sequence[Row]) -> Iterator[str]:
    yield f"{run_of(source, f', driver {source.driver}')}, in ms:"
    yield ""
    fresh = ("fresh, compiled there", "fresh, compiled before", "start of cuBLAS")
    yield from table(("shape", "family", "at work", *fresh), (*map(_cells_of, rows), _longest(rows)))
    yield ""
    yield _compiling(rows)


def _cells_of(row: Row) -> tuple[str, ...]:
    fresh = _fresh_cells(row.fresh) if row.fresh else ("", "", "")
    odd = ", odd strides" if row.odd else ""
    return f"{row.problem}{odd}", row.family, f"{row.at_work_ms:.0f}", *fresh


def _fresh_cells(fresh: Fresh) -> tuple[str, str, str]:
    return f"{fresh.compiled_ms:.0f}", f"{fresh.cached_ms:.0f}", f"{fresh.cublas_ms:.0f}"


def _longest(rows: Sequence[Row]) -> tuple[str, ...]:
    times = [msgspec.structs.astuple(row.fresh) for row in rows if row.fresh]
    longest = Fresh(*map(max, zip(*times, strict=True)))
    return "the longest", "", f"{max(row.at_work_ms for row in rows):.0f}", *_fresh_cells(longest)


def _compiling(rows: Sequence[Row]) -> str:
    times = [row.fresh for row in rows if row.fresh]
    both = sum(row.compiling_ms for row in times) / 1e3
    alone = sum(row.alone_ms for row in times) / 1e3
    return (
        f"Compiling and loading these {len(times)} kernels took {both:.1f} s in all while their checks were "
        f"preloaded, and {alone:.1f} s where nothing else went on."
    )


if __name__ == "__main__":
    main()
