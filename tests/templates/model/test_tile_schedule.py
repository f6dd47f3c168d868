"""Tests of the tile schedule against the kernels' and against measured times."""

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.core.problem import Causal, Direction, Problem
from flashtune.core.target import find_target
from flashtune.templates.common.model.makespan_backward import turned
from flashtune.templates.common.model.tile_schedule import Tiling, blocks, tile_of
from flashtune.templates.registry import find_family
from flashtune.tuner.workloads.shapes import parse_shape
from tests.emulator.hopper_schedule import COUNTS, LOCATES
from tests.problems.hopper import a_config as hopper_config

H200 = find_target("h200")


def a_problem(shape: str) -> Problem:
    (problem,) = parse_shape(shape)
    return problem


CAUSAL = a_problem("heads=16,seqlen=4096,head_dim=128,tokens=16384,causal")
FULL = a_problem("heads=16,seqlen=4096,head_dim=128,tokens=16384")


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
    tiling = Tiling(a_problem(shape), 64, 128, 1)
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
