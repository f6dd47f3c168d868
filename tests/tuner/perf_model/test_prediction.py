"""Tests of predicted times before calibration, and of the fit of a calibration."""

import functools
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.exhaustive.fitting import NOTHING, fit_tables
from benchmarks.exhaustive.truth_table import TruthTable, read_tables
from flashtune import testing
from flashtune.core.config import Config
from flashtune.core.problem import Causal, Direction, Dtype, Problem
from flashtune.core.record import Resources
from flashtune.core.target import find_target
from flashtune.templates.common.precision import InputPrecision
from flashtune.templates.forward_kv_outer.space import KVOuterConfig
from flashtune.templates.forward_q_outer.space import QOuterConfig
from flashtune.templates.registry import families, find_family
from flashtune.tuner.binary.resources import occupancy
from flashtune.tuner.perf_model.prediction import (
    Calibration,
    estimated,
    expected_ms,
    scheduled_ms,
    shipped_fit,
    spill_factor,
)
from tests.benchmarks.research.truth_fakes import SHAPE, a_table

H200 = find_target("h200")
Q_OUTER, KV_OUTER = find_family("forward_q_outer"), find_family("forward_kv_outer")
SPLIT = find_family("backward_split")
LEAN = Resources(sram_bytes=64 * 1024, registers=128)
a_problem = functools.partial(testing.problem, "heads=32,kv_heads=8,seqlen=4096,head_dim=128,dtype=bf16")


def a_config(**changes: Any) -> QOuterConfig:
    return QOuterConfig(**{"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 2, **changes})


def predicted(problem: Problem, resources: Resources = LEAN, **changes: Any) -> float:
    return scheduled_ms(problem, Q_OUTER, a_config(**changes), resources, H200)


def backward(**changes: Any) -> Problem:
    return a_problem(heads=16, kv_heads=4, batch=2, direction=Direction.BACKWARD, **changes)


def backward_config(**changes: Any) -> Config:
    return msgspec.structs.replace(SPLIT.default(backward(), H200), **changes)


def test_prediction_of_a_long_problem_is_near_its_measurement() -> None:
    # 16k tokens of 16 heads at S=8192: an H200 was seen at 1.94 ms.
    ms = predicted(a_problem(heads=16, kv_heads=16, batch=2, seqlen_q=8192, seqlen_kv=8192))
    assert 1.3 < ms < 2.8


def test_config_that_does_not_fit_has_infinite_time() -> None:
    assert predicted(a_problem(), Resources(sram_bytes=H200.sram_per_sm + 1)) == math.inf


def test_empty_problem_takes_the_launch_time() -> None:
    assert 0.003 <= predicted(a_problem(seqlen_kv=0)) < 0.1


def test_huge_problem_is_predicted_quickly() -> None:
    assert predicted(a_problem(seqlen_q=2**30, seqlen_kv=2**30, causal=Causal.BOTTOM_RIGHT)) > 1e6


def test_spills_and_serialisation_increase_the_time() -> None:
    clean = spill_factor(LEAN)
    spilled = spill_factor(Resources(sram_bytes=0, spill_bytes=1024))
    serial = spill_factor(Resources(sram_bytes=0, spill_bytes=1024, serialized_wgmma=True))
    assert clean == 1
    assert clean < spilled < serial


def test_float32_products_are_faster_in_tf32x3() -> None:
    wide = a_problem(dtype=Dtype.FP32)
    thirds = predicted(wide, input_precision=InputPrecision.TF32X3)
    assert predicted(a_problem()) < thirds < predicted(wide)


def test_kv_outer_is_slow_for_few_heads() -> None:
    problem = a_problem()
    config = KVOuterConfig(block_m=128, block_n=64, num_warps=8, num_stages=1)
    assert scheduled_ms(problem, KV_OUTER, config, LEAN, H200) > 2 * predicted(problem)


@pytest.mark.parametrize("causal", Causal)
def test_defaults_of_all_families_are_predicted_above_the_matrix_units(causal: Causal) -> None:
    predicted_families = 0
    for family in families():
        problem = a_problem(direction=family.direction, causal=causal)
        if family.supports(problem, H200) is None:
            config = family.default(problem, H200)
            ms = scheduled_ms(problem, family, config, LEAN, H200)
            assert 1e3 * problem.flops() / (H200.peak.half * 1e12) < ms < 1e3
            predicted_families += 1
    assert predicted_families >= 5


def test_backward_times_grow_with_work_and_resources() -> None:
    problem, config = backward(), backward_config()
    plain = scheduled_ms(problem, SPLIT, config, LEAN, H200)
    causal = scheduled_ms(backward(causal=Causal.BOTTOM_RIGHT), SPLIT, config, LEAN, H200)
    assert 0.4 * plain < causal < 0.7 * plain
    longer = scheduled_ms(backward(seqlen_q=8192, seqlen_kv=8192), SPLIT, config, LEAN, H200)
    assert 3 * plain < longer < 4.2 * plain
    spilled = msgspec.structs.replace(LEAN, spill_bytes=256)
    assert scheduled_ms(problem, SPLIT, config, spilled, H200) > plain
    full = msgspec.structs.replace(LEAN, sram_bytes=H200.sram_per_sm + 1)
    assert math.isinf(scheduled_ms(problem, SPLIT, config, full, H200))


def test_estimated_registers_are_those_of_the_larger_kernel() -> None:
    problem = backward()
    small = estimated(problem, backward_config(block_n=64, dq_block_m=64), 1000, H200)
    held = estimated(problem, backward_config(block_n=128, dq_block_m=64), 1000, H200)
    walked = estimated(problem, backward_config(block_n=64, dq_block_m=128, dq_block_n=128), 1000, H200)
    assert small.registers < held.registers <= 255
    assert small.registers < walked.registers <= 255


TABLES = read_tables(Path(__file__).parents[2] / "data" / "truth")


def predicted_times(table: TruthTable, fit: Calibration) -> list[float]:
    family = find_family(table.family)
    return [
        expected_ms(table.problem, family, table.candidate(row).config, row.resources, H200, fit)
        for row, ms in zip(table.rows, table.times(), strict=True)
        if ms is not None and row.resources is not None
    ]


def agreement(table: TruthTable, fit: Calibration) -> float:
    """Rank correlation of predicted and true times."""
    true = [ms for ms in table.times() if ms is not None]
    ranks = [np.argsort(np.argsort(times)) for times in (predicted_times(table, fit), true)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def test_fitted_constants_transfer_to_other_problems() -> None:
    judged = a_table(SHAPE.replace("2048", "8192"))
    assert agreement(judged, fit_tables([a_table()])) > agreement(judged, NOTHING) + 0.2


def test_constants_apply_only_to_their_architecture_and_families() -> None:
    table = a_table()
    fit = fit_tables([table])
    portable = find_family("forward_q_outer")
    config = portable.default(table.problem, H200)
    lean = Resources(sram_bytes=65536, registers=128)
    plain = scheduled_ms(table.problem, portable, config, lean, H200)
    assert expected_ms(table.problem, portable, config, lean, H200, fit) == plain
    assert predicted_times(table, fit) != predicted_times(table, NOTHING)
    elsewhere = msgspec.structs.replace(fit, arch="sm_80")
    assert predicted_times(table, elsewhere) == predicted_times(table, NOTHING)


def test_shipped_constants_are_reproducible() -> None:
    shipped, made = shipped_fit(), fit_tables(TABLES)
    assert shipped.problems == made.problems
    assert shipped.families.keys() == made.families.keys()
    for name, family in made.families.items():
        assert shipped.families[name].level == pytest.approx(family.level, abs=1e-3)
        assert shipped.families[name].weights == pytest.approx(family.weights, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.family}-{table.problem.key}")
def test_held_out_problems_are_ranked(table: TruthTable) -> None:
    others = [other for other in TABLES if other.problem != table.problem]
    assert agreement(table, fit_tables(others)) > 0.6


def test_occupancy_is_estimated_before_compilation() -> None:
    same = []
    for table in (table for table in TABLES if table.family == "forward_q_outer"):
        family = find_family(table.family)
        for row in table.rows:
            config = table.candidate(row).config
            assert row.resources is not None
            guess = estimated(table.problem, config, row.resources.sram_bytes, H200)
            options = family.options(config)
            same.append(
                occupancy(guess, options, H200).blocks == occupancy(row.resources, options, H200).blocks
            )
    assert np.mean(same) > 0.8
