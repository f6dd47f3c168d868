"""Tests of drawing random problems for the GPU."""

import random

import pytest
import torch

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Feature
from flashtune.core.target import find_target
from flashtune.templates.family import unsupported_reason
from flashtune.templates.registry import find_family
from flashtune.verification.inputs.prepared import prepare
from tests.gpu.random.random_cases import random_case
from tests.gpu.random.random_problems import STORED_PAGES, feature_sets, subjects, trials
from tests.problems.plain_masks import plain_attention

H200 = find_target("h200")
SUBJECTS = list(subjects(1, H200))


def test_all_supported_features_and_pairs_are_drawn() -> None:
    drawn = {subject.problem.features for subject in SUBJECTS}
    absent = {asked for asked in feature_sets() if asked not in drawn}
    # Pages bring their lengths along, no family lays a bias or a block mask over packed sequences, and none
    # drops weights of latent keys.
    pairs = {("kv_lengths", "pages"), ("bias", "packed"), ("mla", "dropout")}
    pairs |= {("block_mask", other) for other in ("packed", "pages", "mla")}
    assert absent == {asked for asked in feature_sets() if any(asked.issuperset(pair) for pair in pairs)}
    assert {subject.family for subject in SUBJECTS} >= {"forward_masked", "decode_split_kv", "forward_hopper"}


def test_hopper_kernels_of_8_bit_pages_are_drawn_with_other_features() -> None:
    drawn = {subject.problem.features for subject in SUBJECTS if subject.family == "forward_hopper"}
    others = {"window", "sink_tokens", "chunk", "prefix", "softcap", "alibi", "sinks"}
    expected = {STORED_PAGES, STORED_PAGES | {Feature.PACKED}}
    expected |= {STORED_PAGES | {Feature(other)} for other in others}
    expected |= {STORED_PAGES | {Feature(other), Feature.PACKED} for other in others}
    assert expected == {features for features in drawn if features >= STORED_PAGES}


def test_kernels_are_reused_and_problems_are_supported() -> None:
    drawn = list(trials(3 * len(SUBJECTS), 1, H200))
    assert len({trial.subject for trial in drawn}) == len(SUBJECTS)
    assert drawn[:20] == list(trials(20, 1, H200))
    for subject, case in drawn:
        family = find_family(subject.family)
        assert unsupported_reason(family, case.problem, H200, subject.specialization) is None
        # The same source serves: nothing differs but extents.
        assert case.problem.computation == subject.problem.computation


@pytest.mark.parametrize("seed", range(12))
def test_random_cases_are_prepared_correctly(seed: int) -> None:
    chance = random.Random(seed)
    subject = chance.choice([subject for subject in SUBJECTS if subject.problem.head_dim < 256])
    case = random_case(chance, subject.problem, subject.config)
    while case.problem.batch * case.problem.heads * case.problem.seqlen_q * case.problem.seqlen_kv > 2**19:
        case = random_case(chance, subject.problem, subject.config)
    ready = prepare(case, Specialization().alignment, torch.device("cpu"), seed)
    q, k, v, expected = (tensor.view for tensor in ready.memory[:4])
    out, _ = plain_attention(case.problem, q, k, v, ready.side, case.scale)
    assert out.shape == expected.shape
    assert out.isfinite().all()
