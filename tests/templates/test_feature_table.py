"""Tests that the table of docs/features.md matches the features of the families."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashtune.core.problem import Feature
from flashtune.templates.registry import families
from flashtune.tuner.workloads.shapes import parse_shape

PAGE = Path(__file__).parents[2] / "docs" / "features.md"
# Keys of shapes that are not called as their features are.
KEYS = {"page_size": Feature.PAGES, "kv_dtype": Feature.QUANTIZED_KV, "total_q": Feature.VARLEN}
HEAD = "| feature | in a shape | computed by |"


def rows() -> dict[Feature, frozenset[str]]:
    """The families of each row, by the feature that the row's shape asks for."""
    table = PAGE.read_text(encoding="utf-8").split(HEAD)[1].split("\n\n")[0]
    found: dict[Feature, frozenset[str]] = {}
    for line in table.splitlines()[2:]:
        _, shape, names = (cell.strip() for cell in line.strip("|").split("|"))
        key = shape.strip("`")
        assert parse_shape(f"heads=8,seqlen=64,head_dim=64,{key}")
        # A pass may stand before what it alone knows.
        name = key.split(",")[-1].split("=")[0]
        feature = Feature(KEYS.get(name, name))
        assert feature not in found
        found[feature] = frozenset(re.findall(r"`(\w+)`", names))
    return found


def test_every_feature_has_a_row() -> None:
    assert set(rows()) == set(Feature)


@pytest.mark.parametrize("feature", Feature)
def test_a_row_names_the_families_that_compute_its_feature(feature: Feature) -> None:
    told = rows()[feature]
    assert told == {family.name for family in families() if feature in family.features}


def test_families_without_features_are_listed() -> None:
    sentence = PAGE.read_text(encoding="utf-8").split(HEAD)[0].rsplit("\n\n", 2)[1]
    for family in families():
        if not family.features:
            assert f"`{family.name}`" in sentence
