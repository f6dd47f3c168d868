from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.exhaustive.fitting import NOTHING, fit_tables
from benchmarks.exhaustive.truth_table import TruthTable, read_tables
from flashtune.core.record import Resources
from flashtune.core.target import find_target
from flashtune.templates.registry import find_family
from flashtune.tuner.binary.resources import occupancy
from flashtune.tuner.perf_model.prediction import (
    Calibration,
    estimated,
    expected_ms,
    scheduled_ms,
    shipped_fit,
)
from tests.benchmarks.research.truth_fakes import SHAPE, a_table

TABLES = read_tables(Path(__file__).parents[2] / "data" / "truth")
H200 = find_target("h200")


def predicted(table: TruthTable, fit: Calibration) -> list[float]:
    family = find_family(table.family)
    return [
        expected_ms(table.problem, family, table.candidate(row).config, row.resources, H200, fit)
        for row, ms in zip(table.rows, table.times(), strict=True)
        if ms is not None and row.resources is not None
    ]


def agreement(table: TruthTable, fit: Calibration) -> float:
    """Rank correlation of predicted and true times."""
    true = [ms for ms in table.times() if ms is not None]
    ranks = [np.argsort(np.argsort(times)) for times in (predicted(table, fit), true)]
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
    assert predicted(table, fit) != predicted(table, NOTHING)
    elsewhere = msgspec.structs.replace(fit, arch="sm_80")
    assert predicted(table, elsewhere) == predicted(table, NOTHING)


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
