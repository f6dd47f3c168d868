"""Fit of the constants that correct predicted times: a ridge regression on tabular benchmarks."""

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from benchmarks.exhaustive.truth_table import TruthTable
from flashtune.core.target import find_target
from flashtune.templates.registry import find_family
from flashtune.tuner.perf_model.prediction import Calibration, FamilyFit, features, scheduled_ms

# Weight of the penalty on large weights, compared with the residuals.
RIDGE = 10.0
DIGITS = 5
# No correction.
NOTHING = Calibration("", (), {})


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
    rows, off = [], []
    for row, ms in zip(table.rows, table.times(), strict=True):
        config = table.candidate(row).config
        if ms is None or row.resources is None:
            continue
        predicted = scheduled_ms(table.problem, family, config, row.resources, target)
        if not math.isinf(predicted):
            rows.append(features(family, config, row.resources, target))
            off.append(math.log(ms / predicted))
    return _Samples(tuple(rows), tuple(off))


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
