"""Tests that the descriptions of features match the fields of problems and the extra inputs."""

from __future__ import annotations

from typing import Any

from flashtune.core.features.table import (
    FEATURES,
    FIELDS,
    NUMBER_INPUTS,
    NUMBERS,
    TENSOR_INPUTS,
    TENSORS,
    TYPES,
    ExtraInputs,
    flags_of,
)
from flashtune.core.problem import Feature


def test_every_feature_has_one_description() -> None:
    assert set(FEATURES) == set(Feature)


def test_every_field_belongs_to_one_feature() -> None:
    named = [field for one in FEATURES.values() for field in (*one.fields, *one.details)]
    assert sorted(named) == sorted(FIELDS)


def test_every_extra_input_has_a_description() -> None:
    # Numbers are last, because kernels take them after the scale.
    assert set(TENSORS) == set(TENSOR_INPUTS)
    assert set(NUMBERS) == set(NUMBER_INPUTS)


def test_inputs_set_the_flags_of_their_features() -> None:
    for one in FEATURES.values():
        for given in one.numbers or one.tensors:
            flags = flags_of(ExtraInputs()._replace(**dict[str, Any]({given.name: 1.0})))
            assert [name for name, there in flags.items() if there] == [
                field for field in one.fields if bool in TYPES[field]
            ]


def test_words_of_keys_differ() -> None:
    words = [one.word.split("{")[0] for one in FEATURES.values()]
    assert len(set(words)) == len(words)
