"""Tables of the times in shipped tables, which searches measured together with SDPA's backends.

    flashtune search --shapes-file benchmarks/kernels/plain_shapes.txt --seconds 6
    flashtune search --shapes-file benchmarks/kernels/feature_shapes.txt --seconds 4
    flashtune search --shapes-file benchmarks/kernels/masked_shapes.txt --seconds 4

`python -m benchmarks.documents --write` puts the tables into the pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flashtune.core.problem import Causal, Direction, Problem
from flashtune.core.record import Record
from flashtune.db.table import shipped_table
from flashtune.tuner.bench.grids import grid_problems
from flashtune.tuner.bench.peer_runs import CUDNN
from flashtune.tuner.cli.output import table

SCRIPT = "benchmarks/kernels/shipped_report.py"
TARGET = "nvidia-h100"


def texts() -> dict[str, str]:
    """Returns the tables by name."""
    shipped = shipped_table(TARGET)
    assert shipped is not None
    return {TARGET: "\n".join(_lines(shipped.records))}


def _lines(records: Sequence[Record]) -> Iterator[str]:
    """The speed of each shape of the grids `paper` and `backward`, and that over cuDNN's."""
    versions = records[0].versions
    # The first record of a problem is its selection. Others serve tensors with other strides.
    selected: dict[Problem, Record] = {}
    for record in records:
        selected.setdefault(record.problem, record)
    problems = [one for grid in ("paper", "backward") for one in grid_problems(grid) if one in selected]
    lines: dict[str, dict[int, str]] = {}
    for problem in problems:
        lines.setdefault(_title(problem), {})[problem.seqlen_kv] = _cell(selected[problem])
    lengths = sorted({problem.seqlen_kv for problem in problems})
    yield (
        f"TFLOP/s on an NVIDIA {TARGET.removeprefix('nvidia-').upper()}, and in brackets the speed over "
        f"cuDNN in the same run (torch {versions.torch}, Triton {versions.triton}, driver {versions.driver}):"
    )
    yield ""
    rows = ((title, *(cells.get(length, "") for length in lengths)) for title, cells in lines.items())
    yield from table(("16k tokens", *map(str, lengths)), rows)


def _title(problem: Problem) -> str:
    mask = "full" if problem.causal is Causal.NONE else "causal"
    return f"D{problem.head_dim} {mask}" + (", gradients" if problem.direction is Direction.BACKWARD else "")


def _cell(record: Record) -> str:
    assert record.measurement is not None
    ms = record.measurement.ms
    peers = {peer.name: peer.ms for peer in record.measurement.peers}
    return f"{record.problem.nominal_flops() / ms / 1e9:.0f} ({peers[CUDNN] / ms:.2f})"
