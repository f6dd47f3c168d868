from pathlib import Path

import msgspec
import pytest

from benchmarks.exhaustive.truth_table import (
    Sampled,
    TruthTable,
    fastest,
    read_table,
    read_tables,
    write_table,
)
from tests.benchmarks.research.truth_fakes import a_table

KEPT = Path(__file__).parents[2] / "data" / "truth"


def test_table_round_trips(tmp_path: Path) -> None:
    table = a_table()
    path = tmp_path / "folder" / "table.json.xz"
    write_table(table, path)
    assert read_table(path) == table
    assert read_tables(path.parent) == (table,)
    assert not table.is_whole


def test_times_are_corrected_for_drift_and_heat() -> None:
    plain = a_table(configs=4)
    first, second, third, fourth = (
        msgspec.structs.replace(
            row,
            batch=number % 2,
            first=Sampled(ms, ms, ms, 9),
            final=final and Sampled(final, final, final, 21),
        )
        for number, (row, ms, final) in enumerate(
            zip(plain.rows, (2.0, 2.2, 4.0, 4.4), (2.5, 2.5, None, None), strict=True)
        )
    )
    # The second batch ran a tenth slower, and finals a quarter slower than batches.
    table = msgspec.structs.replace(plain, anchors=(1.0, 1.1), rows=(first, second, third, fourth))
    assert table.first_times() == pytest.approx((2.1, 2.1, 4.2, 4.2))
    assert table.times() == pytest.approx((2.5, 2.5, 5.0, 5.0))
    assert fastest(table) == 2.5


@pytest.mark.parametrize("path", sorted(KEPT.glob("*.json.xz")), ids=lambda path: path.name.split(".")[0])
def test_saved_tables_are_complete_and_small(path: Path) -> None:
    table: TruthTable = read_table(path)
    assert len(table.rows) == table.drawn
    assert table.drawn == min(300, table.fitting) or table.is_whole
    assert len({row.values for row in table.rows}) == len(table.rows)
    assert path.stat().st_size < 120_000
