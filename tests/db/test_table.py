"""Tests of tables: their text, refusals, and the shipped ones."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashtune.core.errors import TableError
from flashtune.core.problem import Causal
from flashtune.core.record import Provenance
from flashtune.core.target import TARGETS
from flashtune.db import table as tables
from flashtune.db.store import open_store
from flashtune.db.table import (
    TunedTable,
    check_table,
    dump_table,
    load_table,
    parse_table,
    shipped_table,
    table_hash,
)
from tests.db.records import make_problem, make_record
from tests.support.families import Ship
from tests.support.records import shipped_table_of

TARGET = "nvidia-h200"


@pytest.fixture
def table() -> TunedTable:
    problems = [
        make_problem(seqlen=4096),
        make_problem(causal=Causal.BOTTOM_RIGHT),
        make_problem(),
        make_problem(head_dim=128),
    ]
    baseline = make_record(
        problem=make_problem(batch=1), family="sdpa", config=None, kernel=None, verdict=None
    )
    return TunedTable(
        target=TARGET, records=(*(make_record(problem=problem) for problem in problems), baseline)
    )


def test_table_round_trips_in_problem_order(table: TunedTable, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(dump_table(table))
    loaded = load_table(path)
    assert set(loaded.records) == set(table.records)
    assert dump_table(loaded) == path.read_bytes()


def test_order_does_not_change_the_bytes_or_the_hash(table: TunedTable) -> None:
    turned = TunedTable(target=TARGET, records=table.records[::-1])
    assert dump_table(turned) == dump_table(table)
    assert table_hash(turned) == table_hash(table)


def test_tables_omit_the_physical_gpu_and_its_records_are_known_again(tmp_path: Path) -> None:
    plain = make_record()
    assert plain.measurement is not None
    timed = msgspec.structs.replace(plain.measurement, gpu_uuid="a-b-c", clock_mhz=1980)
    record = msgspec.structs.replace(plain, measurement=timed)
    of_gpu, without = (TunedTable(target=TARGET, records=(each,)) for each in (record, plain))
    assert dump_table(of_gpu) == dump_table(without)
    assert table_hash(of_gpu) == table_hash(without)
    with open_store(str(tmp_path / "records.sqlite")) as store:
        store.pin(store.add(record))
        assert store.merge_tables(without).records_known == 1
        assert [entry.record for entry in store.records()] == [record]


def test_hash_does_not_depend_on_json_layout(table: TunedTable) -> None:
    raw = dump_table(table)
    respaced = json.dumps(json.loads(raw)).encode()
    assert table_hash(parse_table(respaced, "respaced")) == table_hash(table)
    other = TunedTable(
        target=TARGET, records=(*table.records[1:], make_record(problem=table.records[0].problem, ms=9.0))
    )
    assert table_hash(other) != table_hash(table)
    assert table_hash(TunedTable(target=TARGET, records=())) != table_hash(TunedTable(target="x", records=()))


def test_a_diff_shows_one_field_a_line(table: TunedTable) -> None:
    problem = table.records[0].problem
    changed = TunedTable(target=TARGET, records=(make_record(problem=problem, ms=0.5), *table.records[1:]))
    before, after = (dump_table(version).decode().splitlines() for version in (table, changed))
    differing = [line for line, other in zip(before, after, strict=True) if line != other]
    assert len(differing) == 1
    assert differing[0].lstrip().startswith('"measurement"')


def test_empty_table_is_valid() -> None:
    empty = TunedTable(target=TARGET, records=())
    assert parse_table(dump_table(empty), "empty") == empty


def edited(table: TunedTable, **changes: Any) -> bytes:
    """The table's JSON with top-level fields replaced."""
    return json.dumps(json.loads(dump_table(table)) | changes).encode()


def with_record(table: TunedTable, **changes: Any) -> bytes:
    """The table's JSON with fields of its first record replaced."""
    fields = json.loads(dump_table(table))
    fields["records"][0] |= changes
    return json.dumps(fields).encode()


def refused(raw: bytes, reason: str) -> None:
    with pytest.raises(TableError, match=reason) as caught:
        parse_table(raw, "table.json")
    assert str(caught.value).startswith("table.json")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": 3}, "has table schema 3 and this flashtune reads schemas 4 and 5: search again"),
        ({"schema": 6}, "has table schema 6 and this flashtune reads schemas 4 and 5: search again"),
        ({"schema": "1"}, "is not a tuned table"),
        ({"surprise": 1}, "unknown field `surprise`"),
        (
            {"target": "nvidia-a100"},
            "record 1 cannot be used: it is of nvidia-h200 in a table of nvidia-a100",
        ),
        ({"records": {}}, "is not a tuned table"),
        ({"records": [1]}, "record 1: "),
    ],
)
def test_a_table_out_of_order_is_refused(table: TunedTable, changes: dict[str, Any], reason: str) -> None:
    refused(edited(table, **changes), reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"surprise": 1}, "unknown field `surprise`"),
        ({"kernel": "../../etc/passwd"}, "regex"),
        ({"kernel": None}, "it names no kernel"),
        ({"config": {"block_m": "__import__('os')"}}, "config is none of family"),
        ({"outcome": "wrong_result"}, "its outcome is wrong_result"),
        ({"verdict": None}, "without being verified"),
    ],
)
def test_malformed_record_is_refused(table: TunedTable, changes: dict[str, Any], reason: str) -> None:
    refused(with_record(table, **changes), f"record 1.*{reason}")


@pytest.mark.parametrize("raw", [b"", b"[]", b"nothing", b"\xff\xfe", b"[" * 100_000, b'{"schema": 5}'])
def test_file_that_is_not_a_table_is_refused(raw: bytes) -> None:
    refused(raw, "is not a tuned table")


def test_invalid_utf8_byte_is_refused_at_every_position(table: TunedTable) -> None:
    raw = dump_table(table)
    for position in range(0, len(raw), 101):
        with pytest.raises(TableError) as caught:
            parse_table(raw[:position] + b"\xff" + raw[position:], "table.json")
        assert str(caught.value).startswith("table.json")


def test_predictions_may_be_exported() -> None:
    predicted = make_record(provenance=Provenance.PREDICTED, verdict=None)
    table = TunedTable(target=TARGET, records=(predicted,))
    assert parse_table(dump_table(table), "predicted").records == (predicted,)


def test_an_oversize_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    with path.open("wb") as file:
        file.truncate(tables.MAX_TABLE_BYTES + 1)
    with pytest.raises(TableError, match=r"big\.json is over 64 MiB"):
        load_table(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=f"cannot read the table {tmp_path}/none.json: No such file"):
        load_table(tmp_path / "none.json")


@pytest.mark.parametrize("name", ["no-such-gpu", "../schema", "", "a/b", "x" * 500, "nvidia-h200\n"])
def test_unknown_target_has_no_shipped_table(name: str) -> None:
    assert shipped_table(name) is None


@pytest.mark.parametrize("target", [target.name for target in TARGETS])
def test_shipped_table_has_its_target(target: str) -> None:
    table = shipped_table(target)
    assert table is None or (table.target == target and table.records)
    if table is not None:
        check_table(table, target)


def test_table_ships_as_a_file_with_the_name_of_its_gpu(table: TunedTable, ship: Ship) -> None:
    ship(table)
    shipped = shipped_table_of(table.target)
    assert (shipped.target, len(shipped.records)) == (table.target, len(table.records))
    assert shipped_table("nvidia-b200") is None


SHIPPED = [target.name for target in TARGETS if shipped_table(target.name)]


@pytest.mark.parametrize("name", SHIPPED)
def test_receipts_of_shipped_kernels_list_their_probes(name: str) -> None:
    table = shipped_table_of(name)
    verdicts = [record.verdict for record in table.records if record.config is not None]
    assert verdicts
    assert all(verdict is not None and verdict.passed and verdict.probes for verdict in verdicts)
