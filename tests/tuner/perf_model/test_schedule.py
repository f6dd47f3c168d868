from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.core.problem import Problem
from flashtune.core.target import find_target
from flashtune.templates.common.model.tile_schedule import Tiling, blocks, tile_of
from flashtune.templates.forward_hopper.space import HopperConfig, usual_config
from flashtune.templates.forward_q_outer.space import QOuterConfig
from flashtune.tuner.perf_model.roofline import imbalance, whole_waves
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
    found = blocks(Tiling(problem, 192, 128, 1))
    count = COUNTS[problem.causal]
    assert found.tolist() == [count(first, 192, 4096, 4096) for first in range(0, 4096, 192)]


def of_hopper(problem: Problem, **changes: Any) -> float:
    config = hopper_config(problem, **changes)
    assert isinstance(config, HopperConfig)
    return imbalance(problem, config, 2048, H200.sm_count, H200)


def test_imbalance_of_a_full_problem_is_one_extra_tile() -> None:
    # 64 heads of 32 tiles on 132 num_sms: 16 rounds, the last one half empty.
    assert of_hopper(FULL, num_consumer_groups=2, order="linear") == pytest.approx(16 * 132 / 2048)


def test_serpentine_order_is_faster_as_measured() -> None:
    plain = {"num_consumer_groups": 2, "head_swizzle": 4, "balanced_grid": True}
    alternate, linear, longest = (
        of_hopper(CAUSAL, order=order, **plain) for order in ("serpentine", "linear", "lpt")
    )
    assert alternate == pytest.approx(132 / 128, rel=0.01)
    # Measured: 664 TFLOP/s against 360 in plain order and 364 with the longest first.
    assert linear / alternate == pytest.approx(664 / 360, rel=0.15)
    assert longest / alternate == pytest.approx(664 / 364, rel=0.15)


def test_non_persistent_programs_fill_free_sms() -> None:
    def of(problem: Problem, **changes: Any) -> float:
        values: dict[str, Any] = {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 2} | changes
        return imbalance(problem, QOuterConfig(**values), 2048, H200.sm_count, H200)

    assert of(FULL) == pytest.approx(16 * 132 / 2048)
    assert 1.0 < of(CAUSAL, lpt=True, heads_innermost=True) < of(CAUSAL, heads_innermost=True) < 1.2


@pytest.mark.parametrize(
    ("programs", "expected"),
    [(0, 1.0), (1, 132.0), (132, 1.0), (133, 2 * 132 / 133), (264, 1.0), (265, 2 * 264 / 265)],
)
def test_partial_last_wave_counts_as_full(programs: int, expected: float) -> None:
    assert whole_waves(programs, 264, H200) == pytest.approx(expected)


@pytest.mark.parametrize("shape", ["heads=1,seqlen=64,head_dim=64", "heads=200,seqlen=64,head_dim=64,causal"])
def test_few_programs_leave_sms_idle(shape: str) -> None:
    problem = a_problem(shape)
    programs = problem.heads
    alone = whole_waves(programs, 528, H200)
    config = QOuterConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)
    assert imbalance(problem, config, programs, 528, H200) == pytest.approx(alone)
    assert imbalance(problem, usual_config(problem), programs, 132, H200) == pytest.approx(
        -(-programs // 132) * 132 / programs
    )


def test_imbalance_of_many_tiles_is_computed_quickly() -> None:
    problem = a_problem("heads=4096,seqlen=1048576,head_dim=64,causal")
    assert imbalance(problem, usual_config(problem), 2**26, 132, H200) == pytest.approx(1.0, abs=1e-3)
