"""Tests of makespans and tile schedules against the kernels' and against measured times."""

import functools
import itertools
import math
import statistics
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.exhaustive.truth_table import TruthTable, read_tables
from flashtune.core.problem import Causal, Direction, Problem
from flashtune.core.target import find_target
from flashtune.templates.common.model.cost import together_us, traffic_us
from flashtune.templates.common.model.makespan_backward import turned
from flashtune.templates.common.model.tile_schedule import (
    MAX_TILES,
    RESIDENT,
    TileCost,
    Tiling,
    blocks,
    extremes,
    greedy_makespan,
    largest_load,
    persistent_programs,
    tile_of,
)
from flashtune.templates.forward_hopper.space import Order
from flashtune.templates.registry import families, find_family
from flashtune.tuner.workloads.shapes import parse_shape
from tests.emulator.hopper_schedule import COUNTS, LOCATES
from tests.problems.hopper import a_config as hopper_config
from tests.problems.hopper import a_problem

H200 = find_target("h200")
DATA = Path(__file__).parents[2] / "data" / "truth"
COST = TileCost(block=1.0, tile=0.5)


@given(
    st.sampled_from(["linear", "lpt", "serpentine"]),
    st.sampled_from(list(Causal)),
    st.integers(1, 6),
    st.integers(1, 900),
    st.integers(0, 5),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_busiest_program_matches_the_schedule_of_the_kernel(
    order: str, causal: Causal, heads: int, seqlen: int, head_swizzle: int, balanced_grid: bool
) -> None:
    problem = a_problem(
        64, heads=heads, kv_heads=heads, batch=2, seqlen_q=seqlen, seqlen_kv=700, causal=causal
    )
    tiling = Tiling(problem, 64, 128, 1)
    num_programs = persistent_programs(tiling.total, balanced_grid, 7)
    tile = tile_of(np.arange(tiling.total), num_programs, tiling, head_swizzle, order)
    costs = blocks(tiling)[tile] * COST.block + COST.tile
    work = [costs[program::num_programs].sum() for program in range(num_programs)]
    assert largest_load(tiling, num_programs, head_swizzle, order, COST) == pytest.approx(max(work))


@pytest.mark.slow
@given(
    st.sampled_from(list(Causal)),
    st.integers(1, 2000),
    st.integers(1, 2000),
    st.integers(0, 900),
    st.one_of(st.none(), st.integers(0, 900)),
)
@settings(max_examples=60, deadline=None)
def test_window_keeps_only_visible_blocks(
    causal: Causal, seqlen_q: int, seqlen_kv: int, left: int, right: int | None
) -> None:
    problem = msgspec.structs.replace(
        a_problem(64, causal=causal, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv),
        window_left=left,
        window_right=right,
    )
    reach = problem.sight.right
    for tile, counted in enumerate(blocks(Tiling(problem, 64, 128, 1))):
        tile_of = 64 * tile + problem.diagonal
        end = seqlen_kv if reach is None else min(tile_of + 64 + reach, seqlen_kv)
        seen = range(max(0, tile_of - left) // 128, math.ceil(end / 128))
        assert counted == max(1, len(seen))


def test_windows_and_varlen_reduce_the_makespan() -> None:
    hopper = find_family("forward_hopper")
    whole = a_problem(causal=Causal.BOTTOM_RIGHT, seqlen_q=16384, seqlen_kv=16384, batch=4)
    others = [
        msgspec.structs.replace(whole, window_left=1024),
        msgspec.structs.replace(whole, packed=20000),
        msgspec.structs.replace(whole, batch=64, packed=20000),
    ]
    full, window, *packed = (
        hopper.makespan_ms(problem, hopper.default(problem, H200), H200) for problem in (whole, *others)
    )
    # A ninth of the blocks.
    assert full / 9 < window < full / 5
    # The same tokens in more sequences are fewer pairs.
    assert full / 5 < packed[0] < full / 2.5
    assert packed[1] < packed[0]


@pytest.mark.parametrize("head_swizzle", [0, 4])
@pytest.mark.parametrize("order", ["linear", "alternate"])
def test_makespan_of_many_tiles_is_extrapolated(head_swizzle: int, order: str) -> None:
    problem = a_problem(
        64, heads=64, kv_heads=64, batch=64, seqlen_q=2048, seqlen_kv=2048, causal=Causal.TOP_LEFT
    )
    tiling = Tiling(problem, 128, 128, 1)
    assert tiling.total > 2 * MAX_TILES
    num_programs = persistent_programs(tiling.total, False, 132)
    tile = tile_of(np.arange(tiling.total), num_programs, tiling, head_swizzle, order)
    costs = blocks(tiling)[tile] * COST.block + COST.tile
    exact = max(costs[program::num_programs].sum() for program in range(num_programs))
    assert largest_load(tiling, num_programs, head_swizzle, order, COST) == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("causal", list(Causal))
def test_tile_statistics_match_block_counts(causal: Causal) -> None:
    tiling = Tiling(a_problem(64, seqlen_q=1000, seqlen_kv=3000, causal=causal), 192, 128, 1)
    statistics_, counted = extremes(tiling), blocks(tiling)
    assert (statistics_.least, statistics_.most) == (counted.min(), counted.max())
    assert statistics_.mean == pytest.approx(counted.mean())


def test_tile_statistics_of_many_tiles_are_sampled() -> None:
    long = {"seqlen_q": 2**22, "seqlen_kv": 2**22}
    tiling = Tiling(msgspec.structs.replace(a_problem(64, causal=Causal.BOTTOM_RIGHT), **long), 64, 128, 1)
    assert tiling.tiles > 2 * MAX_TILES
    statistics_, counted = extremes(tiling), blocks(tiling)
    assert (statistics_.least, statistics_.most) == (counted.min(), counted.max())
    assert statistics_.mean == pytest.approx(counted.mean(), rel=1e-3)


@pytest.mark.parametrize("changes", [{"seqlen_q": 0}, {"seqlen_kv": 0}, {"batch": 0}, {"seqlen_q": 2**24}])
def test_every_family_has_a_makespan_for_every_problem(changes: dict[str, int]) -> None:
    for causal in Causal:
        problem = msgspec.structs.replace(a_problem(64, causal=causal), **changes)
        for family in families():
            span = family.makespan_ms(problem, family.default(problem, H200), H200)
            assert 0 < span < math.inf


@functools.cache
def truth() -> tuple[TruthTable, ...]:
    return read_tables(DATA)


@pytest.mark.parametrize("index", range(10))
def test_makespans_rank_tiles_and_schedules_as_measured(index: int) -> None:
    """The best of each shape of a tile, over the best of all: no table was used for fitting."""
    table = truth()[index]
    family = find_family(table.family)
    best: dict[tuple[int, ...], tuple[float, float]] = {}
    for row, ms in zip(table.rows, table.times(), strict=True):
        if ms is None:
            continue
        config = table.candidate(row).config
        tile = tuple(int(getattr(config, name, 1)) for name in ("groups", "block_m", "block_n"))
        span = family.makespan_ms(table.problem, config, H200)
        best[tile] = min(best.get(tile, (math.inf, math.inf)), (ms, span))
    median = statistics.median(span / ms for ms, span in best.values())
    errors = [abs(math.log(span / ms / median)) for ms, span in best.values()]
    assert statistics.median(errors) < (0.06 if table.family == "forward_hopper" else 0.12)
    assert max(errors) < (0.15 if table.family == "forward_hopper" else 0.35)


def test_query_heads_of_a_kv_head_share_key_traffic() -> None:
    problem = a_problem(
        heads=96, kv_heads=24, batch=10, seqlen_q=1186, seqlen_kv=1186, causal=Causal.BOTTOM_RIGHT
    )
    streamed = 960 * 10 * 700
    alone, neighbours = (
        traffic_us(problem, streamed, 240.0, 132, H200, neighbours=count) for count in (1, 4)
    )
    assert neighbours < alone < 4 * neighbours
    # A program for each head at a time shares nothing that more heads at a time would not.
    few = (traffic_us(problem, streamed, 16.0, 132, H200, neighbours=count) for count in (1, 4))
    assert len(set(few)) == 1


def test_compute_and_transfers_overlap_partially() -> None:
    assert together_us(100.0, 0.0) == pytest.approx(100.0)
    assert 100.0 < together_us(100.0, 50.0) < 102.0
    assert 115.0 < together_us(100.0, 100.0) < 125.0


@pytest.mark.parametrize(("programs", "rounds"), [(264, 2.0), (276, 3.5), (396, 3.5), (400, 4.0), (528, 4.0)])
def test_equal_programs_end_simultaneously(programs: int, rounds: float) -> None:
    # Two at a time on each multiprocessor; one by itself takes 1.5 times its share of the units.
    tiling = Tiling(
        a_problem(64, heads=programs, kv_heads=programs, seqlen_q=64, seqlen_kv=1280, batch=1), 64, 128, 1
    )
    assert (tiling.total, RESIDENT) == (programs, 2)
    mean = 10 * COST.block + COST.tile
    assert greedy_makespan(tiling, 132, False, COST, 1.5) == pytest.approx(rounds * mean)


def test_makespan_of_hopper_tiles_includes_their_overhead() -> None:
    hopper = find_family("forward_hopper")
    problem = a_problem(
        64, heads=120, kv_heads=24, batch=46, seqlen_q=192, seqlen_kv=192, causal=Causal.BOTTOM_RIGHT
    )
    default = hopper.default(problem, H200)

    def span(**changes: object) -> float:
        return hopper.makespan_ms(problem, msgspec.structs.replace(default, **changes), H200)

    # Measured on an H200: 200 and 211 µs for one tile a head, whose order is nothing but arithmetic.
    assert 1.03 < span(order=Order.SERPENTINE) / span(order=Order.LINEAR) < 1.07
    assert 1.0 < span(q_stages=1) / span(q_stages=2) < 1.15
    longer = msgspec.structs.replace(problem, heads=32, kv_heads=32, batch=18, seqlen_q=917, seqlen_kv=917)
    balanced_grid, all_of_them = (
        hopper.makespan_ms(
            longer,
            msgspec.structs.replace(
                default, head_swizzle=4, order=Order.SERPENTINE, balanced_grid=balanced_grid
            ),
            H200,
        )
        for balanced_grid in (True, False)
    )
    assert 1.03 < balanced_grid / all_of_them < 1.07


def shaped(shape: str) -> Problem:
    (problem,) = parse_shape(shape)
    return problem


CAUSAL = shaped("heads=16,seqlen=4096,head_dim=128,tokens=16384,causal")
FULL = shaped("heads=16,seqlen=4096,head_dim=128,tokens=16384")


@given(
    st.sampled_from(["linear", "lpt", "serpentine"]),
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(0, 12),
)
def test_tile_order_matches_the_kernels(
    order: str, most: int, kv_heads: int, batch: int, tiles: int, head_swizzle: int
) -> None:
    shape = f"heads={kv_heads},seqlen={tiles * 64},head_dim=64,batch={batch},causal"
    tiling = Tiling(shaped(shape), 64, 128, 1)
    heads, total = batch * kv_heads, batch * kv_heads * tiles
    num_programs = min(most, total)
    locate = LOCATES[order, 1]
    width = min(head_swizzle or heads, heads)
    expected = [
        locate(index, num_programs, total, tiles, width, heads, kv_heads, 1)[0] for index in range(total)
    ]
    assert tile_of(np.arange(total), num_programs, tiling, head_swizzle, order).tolist() == expected


@pytest.mark.parametrize("problem", [CAUSAL, FULL])
def test_block_counts_match_the_kernels(problem: Problem) -> None:
    counts = blocks(Tiling(problem, 192, 128, 1))
    count = COUNTS[problem.causal]
    assert counts.tolist() == [count(first, 192, 4096, 4096) for first in range(0, 4096, 192)]


def of_hopper(**changes: Any) -> float:
    config = hopper_config(CAUSAL, num_consumer_groups=2, head_swizzle=4, balanced_grid=True, **changes)
    return find_family("forward_hopper").makespan_ms(CAUSAL, config, H200)


def test_serpentine_order_is_faster_as_measured() -> None:
    alternate, linear, longest = (of_hopper(order=order) for order in ("serpentine", "linear", "lpt"))
    # Measured: 664 TFLOP/s against 360 in plain order and 364 with the longest first.
    assert linear / alternate == pytest.approx(664 / 360, rel=0.15)
    assert longest / alternate == pytest.approx(664 / 364, rel=0.15)


@pytest.mark.parametrize(
    ("causal", "window", "lengths"),
    list(
        itertools.product(Causal, [(None, None), (100, None), (64, 32)], [(256, 256), (128, 320), (320, 128)])
    ),
)
def test_transposed_problem_has_the_same_pairs(
    causal: Causal, window: tuple[int | None, int | None], lengths: tuple[int, int]
) -> None:
    left, right = window
    problem = msgspec.structs.replace(
        FULL,
        causal=causal,
        window_left=left,
        window_right=right,
        seqlen_q=lengths[0],
        seqlen_kv=lengths[1],
        direction=Direction.BACKWARD,
    )
    other = turned(problem)
    assert other.visible_pairs() == problem.visible_pairs()
    assert (other.seqlen_q, other.seqlen_kv, other.heads) == (lengths[1], lengths[0], problem.kv_heads)
