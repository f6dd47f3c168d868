"""Tests that the table of docs/features.md matches the features of the families."""

from pathlib import Path

import pytest

from flashtune.core.features.table import FEATURES
from flashtune.core.problem import Feature
from flashtune.templates.registry import families
from flashtune.tuner.workloads.shapes import parse_shape
from scripts.reference import feature_table

PAGE = Path(__file__).parents[2] / "docs" / "features.md"


def test_the_table_of_features_is_current() -> None:
    assert feature_table() in PAGE.read_text(encoding="utf-8"), "python -m benchmarks.documents --write"


@pytest.mark.parametrize("feature", Feature)
def test_examples_set_a_field_of_their_feature(feature: Feature) -> None:
    example = FEATURES[feature].example
    # Without a window or chunks, first tokens have no effect.
    window = "" if feature is Feature.WINDOW else "window=8,"
    (problem,) = parse_shape(f"heads=8,seqlen=9000,head_dim=64,{window}{example}")
    assert problem.features - {Feature.WINDOW} == {feature} - {Feature.WINDOW}
    assert feature in problem.features


def test_families_without_features_are_listed() -> None:
    sentence = PAGE.read_text(encoding="utf-8").split("<!-- table features")[0].rsplit("\n\n", 2)[1]
    for family in families():
        if not family.features:
            assert f"`{family.name}`" in sentence
