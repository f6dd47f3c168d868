"""Tests that the descriptions of features match the fields of problems and the extra inputs."""

from typing import Any

import pytest
import torch

from flashtune.core.features.description import ScoreRows
from flashtune.core.features.records import FIELDS, NUMBERS, TENSORS, TYPES, ExtraInputs, FeatureFields
from flashtune.core.features.table import (
    FEATURES,
    NUMBER_INPUTS,
    TENSOR_INPUTS,
    changed_scores,
    flags_of,
    score_derivative,
    usual_inputs,
)
from flashtune.core.problem import Feature
from flashtune.tuner.workloads.shapes import parse_shape


def test_every_feature_has_one_description() -> None:
    assert set(FEATURES) == set(Feature)


def test_every_field_belongs_to_one_feature() -> None:
    named = [
        field for description in FEATURES.values() for field in (*description.fields, *description.details)
    ]
    assert sorted(named) == sorted(FIELDS)


def test_every_extra_input_has_a_description() -> None:
    # Numbers are last, because kernels take them after the scale.
    assert set(TENSORS) == set(TENSOR_INPUTS)
    assert set(NUMBERS) == set(NUMBER_INPUTS)


def test_inputs_set_the_flags_of_their_features() -> None:
    for description in FEATURES.values():
        for extra_input in description.numbers or description.tensors:
            flags = flags_of(ExtraInputs()._replace(**dict[str, Any]({extra_input.name: 1.0})))
            assert [name for name, there in flags.items() if there] == [
                field for field in description.fields if bool in TYPES[field]
            ]


SCORED = [feature for feature, description in FEATURES.items() if description.change]


@pytest.mark.parametrize("feature", SCORED)
def test_derivatives_are_those_of_autograd(feature: Feature) -> None:
    (problem,) = parse_shape(f"heads=2,seqlen=6,head_dim=8,batch=2,dtype=fp32,{FEATURES[feature].example}")
    device = torch.device("cpu")
    made = usual_inputs(problem, [feature], (6, 6), torch.float32, device)
    positions = torch.arange(6, dtype=torch.float64)[:, None]
    distances = (positions - torch.arange(6)).abs()
    rows = ScoreRows[FeatureFields, ExtraInputs](
        problem,
        ExtraInputs(**made),
        lambda tensor: tensor[:, :, None, None],
        lambda bias: bias,
        lambda: positions,
        lambda: distances,
    )
    scores = torch.randn(2, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    changed, added = changed_scores(scores, rows, sizes=True)
    (expected,) = torch.autograd.grad(changed.sum(), scores)
    derivative = score_derivative(scores.detach(), rows)
    torch.testing.assert_close(torch.ones_like(scores) if derivative is None else derivative, expected)
    if added is not None:
        torch.testing.assert_close(added.double(), (changed - scores).detach().abs())


def test_words_of_keys_differ() -> None:
    words = [description.word.split("{")[0] for description in FEATURES.values()]
    assert len(set(words)) == len(words)
