"""Times of unfused attention and of kernels from 16 tokens up, on this machine's GPU.

    python -m benchmarks.analysis.crossover --save benchmarks/results/nvidia-h200-crossover.json.gz
    python -m benchmarks.documents --write      # the table and the picture of docs/analysis.md

It takes some minutes, and saves after each shape. The shapes are bf16 with 16 heads, of head dims 64 and 128,
with and without a causal mask, of one sequence and of 16. `flashtune analyze crossover` times other shapes.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.saved import save
from flashtune.core.errors import FlashtuneError
from flashtune.tuner.bench.driver import BenchRequest, run_benches
from flashtune.tuner.bench.peer_runs import UNFUSED
from flashtune.tuner.bench.results import BenchRun
from flashtune.tuner.workloads.shapes import parse_shape

SHAPES = (
    "heads=16,seqlen=16..4096,head_dim=64|128,batch=1|16",
    "heads=16,seqlen=16..4096,head_dim=64|128,batch=1|16,causal",
)
ROUNDS = 21


def main() -> None:
    """Measures all shapes, and writes the run after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", type=Path, metavar="FILE", required=True)
    options = parser.parse_args()
    problems = tuple(problem for shape in SHAPES for problem in parse_shape(shape))

    def watch(run: BenchRun) -> None:
        bench = run.benches[-1]
        times = ", ".join(f"{row.name} {row.ms:.4f} ms" for row in bench.rows)
        print(f"{len(run.benches)} of {len(problems)}: {bench.problem.key}: {times}", flush=True)
        save(options.save, run)

    try:
        run_benches(BenchRequest(problems, (0,), (UNFUSED,), ROUNDS, "benchmarks.analysis.crossover"), watch)
    except FlashtuneError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
