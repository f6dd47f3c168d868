"""Tests of the terms of the time model."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from flashtune.core.config import Config
from flashtune.core.errors import UsageError
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.core.record import Resources
from flashtune.core.target import find_target
from flashtune.templates.common.precision import InputPrecision
from flashtune.templates.family import Family
from flashtune.templates.forward_kv_outer.space import KVOuterConfig
from flashtune.templates.forward_q_outer.space import QOuterConfig
from flashtune.templates.registry import find_family
from flashtune.tuner.perf_model.roofline import (
    BANDWIDTH_SHARE,
    LAUNCH_MS,
    computed_pairs,
    matrix_rate,
    memory_seconds,
    predict_ms,
    spill_factor,
)

H200 = find_target("h200")
Q_OUTER, KV_OUTER = find_family("forward_q_outer"), find_family("forward_kv_outer")
LEAN = Resources(sram_bytes=64 * 1024, registers=128)
# Long tiles of all heads first, so that none is left at the end.
CALM: dict[str, Any] = {"lpt": True, "heads_innermost": True}


class SplitConfig(Config, frozen=True, kw_only=True):
    """A config of a family whose tiles contain all query heads of a KV head."""

    block_m: int
    block_n: int
    num_splits: int


def a_problem(**changes: Any) -> Problem:
    problem = Problem(
        dtype=Dtype.BF16,
        head_dim=128,
        value_head_dim=128,
        heads=32,
        kv_heads=8,
        batch=1,
        seqlen_q=4096,
        seqlen_kv=4096,
    )
    return msgspec.structs.replace(problem, **changes)


def a_config(**changes: Any) -> QOuterConfig:
    return QOuterConfig(**{"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 2, **changes})


def predicted(problem: Problem, resources: Resources = LEAN, **changes: Any) -> float:
    return predict_ms(problem, Q_OUTER, a_config(**changes), resources, H200)


def test_prediction_of_a_long_problem_is_near_its_measurement() -> None:
    # 16k tokens of 16 heads at S=8192: an H200 was seen at 1.94 ms.
    ms = predicted(a_problem(heads=16, kv_heads=16, batch=2, seqlen_q=8192, seqlen_kv=8192))
    assert 1.3 < ms < 2.8


def test_half_of_the_pairs_take_about_half_of_the_time() -> None:
    full, causal = predicted(a_problem()), predicted(a_problem(causal=Causal.BOTTOM_RIGHT), **CALM)
    assert 0.45 < causal / full < 0.65


def test_config_that_does_not_fit_has_infinite_time() -> None:
    assert predicted(a_problem(), Resources(sram_bytes=H200.sram_per_sm + 1)) == math.inf


def test_empty_problem_takes_the_launch_time() -> None:
    empty = a_problem(seqlen_kv=0)
    assert LAUNCH_MS <= predicted(empty) < LAUNCH_MS + 0.1


def test_huge_problem_is_predicted_quickly() -> None:
    assert predicted(a_problem(seqlen_q=2**30, seqlen_kv=2**30, causal=Causal.BOTTOM_RIGHT)) > 1e6


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(1, 1), (100, 100), (129, 65), (4096, 4096)])
@pytest.mark.parametrize("causal", list(Causal))
def test_tiles_cover_all_visible_pairs(seqlen_q: int, seqlen_kv: int, causal: Causal) -> None:
    problem = a_problem(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, causal=causal, heads=1, kv_heads=1)
    pairs = computed_pairs(problem, a_config())
    whole = math.ceil(seqlen_q / 128) * 128 * math.ceil(seqlen_kv / 64) * 64
    assert problem.visible_pairs() <= pairs <= whole


def test_spills_and_serialisation_increase_the_time() -> None:
    clean = spill_factor(LEAN)
    spilled = spill_factor(Resources(sram_bytes=0, spill_bytes=1024))
    serial = spill_factor(Resources(sram_bytes=0, spill_bytes=1024, serialized_wgmma=True))
    assert clean == 1
    assert clean < spilled < serial


def test_float32_has_lower_peak_rates() -> None:
    wide = a_problem(dtype=Dtype.FP32)
    plain = matrix_rate(wide, a_config(), H200)
    thirds = matrix_rate(wide, a_config(input_precision=InputPrecision.TF32X3), H200)
    assert plain < thirds < matrix_rate(a_problem(), a_config(), H200)


def test_data_within_the_cache_is_transferred_once() -> None:
    problem = a_problem()
    seconds = memory_seconds(problem, Q_OUTER, Q_OUTER.default(problem, H200), H200)
    # A head's keys and values fit an H200's L2, so every query tile but the first finds them there.
    least = problem.minimal_bytes() / (H200.hbm_bandwidth * 1e9 * BANDWIDTH_SHARE)
    assert seconds == pytest.approx(least)


def test_kv_outer_is_slow_for_few_heads() -> None:
    problem = a_problem()
    config = KVOuterConfig(block_m=128, block_n=64, num_warps=8, num_stages=1)
    assert predict_ms(problem, KV_OUTER, config, LEAN, H200) > 2 * predicted(problem)


def test_a_config_without_tiles_is_refused() -> None:
    with pytest.raises(UsageError, match="name no block_m"):
        predict_ms(a_problem(), Q_OUTER, Config(num_warps=4, num_stages=2), LEAN, H200)


def test_overlap_of_the_family_reduces_the_time(native: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = a_problem()
    config = native.default(problem, H200)

    def predicted(share: float | None) -> float:
        monkeypatch.setattr(type(native), "overlap", lambda self, config: share)
        return predict_ms(problem, native, config, LEAN, H200)

    assert predicted(0.0) > predicted(0.5) > predicted(1.0)
    assert predicted(0.0) > predicted(None) > predicted(1.0)


@pytest.mark.parametrize(
    ("kv_heads", "seqlen_q", "tiles"), [(8, 1, 8), (1, 1, 2), (1, 4, 8), (32, 1, 32), (32, 20, 64)]
)
def test_packed_tiles_read_keys_once_per_group(kv_heads: int, seqlen_q: int, tiles: int) -> None:
    config = SplitConfig(num_warps=4, num_stages=2, block_m=16, block_n=64, num_splits=8)
    problem = a_problem(kv_heads=kv_heads, seqlen_q=seqlen_q)
    assert computed_pairs(problem, config) == tiles * 16 * 4096
