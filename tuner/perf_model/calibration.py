"""Calibration of predictions: a ridge regression of measured over predicted times.

Its constants are in `fitted.json`, which `benchmarks/prediction.py` makes from tabular benchmarks. They hold
for the measured architecture.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from importlib import resources as files

import msgspec
import numpy as np

from flashtune.core.config import Config
from flashtune.core.errors import TableError
from flashtune.core.problem import Problem
from flashtune.core.record import Resources, ShortText
from flashtune.core.target import Target, find_target
from flashtune.templates.family import Family
from flashtune.templates.registry import find_family
from flashtune.tuner.perf_model.features import features
from flashtune.tuner.perf_model.measurements import TruthTable
from flashtune.tuner.perf_model.roofline import predict_ms
from flashtune.tuner.perf_model.roofline_backward import predict_backward_ms

FILE = "fitted.json"
# Weight of the penalty on large weights, compared with the residuals.
RIDGE = 10.0
DIGITS = 5


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


def fit_tables(tables: Sequence[TruthTable]) -> Calibration:
    """Returns constants fitted to one GPU's tables. All problems have equal weight."""
    if not tables:
        return NOTHING
    families = {table.family for table in tables}
    fits = {
        name: _fit_family([_samples(table) for table in tables if table.family == name])
        for name in sorted(families)
    }
    arch = find_target(tables[0].target).arch
    return Calibration(arch, tuple(sorted({table.problem.key for table in tables})), fits)


class _Samples(msgspec.Struct, frozen=True):
    """The working configs of a table: features, and logarithms of measured over predicted times."""

    features: tuple[Mapping[str, float], ...]
    off: tuple[float, ...]


def _samples(table: TruthTable) -> _Samples:
    family, target = find_family(table.family), find_target(table.target)
    found, off = [], []
    for row, ms in zip(table.rows, table.times(), strict=True):
        config = table.candidate(row).config
        if ms is None or row.resources is None:
            continue
        predicted = formula_ms(table.problem, family, config, row.resources, target)
        if not math.isinf(predicted):
            found.append(features(table.problem, family, config, row.resources, target))
            off.append(math.log(ms / predicted))
    return _Samples(tuple(found), tuple(off))


def _fit_family(tables: Sequence[_Samples]) -> FamilyFit:
    """Fits weights to differences within tables, so that a problem's own level has no effect."""
    names = sorted({name for table in tables for entry in table.features for name in entry})
    grids = [
        np.array([[entry.get(name, 0.0) for name in names] for entry in table.features]) for table in tables
    ]
    offs = [np.array(table.off) for table in tables]
    rows = np.vstack([grid - grid.mean(axis=0) for grid in grids])
    errors = np.concatenate([off - off.mean() for off in offs])
    weights = np.linalg.solve(rows.T @ rows + RIDGE * np.eye(len(names)), rows.T @ errors)
    level = float(
        np.mean([off.mean() - grid.mean(axis=0) @ weights for grid, off in zip(grids, offs, strict=True)])
    )
    kept = {name: round(float(weight), DIGITS) for name, weight in zip(names, weights, strict=True)}
    return FamilyFit(round(level, DIGITS), kept)
