"""Calibration of predictions by constants that were fitted to measured times.

The constants are in `fitted.json`, which `benchmarks/prediction.py` makes from tabular benchmarks. They hold
for the measured architecture.
"""

from __future__ import annotations

import functools
import math
from importlib import resources as files

import msgspec

from flashtune.core.config import Config
from flashtune.core.errors import TableError
from flashtune.core.problem import Problem
from flashtune.core.record import Resources, ShortText
from flashtune.core.target import Target
from flashtune.templates.family import Family
from flashtune.tuner.perf_model.features import features
from flashtune.tuner.perf_model.roofline import predict_ms
from flashtune.tuner.perf_model.roofline_backward import predict_backward_ms

FILE = "fitted.json"


class FamilyFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The constants of one family.

    Attributes:
        level: Logarithm of the error that all configs share.
        weights: Change of the logarithm of the time for each feature.
    """

    level: float
    weights: dict[ShortText, float]


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Constants by family, and their origin.

    Attributes:
        arch: The architecture that they hold for.
        problems: Keys of the fitted problems.
        families: The families' constants.
    """

    arch: ShortText
    problems: tuple[ShortText, ...]
    families: dict[ShortText, FamilyFit]


NOTHING = Calibration("", (), {})


def expected_ms(
    problem: Problem, family: Family, config: Config, resources: Resources, target: Target, fit: Calibration
) -> float:
    """Returns the predicted time of one launch, in ms, corrected by the family's calibration.

    Raises:
        UsageError: The family's configs have no tiles.
    """
    ms = formula_ms(problem, family, config, resources, target)
    own = fit.families.get(family.name)
    if own is None or fit.arch != target.arch or math.isinf(ms):
        return ms
    found = features(problem, family, config, resources, target)
    return ms * math.exp(own.level + sum(own.weights.get(name, 0.0) * value for name, value in found.items()))


def formula_ms(
    problem: Problem, family: Family, config: Config, resources: Resources, target: Target
) -> float:
    """Returns the predicted time of one launch of either pass, in ms, without calibration.

    Raises:
        UsageError: The family's configs have no tiles.
    """
    formula = predict_backward_ms if problem.is_backward else predict_ms
    return formula(problem, family, config, resources, target)


@functools.cache
def shipped_fit() -> Calibration:
    """Returns the shipped constants.

    Raises:
        TableError: The file is damaged.
    """
    try:
        raw = files.files("flashtune.tuner").joinpath(FILE).read_bytes()
        return msgspec.json.decode(raw, type=Calibration)
    except (OSError, msgspec.DecodeError) as error:
        raise TableError(
            f"{FILE} of this installation is damaged ({error}): install flashtune again"
        ) from error
