"""Tests of the table of features in saved results of `flashtune bench`."""

import msgspec

from benchmarks.tables import by_grid, features_table
from flashtune.tuner.bench.grids import grid_problems
from flashtune.tuner.bench.results import OURS
from tests.tuner.bench.bench_fakes import a_bench, a_reading_bench

PROBLEMS = grid_problems("features")


def test_each_point_has_the_speeds_of_all_implementations() -> None:
    window = next(problem for problem in PROBLEMS if problem.window_left)
    decode = next(problem for problem in PROBLEMS if problem.seqlen_q == 1)
    benches = [
        a_bench(window, {OURS: 500.0, "flex": 300.0, "flash-attn-4": 400.0}),
        a_reading_bench(decode, {OURS: 4000.0}),
    ]
    lines = list(features_table(by_grid(benches)))
    assert "| shape | flashtune | flex | flash-attn-4 | over the best |" in lines
    (windowed,) = [line for line in lines if "window1023" in line]
    assert windowed.endswith("| 500 | 300 | 400 | 1.25 |")
    (decoded,) = [line for line in lines if "page16" in line]
    assert decoded.endswith("| 4000 | – | – | – |")


def test_plain_points_alone_give_no_table() -> None:
    plain = [problem for problem in PROBLEMS if not problem.features]
    assert plain
    assert list(features_table(by_grid(map(a_bench, plain)))) == []


def test_grids_that_share_problems_have_results_of_one_gpu_each() -> None:
    paper = grid_problems("paper")
    shared = set(paper) & set(PROBLEMS)
    assert shared
    h200 = [msgspec.structs.replace(a_bench(problem), target="nvidia-h200") for problem in paper]
    h100 = [msgspec.structs.replace(a_bench(problem), target="nvidia-h100") for problem in PROBLEMS]
    for benches in (h200 + h100, h100 + h200):
        results = by_grid(benches)
        assert {bench.target for bench in results["paper"]} == {"nvidia-h200"}
        assert {bench.target for bench in results["features"]} == {"nvidia-h100"}
