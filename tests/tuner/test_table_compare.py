"""Tables are compared by each problem's speed relative to SDPA in the same run."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashtune.db.rules import serves_any_tensors
from flashtune.db.table import TunedTable, parse_table, shipped_table
from flashtune.errors import TableError, UsageError
from flashtune.record import PeerTime, Record
from flashtune.tuner.cli import main
from flashtune.tuner.table_compare import compare, losses, relative_speed, retime_losses

PREDECESSORS = sorted((Path(__file__).parents[1] / "data" / "tables").glob("*-predecessor.json.gz"))


def table_with(scale: float = 1.0, **changes: Any) -> TunedTable:
    """The first records of a shipped table, their times multiplied by a factor."""
    table = shipped_table("nvidia-h200")
    assert table is not None
    records = tuple(_scaled(record, scale) for record in table.records[:4])
    return msgspec.structs.replace(table, **{"records": records, **changes})


def _scaled(record: Record, scale: float) -> Record:
    assert record.measurement is not None
    times = {name: getattr(record.measurement, name) * scale for name in ("ms", "p20", "p80")}
    return msgspec.structs.replace(record, measurement=msgspec.structs.replace(record.measurement, **times))


def test_equal_tables_have_no_changes() -> None:
    assert compare(table_with(), table_with()) == ()


def test_a_slower_clock_is_no_loss() -> None:
    table = table_with(1.1)
    records = []
    for record in table.records:
        assert record.measurement is not None
        peers = tuple(PeerTime(peer.name, peer.ms * 1.1) for peer in record.measurement.peers)
        measurement = msgspec.structs.replace(record.measurement, peers=peers)
        records.append(msgspec.structs.replace(record, measurement=measurement))
    changes = compare(table_with(), msgspec.structs.replace(table, records=tuple(records)))
    assert len(changes) == 4
    assert not losses(changes)


@pytest.mark.parametrize(("scale", "lost"), [(1.01, 0), (1.03, 4), (0.9, 0)])
def test_speed_relative_to_peers_decides(scale: float, lost: int) -> None:
    assert len(losses(compare(table_with(), table_with(scale)))) == lost


def test_a_missing_problem_is_a_loss() -> None:
    table = table_with()
    (lost,) = losses(compare(table, msgspec.structs.replace(table, records=table.records[1:])))
    assert (lost.old, lost.new, lost.ratio) == (table.records[0], None, None)


def test_tables_of_two_gpus_are_refused() -> None:
    with pytest.raises(TableError, match="tables of one GPU"):
        compare(table_with(), table_with(target="nvidia-h100", records=()))


def test_timing_again_needs_the_gpu_of_the_table() -> None:
    with pytest.raises(UsageError, match="needs the table's GPU"):
        retime_losses((), table_with(target="nvidia-a100-80gb"))


@pytest.mark.parametrize("path", PREDECESSORS, ids=lambda path: path.name)
def test_shipped_selections_keep_the_speed_of_their_predecessors(path: Path) -> None:
    target = path.name.removesuffix("-predecessor.json.gz")
    shipped = shipped_table(target)
    assert shipped is not None
    before = parse_table(gzip.decompress(path.read_bytes()), path.name)
    selections = tuple(record for record in before.records if not serves_any_tensors(record))
    changes = compare(msgspec.structs.replace(before, records=selections), shipped)
    assert len(changes) > 100
    assert [(one.problem, relative_speed(one.old)) for one in losses(changes)] == []


def test_every_shipped_table_has_a_predecessor() -> None:
    assert [path.name for path in PREDECESSORS] == ["nvidia-h200-predecessor.json.gz"]


def test_the_command_names_losses_and_exits_with_1(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from flashtune.tuner.export import json_table

    paths = tmp_path / "old.json", tmp_path / "new.json"
    for path, scale in zip(paths, (1.0, 1.05), strict=True):
        path.write_bytes(json_table("nvidia-h200", table_with(scale).records))
    done = CliRunner().invoke(main, ["db", "compare", *map(str, paths)])
    assert done.exit_code == 1
    assert "4 problems lose more than 2%" in done.output
    done = CliRunner().invoke(main, ["db", "compare", "--limit", "10", *map(str, paths)])
    assert done.exit_code == 0
