"""Tests of the cases of the first-use benchmark."""

from collections.abc import Iterator

import pytest

from benchmarks.host.first_use import CASES
from flashtune.core.kernel import Alignment
from flashtune.core.problem import Direction
from flashtune.core.target import find_target
from flashtune.templates.registry import family_names
from flashtune.tuner.candidates import contiguous_specialization
from tests.support.runtime import forget_all


@pytest.fixture(autouse=True)
def _shipped_alone() -> Iterator[None]:
    forget_all()
    yield
    forget_all()


def test_cases_have_the_specialization_of_their_tensors() -> None:
    odd = [case for case in CASES if case.alignment is Alignment.ANY]
    assert odd
    for case in CASES:
        assert case in odd or case.assumed == contiguous_specialization(case.problem, lse=True)


def test_cases_cover_both_passes_and_most_families() -> None:
    target = find_target("nvidia-h200")
    chosen = {case.record(target).family for case in CASES}
    # No table and no default of this GPU selects this family.
    assert set(family_names()) - chosen == {"forward_kv_outer"}
    assert {case.problem.direction for case in CASES} == set(Direction)
    assert len({case.problem.features for case in CASES}) > 8
