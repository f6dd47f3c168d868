"""Accuracy of predicted times on tabular benchmarks outside of the calibration.

    python -m benchmarks.exhaustive.prediction        # prints the table, in Markdown
    python -m benchmarks.exhaustive.prediction --fit  # and fits the constants that ship to all tables

Each problem is judged with constants fitted to the other tables. No GPU is needed. `python -m
benchmarks.documents --write` puts the table into docs/prediction.md.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.exhaustive.fitting import NOTHING, fit_tables
from benchmarks.exhaustive.truth_table import TruthTable, read_tables
from benchmarks.saved import ROOT
from benchmarks.tables import long_title
from flashtune.core.errors import FlashtuneError
from flashtune.core.target import find_target
from flashtune.templates.registry import find_family
from flashtune.tuner.cli.output import table
from flashtune.tuner.perf_model.prediction import FILE, Calibration, expected_ms

TABLES = ROOT / "tests/data/truth"
FITTED = ROOT / "tuner" / FILE
SCRIPT = "benchmarks/exhaustive/prediction.py"
TOP = 10

Floats = NDArray[np.float64]


class Judged(msgspec.Struct, frozen=True):
    """One problem's prediction against its truth."""

    table: TruthTable
    # Spearman's rank correlation of the uncorrected prediction with the measured times.
    plain: float
    corrected: float  # That of the corrected one.
    rank: int  # Which place the truly best has in the predicted order, from 1.
    top: float  # Share of the true best that the best of the ten first predicted reaches.
    median_ratio: float  # Median of predicted over measured times.


def main() -> None:
    """Judges, prints and fits."""
    parser = argparse.ArgumentParser(description="How well times are predicted, by truth tables.")
    parser.add_argument("--fit", action="store_true", help="fit the constants that ship to all tables")
    options = parser.parse_args()
    try:
        print(texts()["judged"])
        if options.fit:
            fit = fit_tables(read_tables(TABLES))
            FITTED.write_bytes(msgspec.json.format(msgspec.json.encode(fit)) + b"\n")
    except FlashtuneError as error:
        sys.exit(f"error: {error}")


def texts() -> dict[str, str]:
    """The text of each place in the page, by name."""
    tables = read_tables(TABLES)
    return {"judged": "\n".join(_lines([judge(table, tables) for table in tables]))}


def judge(table: TruthTable, tables: Sequence[TruthTable]) -> Judged:
    """One table by constants of the others; those of the same problem are left out too."""
    fit = fit_tables([other for other in tables if other.problem != table.problem])
    measured = np.array([ms or np.inf for ms in table.times()])
    plain, corrected = (predictions(table, constants) for constants in (NOTHING, fit))
    works = np.isfinite(measured) & np.isfinite(corrected)
    order = np.argsort(corrected, kind="stable")
    best = float(measured.min())
    return Judged(
        table=table,
        plain=spearman(plain[works], measured[works]),
        corrected=spearman(corrected[works], measured[works]),
        rank=int(np.flatnonzero(measured[order] == best)[0]) + 1,
        top=best / float(measured[order[:TOP]].min()),
        median_ratio=float(np.median(corrected[works] / measured[works])),
    )


def predictions(table: TruthTable, fit: Calibration) -> Floats:
    """The predicted time of each row, infinite where it did not compile, in ms."""
    family, target = find_family(table.family), find_target(table.target)
    return np.array(
        [
            np.inf
            if row.resources is None
            else expected_ms(table.problem, family, table.candidate(row).config, row.resources, target, fit)
            for row in table.rows
        ]
    )


def spearman(left: Floats, right: Floats) -> float:
    """Correlation of ranks; equal values share the mean of their ranks."""
    return float(np.corrcoef(_ranks(left), _ranks(right))[0, 1])


def _ranks(values: Floats) -> Floats:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: Floats = ends - (counts - 1) / 2
    return means[places]


def _lines(judged: Sequence[Judged]) -> Iterator[str]:
    heads = ("problem", "family", "configs", "uncorrected", "corrected", "place of the best", "best of ten")
    rows = (
        (
            long_title(entry.table.problem),
            entry.table.family,
            str(len(entry.table.rows)),
            f"{entry.plain:.2f}",
            f"{entry.corrected:.2f}",
            str(entry.rank),
            f"{entry.top:.3f}",
        )
        for entry in sorted(judged, key=lambda entry: (entry.table.family, entry.table.problem.head_dim))
    )
    yield from table(heads, rows)
    middle = statistics.median(entry.corrected for entry in judged)
    before = statistics.median(entry.plain for entry in judged)
    tens = sum(entry.rank <= TOP for entry in judged)
    yield ""
    yield (
        f"Median of all problems: {middle:.2f}, uncorrected {before:.2f}. The true best is among the first "
        f"ten in {tens} of {len(judged)} problems. These ten come to "
        f"{statistics.median(entry.top for entry in judged):.3f} of it in the median, "
        f"{min(entry.top for entry in judged):.3f} at worst."
    )


if __name__ == "__main__":
    main()
