import math

import pytest

from flashtune.core.record import Measurement, Outcome, Provenance, Record, Resources, Verdict, standard_error
from flashtune.tuner.execution.timing import sample_count, summarize
from flashtune.tuner.search.selection import finalists, select
from tests.support.records import DIGEST, make_record
from tests.tuner.search.fakes import FAMILY, PASSED, a_config, a_problem

REFUSED = Verdict(passed=False, worst_ratio=9.0, checks=3, failed="needle", device="fake")


def a_record(
    ms: float,
    *,
    spread: float = 0.0,
    sram: int = 1000,
    registers: int = 100,
    warps: int = 4,
    verdict: Verdict | None = PASSED,
    outcome: Outcome = Outcome.OK,
    provenance: Provenance = Provenance.MEASURED,
) -> Record:
    samples = 21 if provenance is Provenance.MEASURED else 0
    return make_record(
        a_problem(),
        family=FAMILY,
        config=a_config(num_warps=warps),
        target="nvidia-h100",
        kernel=DIGEST,
        outcome=outcome,
        provenance=provenance,
        resources=Resources(sram, registers=registers),
        verdict=verdict,
        measurement=Measurement(ms, ms - spread / 2, ms + spread / 2, samples),
    )


def test_fastest_wins_beyond_noise() -> None:
    fast, slow = a_record(1.0, spread=0.01, sram=9000), a_record(1.1, spread=0.01)
    assert select([slow, fast]) is fast


def test_least_sram_wins_within_noise() -> None:
    fast, frugal = a_record(1.0, spread=0.02, sram=9000), a_record(1.003, spread=0.02, sram=8000)
    assert select([fast, frugal]) is frugal


def test_further_ties_are_broken_by_registers_then_config_order() -> None:
    many, few = a_record(1.0, spread=0.02, registers=200), a_record(1.001, spread=0.02, registers=168)
    assert select([many, few]) is few
    eight, four = a_record(1.0, spread=0.02, warps=8), a_record(1.001, spread=0.02, warps=4)
    assert select([eight, four]) is four


def test_selection_of_a_tie_does_not_depend_on_noise() -> None:
    tied = [a_record(1.000, spread=0.02, warps=4), a_record(1.002, spread=0.02, warps=8)]
    other = [a_record(1.002, spread=0.02, warps=4), a_record(1.000, spread=0.02, warps=8)]
    first, second = select(tied), select(other)
    assert first is not None
    assert second is not None
    assert first.config == second.config


@pytest.mark.parametrize(
    "record",
    [
        a_record(0.1, verdict=None),
        a_record(0.1, verdict=REFUSED),
        a_record(0.1, outcome=Outcome.WRONG_RESULT),
    ],
)
def test_unverified_record_is_not_selected(record: Record) -> None:
    proven = a_record(1.0)
    assert select([record, proven]) is proven
    assert select([record]) is None


def test_predictions_tie_only_when_equal() -> None:
    record = a_record(1.0, provenance=Provenance.PREDICTED, verdict=None, sram=9000)
    other = a_record(1.0001, provenance=Provenance.PREDICTED, verdict=None, sram=10)
    assert select([record, other]) is record


def test_finalists_are_within_a_factor_of_the_best() -> None:
    records = [a_record(ms) for ms in (1.3, 1.0, 1.1, 1.05)]
    assert [record.ms for record in finalists(records, 3, 1.15)] == [1.0, 1.05, 1.1]
    assert [record.ms for record in finalists(records, 9, 1.15)] == [1.0, 1.05, 1.1]
    assert finalists([], 3, 1.15) == ()


def test_standard_error_decreases_with_samples() -> None:
    few, many = Measurement(1.0, 0.9, 1.1, 4), Measurement(1.0, 0.9, 1.1, 16)
    assert standard_error(few) == pytest.approx(2 * standard_error(many))


def test_median_and_percentiles_are_samples() -> None:
    samples = [5.0, 1.0, 4.0, 2.0, 3.0, 100.0]
    measurement = summarize(samples, throttled=True)
    assert measurement.ms == 3.5
    assert measurement.p20 == 2.0
    assert measurement.p80 == 5.0
    assert measurement.samples == 6
    assert measurement.throttled


def test_slow_launches_have_fewer_samples_but_a_minimum() -> None:
    assert [sample_count(ms) for ms in (0.0, 0.01, 5.0, math.inf)] == [25, 25, 12, 9]
