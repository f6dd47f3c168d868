"""Tables of the effect of each axis of a family, from the tabular benchmarks in tests/data/truth.

No GPU is needed. A cell is the time of the fastest config with that value over the time of the fastest
config. Both are from the tabular benchmark. `python -m benchmarks.documents --write` puts the tables into
benchmarks/results/axes.md and benchmarks/results/hopper.md.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from benchmarks.exhaustive.prediction import TABLES
from benchmarks.exhaustive.truth_table import TruthTable, fastest, read_tables
from benchmarks.tables import long_title
from flashtune.tuner.analysis.charts import Chart
from flashtune.tuner.cli.output import table
from flashtune.tuner.cli.report.chart_report import charts_figure

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SCRIPT = "benchmarks/exhaustive/axes.py"

Value = int | bool | str


def texts() -> dict[str, str]:
    """The text of each place in the pages, by name: `axes-FAMILY`."""
    return {f"axes-{name}": "\n".join(_lines(several)) for name, several in _families().items()}


def pictures() -> "dict[str, Figure]":
    """The axes with several values, by the name of the picture: `axes-FAMILY`."""
    return {f"axes-{name}": charts_figure(list(_charts(several))) for name, several in _families().items()}


def _families() -> dict[str, list[TruthTable]]:
    """The tables of each family, in the order of their problems."""
    families: dict[str, list[TruthTable]] = {}
    for truth in sorted(
        read_tables(TABLES),
        key=lambda table: (table.problem.head_dim, table.problem.causal.value, table.problem.seqlen_kv),
    ):
        families.setdefault(truth.family, []).append(truth)
    return families


def _effects(tables: Sequence[TruthTable]) -> Iterator[tuple[str, dict[Value, list[float | None]]]]:
    """Each axis that varies, and for each value the ratio of each problem."""
    worth = [_worth(table) for table in tables]
    for axis in dict.fromkeys(axis for ratios in worth for axis in ratios):
        values = sorted({value for ratios in worth for value in ratios.get(axis, {})}, key=_order)
        if len(values) > 1:
            yield axis, {value: [ratios.get(axis, {}).get(value) for ratios in worth] for value in values}


def _charts(tables: Sequence[TruthTable]) -> Iterator[Chart]:
    """A chart for each axis with more than two values."""
    for axis, effects in _effects(tables):
        if len(effects) > 2:
            yield Chart(
                title=axis,
                across=axis,
                positions=tuple(map(_text, effects)),
                unit="% slower than the fastest",
                lines={
                    long_title(truth.problem): tuple(
                        None if ratios[place] is None else round(100 * (ratios[place] or 0) - 100, 3)
                        for ratios in effects.values()
                    )
                    for place, truth in enumerate(tables)
                },
                log=False,
            )


def _lines(tables: Sequence[TruthTable]) -> Iterator[str]:
    """A line for each value of each axis that varies, a column for each problem."""
    rows = [
        (f"`{axis}` {_text(value)}", *(f"{cell:.2f}" if cell else "–" for cell in cells))
        for axis, effects in _effects(tables)
        for value, cells in effects.items()
    ]
    yield from table(("", *(long_title(truth.problem) for truth in tables)), rows)


def _worth(truth: TruthTable) -> dict[str, dict[Value, float]]:
    """For each axis and value the best time with it, over the best of all."""
    best = fastest(truth)
    ratios: dict[str, dict[Value, float]] = {}
    for values, ms in zip((row.values for row in truth.rows), truth.times(), strict=True):
        for axis, value in zip(truth.fields, values, strict=True):
            if ms is not None:
                of_axis = ratios.setdefault(axis, {})
                of_axis[value] = min(of_axis.get(value, ms / best), ms / best)
    return ratios


def _order(value: Value) -> tuple[int, str]:
    return (int(value), "") if isinstance(value, int) else (0, str(value))


def _text(value: Value) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
