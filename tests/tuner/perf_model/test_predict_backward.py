"""Predicted times of backward kernels: their terms, and that orders are sane."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from flashtune.core.config import Config
from flashtune.core.problem import Causal, Direction, Dtype, Problem
from flashtune.core.record import Resources
from flashtune.core.target import find_target
from flashtune.templates.common.model.makespan_backward import turned
from flashtune.templates.registry import find_family
from flashtune.tuner.perf_model.calibration import estimated, formula_ms
from flashtune.tuner.perf_model.roofline_backward import passes, predict_backward_ms

H200 = find_target("h200")
SPLIT = find_family("backward_split")
LEAN = Resources(sram_bytes=64 * 1024, registers=128)


class Fused(Config, frozen=True, kw_only=True):
    """A config of one kernel that makes all gradients."""

    block_m: int
    block_n: int


def a_problem(**changes: Any) -> Problem:
    problem = Problem(
        dtype=Dtype.BF16,
        head_dim=128,
        value_head_dim=64,
        heads=16,
        kv_heads=4,
        batch=2,
        seqlen_q=4096,
        seqlen_kv=4096,
        direction=Direction.BACKWARD,
    )
    return msgspec.structs.replace(problem, **changes)


def a_config(**changes: Any) -> Config:
    return msgspec.structs.replace(SPLIT.default(a_problem(), H200), **changes)


def test_split_family_has_seven_products_and_fused_has_five() -> None:
    problem = a_problem()
    keys, queries = passes(problem, a_config())
    assert keys.columns == 2 * 128 + 2 * 64
    assert queries.columns == 2 * 128 + 64
    assert (keys.summed, queries.summed) == (128 + 64, 128)
    (alone,) = passes(problem, Fused(block_m=64, block_n=128, num_warps=8, num_stages=2))
    assert alone.columns == 3 * 128 + 2 * 64
    assert (alone.tile.block_m, alone.tile.block_n) == (128, 64)


@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("window", [(None, None), (100, None), (64, 32)])
@pytest.mark.parametrize("lengths", [(256, 256), (128, 320), (320, 128)])
def test_transposed_problem_has_the_same_pairs(
    causal: Causal, window: tuple[int | None, int | None], lengths: tuple[int, int]
) -> None:
    left, right = window
    problem = a_problem(
        causal=causal, window_left=left, window_right=right, seqlen_q=lengths[0], seqlen_kv=lengths[1]
    )
    other = turned(problem)
    assert other.visible_pairs() == problem.visible_pairs()
    assert (other.seqlen_q, other.seqlen_kv, other.heads) == (lengths[1], lengths[0], 4)


def test_times_grow_with_work_and_resources() -> None:
    problem, config = a_problem(), a_config()
    plain = predict_backward_ms(problem, SPLIT, config, LEAN, H200)
    assert plain == formula_ms(problem, SPLIT, config, LEAN, H200)
    causal = predict_backward_ms(a_problem(causal=Causal.BOTTOM_RIGHT), SPLIT, config, LEAN, H200)
    assert 0.4 * plain < causal < 0.7 * plain
    longer = predict_backward_ms(a_problem(seqlen_q=8192, seqlen_kv=8192), SPLIT, config, LEAN, H200)
    assert 3 * plain < longer < 4.2 * plain
    spilled = msgspec.structs.replace(LEAN, spill_bytes=256)
    assert predict_backward_ms(problem, SPLIT, config, spilled, H200) > plain
    full = msgspec.structs.replace(LEAN, sram_bytes=H200.sram_per_sm)
    assert math.isinf(predict_backward_ms(problem, SPLIT, config, full, H200))


def test_prediction_is_between_1_and_10_times_the_roofline() -> None:
    problem = a_problem(value_head_dim=128)
    least = 1e3 * problem.flops() / (H200.peak.half * 1e12)
    assert least < predict_backward_ms(problem, SPLIT, a_config(), LEAN, H200) < 10 * least


def test_estimated_registers_are_those_of_the_larger_kernel() -> None:
    problem = a_problem()
    small = estimated(problem, a_config(block_n=64, dq_block_m=64), 1000, H200)
    held = estimated(problem, a_config(block_n=128, dq_block_m=64), 1000, H200)
    walked = estimated(problem, a_config(block_n=64, dq_block_m=128, dq_block_n=128), 1000, H200)
    assert small.registers < held.registers <= 255
    assert small.registers < walked.registers <= 255
