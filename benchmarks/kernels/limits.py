"""Shares of the GPU's peak rates that the selected kernels reach, counted by Nsight Compute.

    python -m benchmarks.kernels.limits  # prints the table, in Markdown
    python -m benchmarks.kernels.limits --save benchmarks/results/nvidia-h200-limits.json.gz

Saving runs `ncu`, which must be on PATH and be allowed to read the counters. Each shape runs once after a
warm-up. If a call launches several kernels, the row is of the one with most cycles of the matrix units. The
profiler repeats kernels at another clock than usual, so that rows have cycles and no times.
"""

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.saved import RESULTS, load, save
from flashtune.core.errors import KernelError, UsageError
from flashtune.core.problem import Problem
from flashtune.tuner.bench import backward
from flashtune.tuner.bench.calls import bind_program, program_call
from flashtune.tuner.bench.grids import CHUNKED, GQA, PACKED
from flashtune.tuner.bench.results import OURS
from flashtune.tuner.cli.output import table
from flashtune.tuner.cli.report.bench_terminal import lengths_of, title_of
from flashtune.tuner.execution.inputs import make_tensors
from flashtune.tuner.workloads.shapes import parse_shape

SCRIPT = "benchmarks/kernels/limits.py"
SAVED = RESULTS / "nvidia-h200-limits.json.gz"
LONG = "dtype=bf16,tokens=16384,seqlen=16384"
DENSE = "dtype=bf16,heads=16,head_dim=128,tokens=16384,seqlen=4096"
GPT_OSS = "dtype=bf16,heads=64,kv_heads=8,head_dim=64,seqlen=16384,causal,sinks"
PAGED = f"{CHUNKED},page_size=64"
SHAPES = (
    f"{LONG},heads=32,head_dim=64",
    f"{LONG},heads=16,head_dim=128",
    f"{LONG},heads=8,head_dim=256",
    f"{DENSE},causal",
    f"{DENSE},causal,softcap",
    f"{DENSE},causal,chunk=2048",
    f"{DENSE},bias=additive",
    "dtype=bf16,heads=32,head_dim=64,tokens=16384,seqlen=4096,bias=additive",
    f"{DENSE},bias=boolean",
    f"{DENSE},block_mask=128",
    f"{GPT_OSS},window=127",
    GPT_OSS,
    PACKED,
    f"{PACKED},softcap",
    PAGED,
    f"{PAGED},kv_dtype=e4m3",
    f"{GQA},batch=16,seqlen_q=1,seqlen_kv=8192,page_size=16",
    f"{DENSE},causal,backward",
    f"{DENSE},causal,window=1023,backward",
    f"{DENSE},causal,softcap,backward",
)
ELAPSED = "avg.pct_of_peak_sustained_elapsed"
CYCLES = "sm__cycles_elapsed.max"
L2_BYTES = "lts__t_bytes.sum"
# Columns of the table, with the counter of each share.
SHARES = {
    "matrix units": f"sm__pipe_tensor_cycles_active.{ELAPSED}",
    "exponential units": f"sm__inst_executed_pipe_xu.{ELAPSED}",
    "issue slots": f"sm__inst_issued.{ELAPSED}",
    "shared memory": f"l1tex__data_bank_reads.{ELAPSED}",
    "L2": f"lts__t_bytes.{ELAPSED}",
    "device memory": f"dram__throughput.{ELAPSED}",
}
# The kernel of `torch.cuda._sleep`, which follows those of each shape.
SEPARATOR = "spin_kernel"


class Row(NamedTuple):
    """Counters of one shape's main kernel."""

    shape: str  # The shape, as for `flashtune bench --shape`.
    kernel: str  # The kernel's name.
    cycles: float  # Cycles of the multiprocessors.
    l2_bytes: float  # Bytes that L2 transfers.
    shares: dict[str, float]  # Percentages of peak rates by column.


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--save", type=Path, help="count and write this file")
    parser.add_argument("--run", action="store_true", help="only run the kernels, as ncu's program")
    arguments = parser.parse_args()
    if arguments.run:
        run_shapes()
        return
    if arguments.save is not None:
        rows = counted()
        save(arguments.save, rows)
        print("\n".join(_table(rows)))
        return
    print(texts()["limits"])


def texts(path: Path = SAVED) -> dict[str, str]:
    """Returns the table by its name."""
    if not path.exists():
        return {"limits": "Not measured."}
    saved = load(path, list[Row])
    heading = f"On an {saved.source.gpu} (Triton {saved.source.triton}), in percent of the peak rates:"
    return {"limits": "\n".join((heading, "", *_table(saved.rows)))}


def counted() -> list[Row]:
    """Returns the counters of all shapes."""
    if shutil.which("ncu") is None:
        raise UsageError("ncu is not on PATH: install Nsight Compute")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
        command += ["--metrics", ",".join((CYCLES, L2_BYTES, *SHARES.values())), "--log-file", str(log)]
        command += [sys.executable, "-m", "benchmarks.kernels.limits", "--run"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = log.read_text() if log.exists() else ""
            raise KernelError(f"ncu ended with {done.returncode}: {(said + done.stderr)[-2000:]}")
        return rows_of(log.read_text().splitlines(), SHAPES)


def run_shapes() -> None:
    """Runs each shape once under the profiler, with a separator after it."""
    device = torch.device("cuda")
    for shape in SHAPES:
        (problem,) = parse_shape(shape)
        with backward.recording(device) if problem.is_backward else torch.no_grad():
            run = _run_of(problem, device)
            for _ in range(2):
                run()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            run()
            torch.cuda._sleep(1000)
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()


def rows_of(lines: Sequence[str], shapes: Sequence[str]) -> list[Row]:
    """Returns the row of each shape, from the lines that `ncu` writes."""
    parsed = list(csv.reader(line for line in lines if line.startswith('"')))
    groups: list[list[dict[str, str]]] = [[]]
    for cells in parsed[2:]:  # after names and units
        kernel = dict(zip(parsed[0], cells, strict=True))
        if SEPARATOR in kernel["Kernel Name"]:
            groups.append([])
        else:
            groups[-1].append(kernel)
    *complete, after = groups
    if len(complete) != len(shapes) or after:
        raise KernelError(
            f"ncu counted {len(complete)} of {len(shapes)} shapes: look for the program's error"
        )
    for shape, group in zip(shapes, complete, strict=True):
        if not group:
            raise KernelError(f"ncu counted no kernel of {shape}: run it alone")
    return [_row(shape, group) for shape, group in zip(shapes, complete, strict=True)]


def _row(shape: str, kernels: Sequence[dict[str, str]]) -> Row:
    def number(kernel: dict[str, str], counter: str) -> float:
        try:
            return float(kernel[counter].replace(",", ""))
        except (KeyError, ValueError) as error:
            raise KernelError(f"ncu has no counter {counter} on this GPU") from error

    main = max(kernels, key=lambda kernel: number(kernel, CYCLES) * number(kernel, SHARES["matrix units"]))
    shares = {name: number(main, counter) for name, counter in SHARES.items()}
    name = main["Kernel Name"].partition("(")[0]
    return Row(shape, name, number(main, CYCLES), number(main, L2_BYTES), shares)


def _run_of(problem: Problem, device: torch.device) -> Callable[[], object]:
    tensors = make_tensors(problem, device)
    if problem.is_backward:
        return backward.gradient_binders(problem, tensors, "", ())[OURS]().run
    return bind_program(program_call(problem, tensors), "").run


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of the table."""
    cells = []
    for row in rows:
        (problem,) = parse_shape(row.shape)
        shares = (f"{row.shares[name]:.0f}" for name in SHARES)
        cells.append((f"{title_of(problem)}, {lengths_of(problem)}", *shares, f"{row.l2_bytes / 1e9:.1f}"))
    yield from table(("shape", *SHARES, "L2, GB"), cells)


if __name__ == "__main__":
    main()
