import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.exhaustive.truth_table import (
    Sampled,
    TruthTable,
    draw,
    fastest,
    read_table,
    read_tables,
    write_table,
)
from flashtune.core.errors import TableError
from flashtune.core.target import find_target
from flashtune.tuner.candidates import SearchTask, contiguous_specialization, open_spaces
from tests.benchmarks.research.truth_fakes import SHAPE, a_problem, a_table

KEPT = Path(__file__).parents[2] / "data" / "truth"


def packed(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    content = msgspec.json.decode(msgspec.json.encode(a_table(configs=3)))
    change(content)
    path.write_bytes(lzma.compress(msgspec.json.encode(content)))
    return path


def test_table_round_trips(tmp_path: Path) -> None:
    table = a_table()
    path = tmp_path / "folder" / "table.json.xz"
    write_table(table, path)
    assert read_table(path) == table
    assert read_tables(path.parent) == (table,)
    assert not table.is_whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(secret=1),
        lambda content: content.update(family="forward_sideways"),
        lambda content: content["rows"][0].__setitem__(0, [9, "9"]),
        lambda content: content["rows"][0].__setitem__(1, "fine"),
        lambda content: content["rows"][0].__setitem__(5, 7),
        lambda content: content.update(anchors=[0.0]),
    ],
)
def test_invalid_table_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(TableError, match="truth table"):
        read_table(packed(tmp_path / "bad.json.xz", change))


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


@pytest.mark.slow
def test_draws_for_problems_with_equal_spaces_are_equal() -> None:
    def drawn(shape: str, count: int) -> tuple[Any, ...]:
        problem, target = a_problem(shape), find_target("h200")
        spaces = open_spaces(problem, target, ("forward_hopper",))
        fitting, candidates = draw(
            SearchTask(problem, target, contiguous_specialization(problem), spaces), count, 0
        )
        assert len(candidates) == count <= fitting
        return candidates

    short, long = drawn(SHAPE, 100), drawn(SHAPE.replace("2048", "8192"), 100)
    assert short == long
    assert drawn(SHAPE, 50) == short[:50]


@pytest.mark.parametrize("path", sorted(KEPT.glob("*.json.xz")), ids=lambda path: path.name.split(".")[0])
def test_saved_tables_are_complete_and_small(path: Path) -> None:
    table: TruthTable = read_table(path)
    assert len(table.rows) == table.drawn
    assert table.drawn == min(300, table.fitting) or table.is_whole
    assert len({row.values for row in table.rows}) == len(table.rows)
    assert path.stat().st_size < 120_000
