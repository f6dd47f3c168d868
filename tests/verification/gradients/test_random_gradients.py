"""Tests of drawing random backward problems."""

import pytest

from flashtune.core.problem import Direction
from flashtune.core.target import find_target
from flashtune.templates.family import unsupported_reason
from flashtune.templates.registry import find_family
from tests.gpu.random.random_gradients import feature_sets, subjects, trials
from tests.verification.gradients.checking import failures, found_at

H200 = find_target("h200")
SUBJECTS = list(subjects(1, H200))
SMALL = 2**18


def test_all_supported_features_and_pairs_are_drawn() -> None:
    drawn = {subject.problem.features for subject in SUBJECTS}
    absent = {asked for asked in feature_sets() if asked not in drawn}
    # No family lays a bias over packed sequences.
    refused = (("bias", "packed"), ("block_mask", "packed"), ("block_mask", "alibi"))
    assert absent <= set(map(frozenset, refused))
    assert "backward_split" in {subject.family for subject in SUBJECTS}


def test_drawn_problems_are_supported() -> None:
    drawn = list(trials(2 * len(SUBJECTS), 1, H200))
    assert drawn[:20] == list(trials(20, 1, H200))
    assert len({trial.subject for trial in trials(60, 1, H200, 12)}) == 12
    for subject, case in drawn:
        assert case.problem.direction is Direction.BACKWARD
        assert (
            unsupported_reason(find_family(subject.family), case.problem, H200, subject.specialization)
            is None
        )
        # The same source serves: nothing differs but extents.
        assert case.problem.computation == subject.problem.computation


@pytest.mark.slow
def test_correct_gradients_pass_on_random_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [
        case
        for _, case in trials(300, 2, H200)
        if case.problem.batch * case.problem.heads * case.problem.seqlen_q * case.problem.seqlen_kv < SMALL
    ]
    assert len(small) > 30
    for case in small[:60]:
        assert failures(found_at(monkeypatch, case)) == []
