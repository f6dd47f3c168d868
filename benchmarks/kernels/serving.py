"""Times of attention with pages, 8-bit caches, latent keys and windows, and without them.

    python -m benchmarks.kernels.serving  # prints the table
    python -m benchmarks.kernels.serving --save benchmarks/results/nvidia-h200-serving.json.gz

Each group of shapes is timed in one interleaved run, with a cold L2. Kernels are those that dispatch selects
from the shipped table for contiguous tensors. Sequences have the same lengths as in a search. The first shape
of a group is the baseline of the others. Needs a GPU.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from benchmarks.dispatch_regret.analysis import dispatched
from benchmarks.saved import RESULTS, Source, load, run_of, save, this_run
from flashtune.core.errors import FlashtuneError, UsageError
from flashtune.core.problem import Problem
from flashtune.core.record import Record
from flashtune.core.target import Target, device_target
from flashtune.db.table import shipped_table
from flashtune.tuner.candidates import contiguous_specialization
from flashtune.tuner.cli.output import table
from flashtune.tuner.execution.inputs import make_tensors
from flashtune.tuner.execution.timed_runs import kernel_run
from flashtune.tuner.execution.timing import measure_interleaved
from flashtune.tuner.workloads.shapes import parse_shape

SCRIPT = "benchmarks/kernels/serving.py"
SAVED = RESULTS / "nvidia-h200-serving.json.gz"
ROUNDS = 61
DECODE = "dtype=bf16,heads=32,kv_heads=8,head_dim=128,seqlen_q=1"
MLA = "dtype=bf16,heads=128,kv_heads=1,head_dim=576,value_head_dim=512,mla"
LATENT = f"{MLA},seqlen_q=1,batch=64,seqlen_kv=4096"
CAUSAL = "dtype=bf16,heads=16,head_dim=128,seqlen=16384,causal"
PAGES = ("kv_lengths", "page_size=16", "page_size=64")
CACHES = tuple(f"page_size=64,kv_dtype={dtype},kv_scale=head" for dtype in ("e4m3", "int8"))
# The first shape of each group is the one that the others are compared with.
GROUPS = (
    tuple(f"{DECODE},batch=16,seqlen_kv=8192,{feature}" for feature in (*PAGES, *CACHES)),
    tuple(f"{DECODE},batch=64,seqlen_kv=4096,{feature}" for feature in (*PAGES, *CACHES)),
    tuple(f"{LATENT},page_size={size}" for size in (64, 32, 16)),
    (CAUSAL, f"{CAUSAL},window=1023"),
)


class Row(msgspec.Struct, frozen=True):
    """One shape."""

    problem: str  # The problem's key.
    family: str  # The family that dispatch selected.
    # ms, p20, p80: Its time.
    ms: float
    p20: float
    p80: float
    over_first: float  # `ms` over that of the first shape in its group.


def main() -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description="What serving features take.")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep what was measured, in JSON")
    options = parser.parse_args()
    rows: list[Row] = []
    try:
        target = device_target(0)
        shipped = shipped_table(target.name)
        if shipped is None:
            raise UsageError(f"no table ships for {target.name}: there are no tuned kernels to time")
        for group in GROUPS:
            problems = [parse_shape(shape)[0] for shape in group]
            rows += measure(problems, shipped.records, target, torch.device("cuda", 0))
    except FlashtuneError as error:
        sys.exit(f"error: {error}")
    print(*_lines(this_run(), rows), sep="\n")
    if options.save:
        save(options.save, rows)


def measure(
    problems: Sequence[Problem], records: tuple[Record, ...], target: Target, device: torch.device
) -> Iterator[Row]:
    """A row for each problem, all timed in turn."""
    chosen = [dispatched(target, problem, records) for problem in problems]
    runs = [
        kernel_run(
            problem, candidate, contiguous_specialization(problem), target, make_tensors(problem, device)
        )
        for problem, candidate in zip(problems, chosen, strict=True)
    ]
    timed = measure_interleaved(runs, device, rounds=ROUNDS)
    for problem, candidate, time in zip(problems, chosen, timed, strict=True):
        yield Row(problem.key, candidate.family, time.ms, time.p20, time.p80, time.ms / timed[0].ms)


def texts() -> dict[str, str]:
    """The tables of the saved run, by name."""
    saved = load(SAVED, list[Row])
    return {"serving": "\n".join(_lines(saved.source, saved.rows))}


def _lines(source: Source, rows: Sequence[Row]) -> Iterator[str]:
    yield f"{run_of(source)}:"
    yield ""
    cells = ((row.problem, row.family, f"{row.ms:.4f}", f"{row.over_first:.2f}") for row in rows)
    yield from table(("shape", "family", "ms", "over the first of its group"), cells)


if __name__ == "__main__":
    main()
