"""Tables of the effect of each axis of a family, from the tabular benchmarks in tests/data/truth.

No GPU is needed. A cell is the time of the fastest config with that value over the time of the fastest
config. Both are from the tabular benchmark. `python -m benchmarks.documents --write` puts the tables into
benchmarks/results/axes.md and benchmarks/results/hopper.md.
"""

from collections.abc import Iterator, Sequence

from benchmarks.exhaustive.prediction import TABLES
from benchmarks.exhaustive.truth_table import TruthTable, fastest, read_tables
from benchmarks.tables import long_title
from flashtune.tuner.cli.output import table

SCRIPT = "benchmarks/exhaustive/axes.py"

Value = int | bool | str


def texts() -> dict[str, str]:
    """The text of each place in the pages, by name: `axes-FAMILY`."""
    families: dict[str, list[TruthTable]] = {}
    for truth in read_tables(TABLES):
        families.setdefault(truth.family, []).append(truth)
    return {f"axes-{name}": "\n".join(_lines(several)) for name, several in families.items()}


def _lines(tables: Sequence[TruthTable]) -> Iterator[str]:
    """A line for each value of each axis that varies, a column for each problem."""
    tables = sorted(
        tables,
        key=lambda table: (table.problem.head_dim, table.problem.causal.value, table.problem.seqlen_kv),
    )
    worth = [_worth(table) for table in tables]
    rows = []
    for axis in dict.fromkeys(axis for ratios in worth for axis in ratios):
        values = sorted({value for ratios in worth for value in ratios.get(axis, {})}, key=_order)
        if len(values) == 1:
            continue
        for value in values:
            cells = (ratios.get(axis, {}).get(value) for ratios in worth)
            rows.append((f"`{axis}` {_text(value)}", *(f"{cell:.2f}" if cell else "–" for cell in cells)))
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
