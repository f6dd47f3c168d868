"""Tests of the comparison of accepted mutants with correct kernels."""

from typing import Any

import pytest
import torch

from flashtune.core.target import find_target
from flashtune.templates.family import unsupported_reason
from flashtune.templates.registry import find_family
from tests.mutants import alike
from tests.mutants.backward_hopper.backward_hopper import FULL, ORDERED
from tests.mutants.catalogue import gpu_mutants
from tests.mutants.core import Subject, rendered

H200 = find_target("h200")
SUBJECTS = {mutant.subject.family: mutant.subject for mutant in gpu_mutants()}


def cases_of(subject: Subject, seed: int = 7) -> list[Any]:
    return list(alike.cases_of(rendered(subject), H200, subject.problem, subject.config, seed))


@pytest.mark.parametrize("family", SUBJECTS)
def test_problems_are_check_problems_and_supported_random_ones(family: str) -> None:
    subject = SUBJECTS[family]
    cases = cases_of(subject)
    assert len(cases) > 50
    assert all(case.problem.computation == subject.problem.computation for case in cases)
    for case in cases:
        assert unsupported_reason(find_family(family), case.problem, H200, subject.specialization) is None
    # Another seed draws other random problems; those of the check stay.
    assert 0 < sum(case not in cases for case in cases_of(subject, 8)) <= alike.RANDOM_PROBLEMS


def test_results_are_compared_bitwise_unless_sums_are_unordered(monkeypatch: pytest.MonkeyPatch) -> None:
    right = {name: torch.tensor([[1.0, 0.5, 0.001]]).bfloat16() for name in ("dq", "dk", "dv")}

    def found(name: str, change: float, subject: Subject) -> str:
        broken = right | {name: right[name] + torch.tensor([[0.0, change, 0.0]]).bfloat16()}
        written = iter((right, broken))

        def prepared(*_: object) -> alike.Write:
            return lambda kernel, launches: iter([next(written)] * launches)

        monkeypatch.setattr(alike, "_gradients", prepared)
        case = cases_of(subject)[0]
        kernel = rendered(subject)
        return alike.unlike(kernel, kernel, H200, case, 1, 2)

    # Of bfloat16, between a half and one.
    step = 2.0**-8
    assert found("dq", step, FULL) == ""
    assert found("dq", 4 * step, FULL) == "dq"
    assert found("dq", float("nan"), FULL) == "dq"
    assert found("dk", step, FULL) == "dk"
    assert found("dq", step, ORDERED) == "dq"
    assert found("dv", 0.0, ORDERED) == ""


def test_unwritten_elements_are_equal() -> None:
    unwritten = torch.tensor([float("nan"), 1.0])
    assert alike._near(unwritten, [unwritten, unwritten])
    assert not alike._near(unwritten.nan_to_num(), [unwritten, unwritten])
