"""Tests of the comparison of speeds under other Triton versions."""

from collections.abc import Callable

import msgspec
import pytest

from benchmarks.kernels.tritons import GRIDS, compare, lines
from flashtune.core.errors import TableError
from flashtune.core.problem import Problem
from flashtune.core.record import Versions
from flashtune.tuner.bench.grids import grid_problems
from flashtune.tuner.bench.peer_runs import CUDNN
from flashtune.tuner.bench.results import OURS, Bench, BenchRun, Copy, Environment, Row

PROBLEMS = tuple(problem for grid in GRIDS.values() for problem in grid_problems(grid))


def a_run(
    triton: str, time_of: Callable[[Problem], float], peer: float | None = 1.0, copy: float | None = None
) -> BenchRun:
    versions = Versions(
        flashtune="0", template="0" * 16, torch="2.11", triton=triton, ptxas="12.8", driver="580"
    )

    def row(name: str, ms: float) -> Row:
        return Row(name, "", ms, ms, ms, 1.0, 0.0, 0.0)

    def bench(problem: Problem) -> Bench:
        rows = (row(OURS, time_of(problem)), *((row(CUDNN, peer),) if peer else ()))
        return Bench(problem, "nvidia-h200", rows, (), 9, False, 1980.0, 1.0, versions)

    copied = Copy(2**30, copy, 4000.0) if copy else None
    environment = Environment("NVIDIA H200", "13.0", "9.1", "")
    return BenchRun("flashtune bench", environment, (), tuple(bench(problem) for problem in PROBLEMS), copied)


def test_times_are_relative_to_the_baseline_of_their_run() -> None:
    first = a_run("3.6.0", lambda problem: 2.0, peer=1.0)
    other = a_run("3.9.0", lambda problem: 1.0 if problem.is_backward else 2.0, peer=0.5)

    speeds = {speed.grid: speed for speed in compare(first, other)}

    assert [len(speeds[name].ratios) for name in ("forward", "backward", "decode")] == [36, 12, 8]
    assert set(speeds["forward"].ratios.values()) == {0.5}
    assert set(speeds["backward"].ratios.values()) == {1.0}
    assert {speed.triton for speed in speeds.values()} == {"3.9.0"}


def test_copy_is_the_reference_without_a_baseline() -> None:
    first = a_run("3.6.0", lambda problem: 2.0, peer=1.0, copy=1.0)
    other = a_run("3.7.1", lambda problem: 2.0, peer=None, copy=2.0)
    assert set(compare(first, other)[0].ratios.values()) == {2.0}

    with pytest.raises(TableError, match="measure again"):
        compare(first, a_run("3.7.1", lambda problem: 2.0, peer=None))


def test_a_missing_point_is_an_error() -> None:
    first = a_run("3.6.0", lambda problem: 2.0)
    other = msgspec.structs.replace(first, benches=first.benches[1:])
    with pytest.raises(TableError, match="has no time of fwd d64 full s512"):
        compare(first, other)


def test_table_names_the_worst_point() -> None:
    first = a_run("3.6.0", lambda problem: 2.0)
    slow = grid_problems("decode")[0]
    other = a_run("3.9.0", lambda problem: 4.0 if problem == slow else 2.0)
    row = list(lines(first, [other]))[-1]
    assert row == "| decode | 3.9.0 | 8 | 0.917 | 0.500 (decode b1 hq32 hkv8 s8192 d128 [GB/s]) |"
