"""Tests of regret at held-out shapes, with constructed timings."""

import math
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.dispatch_regret import timing
from benchmarks.dispatch_regret.analysis import (
    RegretReport,
    draw_problems,
)
from flashtune.core.problem import Problem
from flashtune.core.record import Record
from flashtune.core.target import find_target
from flashtune.dispatch.versions import current_versions
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
