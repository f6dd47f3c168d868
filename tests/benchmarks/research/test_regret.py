"""Tests of regret at held-out shapes, with constructed timings."""

import math
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.dispatch_regret import timing
from benchmarks.dispatch_regret.analysis import (
    SHARES,
    Point,
    RegretReport,
    Timed,
    draw_problems,
    figures,
    finalists,
    regret,
    thinned,
)
from flashtune.core.problem import Problem
from flashtune.core.record import Record
from flashtune.core.target import find_target
from flashtune.dispatch.versions import current_versions
from flashtune.tuner.candidates import Candidate
from tests.support.records import shipped_table_of

TARGET = find_target("h200")


@pytest.fixture(scope="module")
def records() -> tuple[Record, ...]:
    table = shipped_table_of(TARGET.name)
    return table.records


@pytest.fixture(scope="module")
def problems(records: tuple[Record, ...]) -> tuple[Problem, ...]:
    return draw_problems(60, 3, (record.problem for record in records))


def test_drawn_problems_are_reproducible_and_untuned(problems: tuple[Problem, ...]) -> None:
    assert len({problem.key for problem in problems}) == 60
    assert draw_problems(30, 1, ()) == draw_problems(30, 1, ())
    first = draw_problems(1, 1, ())[0]
    assert first not in draw_problems(30, 1, (first,))


def test_thinned_tables_are_nested_and_keep_every_kind(records: tuple[Record, ...]) -> None:
    whole, half, quarter = (thinned(records, share) for share in SHARES)
    assert set(map(id, whole)) == set(map(id, records))
    assert {record.problem.key for record in quarter} < {record.problem.key for record in half}
    kinds = {record.problem.computation for record in records}
    anchors = len({record.problem.key for record in records})
    for share, table in zip(SHARES, (whole, half, quarter), strict=True):
        assert {record.problem.computation for record in table} == kinds
        # Of each kind its share is rounded up.
        kept = len({record.problem.key for record in table})
        assert share * anchors <= kept < share * anchors + len(kinds)
    assert set(map(id, thinned(reversed(records), 0.5))) == set(map(id, half))


def timed(candidate: Candidate, ms: float) -> Timed:
    return Timed(candidate.family, candidate.config.label(), ms, ms, ms, 15)


def test_regret_is_relative_to_the_fastest(
    problems: tuple[Problem, ...], records: tuple[Record, ...]
) -> None:
    first, second, third = finalists(problems[0], TARGET, records)[:3]
    point = Point(problems[0], (timed(first, 1.1), timed(second, 1.0)))
    assert regret(point, first) == pytest.approx(0.1)
    assert regret(point, second) == 0.0
    assert regret(point, third) is None
    same = Point(problems[1], point.timed)
    summary = figures(
        (point, same), records, 1.0, lambda problem, kept: first if problem == problems[0] else third
    )
    assert (summary.points, summary.unknown) == (1, 1)
    assert (summary.median, summary.p95, summary.worst) == pytest.approx((0.1, 0.1, 0.1))
    assert math.isnan(figures((), records, 0.5, lambda problem, kept: first).median)


def test_times_from_before_an_axis_was_added_count(
    problems: tuple[Problem, ...], records: tuple[Record, ...]
) -> None:
    entrants = finalists(problems[0], TARGET, records)
    candidate = next(entrant for entrant in entrants if entrant.family == "forward_hopper")
    label = candidate.config.label()
    assert " p_stages=0" in label
    before = Timed(candidate.family, label.replace(" p_stages=0", ""), 1.0, 1.0, 1.0, 15)
    assert regret(Point(problems[0], (before,)), candidate) == 0.0
    since = Candidate(candidate.family, msgspec.structs.replace(candidate.config, p_stages=1))
    assert regret(Point(problems[0], (before,)), since) is None
    gone = msgspec.structs.replace(before, config=f"{label} left_out=1")
    assert regret(Point(problems[0], (gone,)), candidate) is None


@pytest.mark.gpu
def test_point_is_measured(records: tuple[Record, ...], tmp_path: Path) -> None:
    (posed,) = draw_problems(1, 3, (record.problem for record in records))
    problem = msgspec.structs.replace(
        posed, head_dim=64, value_head_dim=64, batch=3, seqlen_q=700, seqlen_kv=700
    )
    torch.cuda.synchronize()
    report = RegretReport(TARGET.name, 3, current_versions("forward_hopper"), ())
    path = tmp_path / "regret.json.gz"
    report = timing.measure_regret(report, [problem], records, 0, math.inf, path, lambda _: None)
    assert 0 < report.points[0].best.ms < 10
    assert len(report.points[0].timed) >= 2
