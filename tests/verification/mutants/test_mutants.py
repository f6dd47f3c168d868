"""Tests that the catalogue of mutants matches the templates, and each mutant differs."""

import pytest

from tests.mutants.catalogue import gpu_mutants, interpreted_mutants
from tests.mutants.core import Part, Patch, PatchError, broken, patched, rendered

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
