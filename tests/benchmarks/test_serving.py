"""Tests of the shapes of the serving benchmark."""

from __future__ import annotations

import pytest

from benchmarks.dispatch_regret.analysis import dispatched
from benchmarks.kernels.serving import GROUPS
from flashtune.core.target import find_target
from flashtune.db.table import shipped_table
from flashtune.templates.family import unsupported_reason
from flashtune.templates.registry import find_family
from flashtune.tuner.candidates import contiguous_specialization
from flashtune.tuner.workloads.shapes import parse_shape

TARGET = "nvidia-h200"


@pytest.mark.parametrize("shape", [shape for group in GROUPS for shape in group])
def test_dispatch_has_a_kernel_for_each_shape(shape: str) -> None:
    (problem,), target, shipped = parse_shape(shape), find_target(TARGET), shipped_table(TARGET)
    assert shipped is not None
    chosen = dispatched(target, problem, shipped.records)
    assert (
        unsupported_reason(find_family(chosen.family), problem, target, contiguous_specialization(problem))
        is None
    )


def test_shapes_of_a_group_differ() -> None:
    assert all(len({parse_shape(shape)[0] for shape in group}) == len(group) for group in GROUPS)
