"""Measures every config of a family's space for a problem, or a uniform sample, and saves all results.

    python -m benchmarks.exhaustive.truth --preset --out tests/data/truth  # ten problems
    python -m benchmarks.exhaustive.truth --family forward_hopper --shape heads=16,seqlen=2048,head_dim=128

Configs are compiled on all cores. Meanwhile, finished ones are compared with a float64 reference on small
problems and timed in batches, interleaved with the family's default. The best of all batches are then timed
again in one run. Each problem gives one file. An interrupted run has saved its results, and a problem with a
complete file is skipped. docs/search.md describes the use.
"""

import argparse
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.exhaustive.run import Drawing, Workers, make_table
from benchmarks.exhaustive.truth_table import TruthTable, fastest, file_name, read_table
from flashtune.core.errors import FlashtuneError
from flashtune.core.problem import Problem
from flashtune.core.record import Outcome
from flashtune.core.target import device_target
from flashtune.tuner.execution.cpus import available_cpus
from flashtune.tuner.workloads.shapes import parse_shape

PRESET = (
    ("forward_hopper", "heads=16,seqlen=2048,head_dim=128,tokens=16384,causal"),
    ("forward_hopper", "heads=16,seqlen=8192,head_dim=128,tokens=16384"),
    ("forward_hopper", "heads=32,seqlen=1024,head_dim=64,tokens=16384"),
    ("forward_hopper", "heads=8,seqlen=1024,head_dim=256,tokens=16384,causal"),
    ("forward_q_outer", "heads=16,seqlen=2048,head_dim=128,tokens=16384,causal"),
    ("forward_hopper", "heads=32,seqlen=8192,head_dim=64,tokens=16384,causal"),
    ("forward_hopper", "heads=16,seqlen=512,head_dim=128,tokens=16384"),
    ("forward_hopper", "heads=64,kv_heads=8,seqlen=4096,head_dim=128,tokens=16384,causal"),
    ("forward_q_outer", "heads=32,seqlen=4096,head_dim=64,tokens=16384"),
    ("forward_hopper", "heads=8,seqlen=4096,head_dim=256,tokens=16384"),
)


def main() -> None:
    """Measures the problems of the command line."""
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    drawing = Drawing(options.configs or None, options.seed, options.seconds)
    try:
        target = device_target(options.device)
        with Workers(options.device, options.jobs or max(1, available_cpus() - 1)) as workers:
            for problem, family in _asked(options):
                path = options.out / file_name(target.name, family, problem)
                if path.exists() and not (kept := read_table(path)).is_cut:
                    print(f"{path.name}: is there already, {_summary(kept)}", flush=True)
                    continue
                table = make_table(workers, problem, family, target, drawing, path)
                print(f"{path.name}: {_summary(table)}; {path.stat().st_size:,} bytes", flush=True)
    except FlashtuneError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: what was measured is written")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures all configs of a problem's space on a GPU.")
    parser.add_argument("--preset", action="store_true", help="the ten problems of tests/data/truth")
    parser.add_argument("--shape", action="append", default=[], help="as for flashtune search; repeatable")
    parser.add_argument("--family", default="forward_hopper", help="the family of the configs, for --shape")
    parser.add_argument("--configs", type=int, default=300, help="how many to draw; 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--seconds", type=float, default=150.0, help="limit for each problem")
    parser.add_argument("--jobs", type=int, help="compiler processes; one per core less one if left out")
    parser.add_argument("--device", type=int, default=0, help="index of the GPU")
    parser.add_argument("--out", type=Path, default=Path("tests/data/truth"), help="folder of the tables")
    options = parser.parse_args()
    if not options.preset and not options.shape:
        parser.error("name what to measure, by --preset or --shape")
    return options


def _asked(options: argparse.Namespace) -> Iterator[tuple[Problem, str]]:
    wanted = [*(PRESET if options.preset else ()), *((options.family, shape) for shape in options.shape)]
    for family, shape in wanted:
        for problem in parse_shape(shape):
            yield problem, family


def _summary(table: TruthTable) -> str:
    outcomes = Counter(row.outcome.value for row in table.rows)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    speed = f"best {fastest(table):.4f} ms" if Outcome.OK.value in outcomes else "nothing works"
    drift = f"{max(table.anchors) / min(table.anchors) - 1:.1%}" if table.anchors else "unknown"
    return f"{len(table.rows)} of {table.drawn} in {table.seconds:.0f} s: {counts}; {speed}; drift {drift}"


if __name__ == "__main__":
    main()
