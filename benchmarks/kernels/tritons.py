"""Speeds of the shipped kernels under other Triton versions, from runs of `flashtune bench`.

    flashtune bench --grid paper --grid backward --grid decode --peer sdpa-cudnn --save FILE  # under each

Runs of two Triton versions are in two processes, between which clocks differ. Each time is therefore relative
to cuDNN's in its own run. If cuDNN has no row, the reference is a copy of device memory.

    python -m benchmarks.kernels.tritons FILE...    # prints the table of saved runs

The first file is of the version that the others are compared with. With several runs of each version, such as
one for each GPU, the median over these runs counts for each point. With `FLASHTUNE_BUNDLE`, all versions run
the same machine code.
"""

import argparse
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.saved import RESULTS, ROOT, content, sources
from flashtune.core.errors import TableError
from flashtune.core.problem import Problem
from flashtune.tuner.bench.driver import read_report
from flashtune.tuner.bench.grids import case_of, grid_problems
from flashtune.tuner.bench.peer_runs import CUDNN
from flashtune.tuner.bench.results import OURS, BenchRun
from flashtune.tuner.cli.output import table

SCRIPT = "benchmarks/kernels/tritons.py"
SAVED = tuple(RESULTS / f"nvidia-h200-triton-{version}.json.gz" for version in ("3.6.0", "3.7.1", "3.9.0"))
# Runs with one bundle: endings of the names of runs on the same GPU, under Triton 3.6.0 and the version.
BUNDLED = {"3.7.1": ("",), "3.9.0": ("", "-second", "-third")}
COPY = "copy"
# In the order of preference.
REFERENCES = (CUDNN, COPY)
GRIDS = {"forward": "paper", "backward": "backward", "decode": "decode"}


class Comparison(msgspec.Struct, frozen=True):
    """Speeds of one grid's kernels under a version of Triton over those under another."""

    grid: str  # `forward`, `backward` or `decode`.
    triton: str  # The version.
    # Speed over that under the other version, by case; both are relative to the same peer.
    ratios: dict[str, float]


def texts() -> dict[str, str]:
    """Returns the tables of the saved runs, by name."""
    source = sources()[str(SAVED[0].relative_to(ROOT))]
    heading = f"On an {source.gpu} (torch {source.torch}):"
    bundled = [
        [[_bundled(own, ending) for ending in endings] for own in ("3.6.0", version)]
        for version, endings in BUNDLED.items()
    ]
    return {
        "tritons": "\n".join((heading, "", *lines_of(SAVED))),
        "tritons-bundle": "\n".join((heading, "", *lines(*bundled))),
    }


def _bundled(version: str, ending: str) -> BenchRun:
    path = RESULTS / f"nvidia-h200-bundle-triton-{version}{ending}.json.gz"
    return read_report(content(path), path.name)


def lines_of(paths: Iterable[Path]) -> Iterator[str]:
    """Returns the lines of the table of saved runs, of which the first is of the version to compare with."""
    runs: dict[str, list[BenchRun]] = {}
    for path in paths:
        run = read_report(content(path), path.name)
        runs.setdefault(triton_of(run), []).append(run)
    first, *others = runs.values()
    return lines(*((first, other) for other in others))


def lines(*pairs: Sequence[Sequence[BenchRun]]) -> Iterator[str]:
    """Returns the lines of the table: a row for each grid and pair. Both of a pair have as many runs."""
    rows = [
        (
            row.grid,
            row.triton,
            str(len(row.ratios)),
            f"{statistics.geometric_mean(row.ratios.values()):.3f}",
            f"{min(row.ratios.values()):.3f} ({min(row.ratios, key=row.ratios.__getitem__)})",
        )
        for first, other in pairs
        for row in compare(first, other)
    ]
    heads = (
        "points",
        "Triton",
        "number",
        f"speed over Triton {triton_of(pairs[0][0][0])}, geometric mean",
        "worst",
    )
    yield from table(heads, rows)


def compare(first: Sequence[BenchRun], other: Sequence[BenchRun]) -> tuple[Comparison, ...]:
    """Returns speeds of one version's kernels over those of the first: medians over pairs of runs.

    A pair counts for the points that both runs hold.
    """
    return tuple(
        Comparison(
            name,
            triton_of(other[0]),
            {
                case_of(problem): statistics.median(
                    _ratio(problem, *pair) for pair in _pairs(problem, first, other)
                )
                for problem in grid_problems(grid)
            },
        )
        for name, grid in GRIDS.items()
    )


def _pairs(
    problem: Problem, first: Sequence[BenchRun], other: Sequence[BenchRun]
) -> list[tuple[BenchRun, BenchRun]]:
    pairs = [*zip(first, other, strict=True)]
    held = [
        pair for pair in pairs if all(problem in {bench.problem for bench in run.benches} for run in pair)
    ]
    # Without such a pair, the error names what is missing.
    return held or pairs[:1]


def triton_of(run: BenchRun) -> str:
    """Returns the Triton version that made the kernels of a run."""
    versions = {bench.versions.triton for bench in run.benches}
    if len(versions) != 1:
        raise TableError(f"a run has kernels of one Triton version, and this one of {sorted(versions)}")
    return versions.pop()


def _ratio(problem: Problem, first: BenchRun, other: BenchRun) -> float:
    """Returns the speed at one problem over that in the first run, both relative to one reference."""
    (old, old_references), (new, new_references) = (_times(problem, run) for run in (first, other))
    for name in REFERENCES:
        if name in old_references and name in new_references:
            return (old / old_references[name]) / (new / new_references[name])
    raise TableError(f"both runs must hold {CUDNN} or a copy to compare {case_of(problem)}: measure again")


def _times(problem: Problem, run: BenchRun) -> tuple[float, dict[str, float]]:
    """Returns the time of our kernel, and those of the references, in ms."""
    bench = next((bench for bench in run.benches if bench.problem == problem), None)
    ours = bench.row(OURS) if bench else None
    if bench is None or ours is None:
        raise TableError(f"the run under Triton {triton_of(run)} has no time of {case_of(problem)}")
    peer = bench.row(CUDNN)
    times = {CUDNN: peer.ms if peer else None, COPY: run.copy.ms if run.copy else None}
    return ours.ms, {name: ms for name, ms in times.items() if ms is not None}


def main() -> None:
    """Prints the table of saved runs."""
    parser = argparse.ArgumentParser(description="Compares runs under several versions of Triton.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="runs that flashtune bench saved")
    print(*lines_of(parser.parse_args().files), sep="\n")


if __name__ == "__main__":
    main()
