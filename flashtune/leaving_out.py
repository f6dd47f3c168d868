"""Problems without some of their features, to say what of a problem could be computed."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from flashtune.features import Bias, Feature
from flashtune.problem import Problem

# What each feature's fields are without it.
DEFAULTS: dict[Feature, dict[str, object]] = {
    Feature.WINDOW: {"window_left": None, "window_right": None},
    Feature.FIRST_TOKENS: {"first_tokens": 0},
    Feature.CHUNK: {"chunk": 0},
    Feature.PREFIX: {"prefix": False},
    Feature.SOFTCAP: {"softcap": False},
    Feature.ALIBI: {"alibi": False},
    Feature.BIAS: {"bias": Bias.NONE},
    Feature.SINKS: {"sinks": False},
    Feature.PACKED: {"packed": 0},
    Feature.LENGTHS: {"lengths": False},
    Feature.PAGES: {"page_size": 0},
    Feature.QUANTIZED_KV: {"kv_dtype": None},
    Feature.LATENT: {"latent": False},
    Feature.DROPOUT: {"dropout": False},
    Feature.DETERMINISTIC: {"deterministic": False},
}


def without(problem: Problem, features: Iterable[Feature]) -> Problem:
    """A problem without some features."""
    changes = {field: value for feature in features for field, value in DEFAULTS[feature].items()}
    return msgspec.structs.replace(problem, **changes)
