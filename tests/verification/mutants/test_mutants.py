"""Tests that the catalogue of mutants matches the templates, and each mutant differs."""

from typing import Any

import pytest
import torch

from flashtune.core.target import find_target
from flashtune.templates.family import unsupported_reason
from flashtune.templates.registry import find_family
from tests.mutants import alike
from tests.mutants.backward_hopper.backward_hopper import FULL, ORDERED
from tests.mutants.catalogue import gpu_mutants, interpreted_mutants
from tests.mutants.core import Part, Patch, PatchError, Subject, broken, patched, rendered

# Families of which there are mutants; `test_serving.py` has the mistakes of serving features.
BROKEN_FAMILIES = (
    "forward_q_outer",
    "forward_kv_outer",
    "forward_hopper",
    "forward_masked",
    "decode_split_kv",
    "backward_split",
    "backward_fused",
    "backward_hopper",
    "decode_latent_hopper",
)
MUTANTS = gpu_mutants()


@pytest.mark.xdist_group("mutants")
@pytest.mark.slow
def test_mutants_are_other_programs_with_unique_ids() -> None:
    names = [mutant.id for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    families = [mutant.subject.family for mutant in MUTANTS]
    assert {family: families.count(family) >= 30 for family in BROKEN_FAMILIES} == dict.fromkeys(
        BROKEN_FAMILIES, True
    )
    digests = {mutant: broken(mutant).digest for mutant in {*MUTANTS, *interpreted_mutants()}}
    assert len({digests[mutant] for mutant in MUTANTS}) == len(MUTANTS)
    assert [mutant.id for mutant in digests if digests[mutant] == rendered(mutant.subject).digest] == []


def test_patches_match_the_given_number_of_times() -> None:
    source = "a = 1\nif a:\n    b = 2\n    c = 3\nb = 2\n"
    assert (
        patched(source, Patch("b = 2\nc = 3", "d = 4\ne = 5"), "x")
        == "a = 1\nif a:\n    d = 4\n    e = 5\nb = 2\n"
    )
    assert patched(source, Patch("b = 2", "pass", times=2), "x").count("pass") == 2
    assert patched(source, Patch("b = 2", "pass", Part("if a", "c =")), "x").endswith("c = 3\nb = 2\n")
    for patch in (
        Patch("b = 2", ""),
        Patch("z", ""),
        Patch("b = 2", "", Part("b =", "c =")),
        Patch("a", "", Part("y", "z")),
    ):
        with pytest.raises(PatchError, match="x:"):
            patched(source, patch, "x")


H200 = find_target("h200")
SUBJECTS = {mutant.subject.family: mutant.subject for mutant in gpu_mutants()}


def cases_of(subject: Subject, seed: int = 7) -> list[Any]:
    return list(alike.cases_of(rendered(subject), H200, subject.problem, subject.config, seed))


@pytest.mark.parametrize("family", SUBJECTS)
def test_problems_are_check_problems_and_supported_random_ones(family: str) -> None:
    subject = SUBJECTS[family]
    found = cases_of(subject)
    assert len(found) > 50
    assert all(case.problem.computation == subject.problem.computation for case in found)
    for case in found:
        assert unsupported_reason(find_family(family), case.problem, H200, subject.specialization) is None
    # Another seed draws other random problems; those of the check stay.
    assert 0 < sum(one not in found for one in cases_of(subject, 8)) <= alike.RANDOM_PROBLEMS


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
