"""Tests of the migrations: they create the expected tables and upgrade every past schema."""

from __future__ import annotations

import shutil
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from flashtune.core.earlier_names import CONFIG_FIELDS, ORDERS, PROBLEM_FIELDS, TABLES
from flashtune.core.errors import StoreError
from flashtune.core.record import Measurement, Outcome, PeerTime, Record, Versions
from flashtune.db import migrate
from flashtune.db.codec import encode_record, fingerprint
from flashtune.db.errors import UnreadableRecord
from flashtune.db.light import reader as light_reader
from flashtune.db.light.bootstrap import HEAD, REVISIONS
from flashtune.db.light.reader import open_reader
from flashtune.db.migrate import MIGRATIONS, Upgraded, upgrade
from flashtune.db.schema import METADATA
from flashtune.db.store import Store, open_store
from flashtune.db.table import shipped_table

MakeRecord = Callable[..., Record]
SCHEMAS = sorted((Path(__file__).parents[2] / "data" / "schemas").glob("*.sqlite"))

# Views that readers of earlier versions query, and the tables that they show, joined with the records.
VIEWS = {
    "selected_records": "selections",
    "fallback_records": "fallbacks",
    "stand_in_records": "fallbacks",
    "known_checks": "checks",
    "check_payloads": "checks",
}


def test_revisions_list_every_migration() -> None:
    scripts = ScriptDirectory(str(MIGRATIONS))
    assert tuple(script.revision for script in reversed(list(scripts.walk_revisions()))) == REVISIONS


def test_every_past_schema_has_a_test_database() -> None:
    assert tuple(path.stem for path in SCHEMAS) == REVISIONS, "run tests/db/files/keep_schema.py"


def test_migrations_and_tables_agree(store: Store) -> None:
    with store._engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []


@pytest.mark.parametrize("kept", SCHEMAS, ids=lambda path: path.stem)
def test_upgrade_of_a_past_schema_preserves_its_rows(kept: Path, path: Path) -> None:
    shutil.copy(kept, path)
    assert upgrade(str(path)) == Upgraded(kept.stem, HEAD)
    with open_store(str(path)) as store:
        measured, failed = (stored.record for stored in store.records())
        assert [stored.record for stored in store.selections()] == [measured]
    assert measured.problem.key == "forward_bf16_d128v64_h32x8_b2_q1024_k4096_bottom_right"
    assert measured.measurement == Measurement(1.5, 1.25, 1.75, 11, peers=(PeerTime("sdpa-cudnn", 1.0),))
    assert failed.message == "out of memory"
    reader = open_reader(str(path))
    assert reader is not None
    assert reader.selections("nvidia-h200") == (measured,)
    versions = Versions("0.1.0", "none", "2.13.0", "3.7.1", "13.0", "580.1")
    assert reader.check("0123456789abcdef" * 2, "nvidia-h200", versions) is True


def tables_of(connection: sqlite3.Connection) -> dict[str, list[dict[str, object]]]:
    """Returns the rows of every table and view by its present name."""
    connection.row_factory = sqlite3.Row
    names = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name <> 'alembic_version'"
    present = {earlier: name for name, earlier in TABLES.items()}
    return {
        present.get(name, name): [dict(row) for row in connection.execute(f"SELECT * FROM {name} ORDER BY 1")]
        for (name,) in connection.execute(names).fetchall()
    }


@pytest.mark.parametrize("kept", SCHEMAS, ids=lambda path: path.stem)
def test_upgrade_of_a_past_schema_preserves_every_column(kept: Path, path: Path) -> None:
    shutil.copy(kept, path)
    with closing(sqlite3.connect(path)) as connection, connection:
        kinds = "SELECT name FROM sqlite_master WHERE type = 'table' AND name <> 'alembic_version'"
        # A record comes before the rows that name it.
        for (table,) in connection.execute(f"{kinds} ORDER BY name <> 'records'").fetchall():
            connection.execute(f"DELETE FROM {table}")
            columns = connection.execute(f"PRAGMA table_info({table})").fetchall()
            for number in (1, 2):
                # Each text occurs once. No migration rewrites records that are not readable.
                row = [
                    f"{table} {name} {number}" if kind.startswith(("VARCHAR", "TEXT")) else number
                    for _, name, kind, *_ in columns
                ]
                connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
        before = tables_of(connection)
    upgrade(str(path))
    with closing(sqlite3.connect(path)) as connection:
        after = tables_of(connection)
    assert {name: after.get(name) for name in before} == before
    by_id = {row["id"]: row for row in after["records"]}
    for view, table in VIEWS.items():
        records = [by_id[row["record_id"]] if "record_id" in row else {} for row in after[table]]
        whole = [record | row for record, row in zip(records, after[table], strict=True)]
        assert [row | one for row, one in zip(whole, after[view], strict=True)] == whole, view


def test_upgrade_removes_outcomes_caused_by_the_machine(path: Path, make_record: MakeRecord) -> None:
    shutil.copy(SCHEMAS[REVISIONS.index("0003")], path)
    caused = (
        "OSError: [Errno 28] No space left on device",
        "NotADirectoryError: [Errno 20] Not a directory: '/x/triton'",
        "MemoryError: no message",
        "compiling its process died (killed by signal 9)",
        "RuntimeError: Failed to find C compiler. Please specify via CC",
        "cuobjdump failed (FileNotFoundError): reinstall triton",
    )
    its_own = (
        "RuntimeError: PassManager::run failed",
        "compiling its process died (killed by signal 11)",
        "delayed: illegal memory access",
        "OutOfMemoryError: CUDA out of memory",
    )
    columns = "content_hash, created_at, problem_key, target, family, outcome, provenance, triton, template"
    insert = f"INSERT INTO records ({columns}, payload) VALUES (?, '', ?, ?, ?, ?, '', '', '', ?)"
    with closing(sqlite3.connect(path)) as connection, connection:
        (before,) = connection.execute("SELECT count(*) FROM records").fetchone()
        for number, message in enumerate((*caused, *its_own)):
            record = make_record(outcome=Outcome.COMPILE_ERROR, measurement=None, message=message)
            key = (record.problem.key, record.target, record.family, record.outcome.value)
            connection.execute(insert, (str(number), *key, encode_record(record).decode()))
    upgrade(str(path))
    with open_store(str(path)) as store:
        messages = [entry.record.message for entry in store.records()]
    assert tuple(messages[before:]) == its_own
    assert len(messages) == before + len(its_own)


def test_upgrading_twice_changes_nothing(path: Path) -> None:
    assert upgrade(str(path)) == Upgraded(None, HEAD)
    before = path.read_bytes()
    assert upgrade(str(path)) == Upgraded(HEAD, HEAD)
    assert path.read_bytes() == before


def test_new_database_has_required_pragmas(path: Path) -> None:
    with open_store(str(path)) as store, store._engine.connect() as connection:
        settings = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "busy_timeout", "foreign_keys")
        }
    assert settings == {"journal_mode": "wal", "synchronous": 1, "busy_timeout": 60_000, "foreign_keys": 1}


def test_write_transactions_begin_immediately(path: Path) -> None:
    statements: list[str] = []
    with open_store(str(path)) as store:
        with store._engine.connect() as connection:
            connection.connection.driver_connection.set_trace_callback(statements.append)  # type: ignore[union-attr]
        store.records()
        with pytest.raises(StoreError, match="has no record"):
            store.pin(1)
    began = [statement for statement in statements if statement.startswith("BEGIN")]
    assert began == ["BEGIN", "BEGIN IMMEDIATE"]


def test_failed_migration_leaves_the_database_unchanged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(connection: Connection, url: str) -> None:
        real(connection, url)
        raise RuntimeError("power cut")

    real = migrate._migrate
    monkeypatch.setattr(migrate, "_migrate", fail)
    with pytest.raises(RuntimeError, match="power cut"):
        open_store(str(path))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == []
    monkeypatch.undo()
    with open_store(str(path)) as store:
        assert store.records() == []


def test_merge_of_an_older_schema_names_the_upgrade_command(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade(str(path))
    with open_store(str(tmp_path / "ours.sqlite")) as store:
        monkeypatch.setattr(migrate, "HEAD", "later")
        with pytest.raises(StoreError, match=f"older schema: run `flashtune db upgrade --db {path}` first"):
            store.merge_from(str(path))


def earlier_database(path: Path, records: Iterable[Record]) -> None:
    """Makes a database of revision 0004 with records under their earlier names; all are selected."""
    shutil.copy(SCHEMAS[REVISIONS.index("0004")], path)
    columns = (
        "id, content_hash, created_at, problem_key, target, family, config, config_hash, kernel, outcome"
    )
    insert = (
        f"INSERT INTO records ({columns}, provenance, ms, triton, template, payload) VALUES ({'?, ' * 14}?)"
    )
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM selections")
        connection.execute("DELETE FROM records")
        for number, record in enumerate(records, 1):
            raw = earlier_json(record)
            row = (
                number,
                fingerprint(raw),
                "",
                record.problem.key,
                record.target,
                record.family,
                "a=1",
                "old",
            )
            rest = (
                record.kernel,
                record.outcome.value,
                record.provenance.value,
                record.ms,
                record.versions.triton,
            )
            connection.execute(insert, (*row, *rest, record.versions.template, raw.decode()))
            for table in ("selections", "stand_ins"):
                key = (record.problem.key, record.target, number)
                connection.execute(f"INSERT INTO {table} VALUES (?, ?, ?, '')", key)


def earlier_json(record: Record) -> bytes:
    """Returns a record as versions before migration 0005 wrote it."""
    fields = msgspec.json.decode(encode_record(record))
    for part, names in (("config", CONFIG_FIELDS[record.family]), ("problem", PROBLEM_FIELDS)):
        earlier = {after: before for before, after in names.items()}
        fields[part] = {earlier.get(name, name): value for name, value in fields[part].items()}
    orders = {after: before for before, after in ORDERS.items()}
    if "order" in fields["config"]:
        fields["config"]["order"] = orders.get(fields["config"]["order"], fields["config"]["order"])
    for peer in fields["measurement"]["peers"]:
        peer["name"] = {"unfused": "standard"}.get(peer["name"], peer["name"])
    return msgspec.json.encode(fields)


def shipped_records() -> list[Record]:
    """Returns a record of each shipped family and each feature with an earlier name."""
    table = shipped_table("nvidia-h200")
    assert table is not None
    found: dict[object, Record] = {}
    for record in table.records:
        for kind in (record.family, *record.problem.features):
            found.setdefault(kind, record)
    return list({record.problem.key: record for record in found.values()}.values())


def rows_of(path: Path) -> list[tuple[object, ...]]:
    """Returns the rows that depend on a record's content."""
    query = "SELECT content_hash, problem_key, family, config, config_hash, payload FROM records ORDER BY 1"
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def test_records_with_earlier_names_become_those_of_a_new_database(path: Path, tmp_path: Path) -> None:
    records = shipped_records()
    earlier_database(path, records)
    reader = open_reader(str(path))
    assert reader is not None
    by_key = sorted(records, key=lambda record: record.problem.key)
    # The runtime reads a database that was not migrated.
    assert list(reader.selections("nvidia-h200")) == by_key == list(reader.fallbacks("nvidia-h200"))
    assert reader.selection(by_key[0].problem.key, "nvidia-h200") == by_key[0]
    upgrade(str(path))
    assert list(reader.selections("nvidia-h200")) == by_key == list(reader.fallbacks("nvidia-h200"))
    fresh = tmp_path / "fresh.sqlite"
    with open_store(str(fresh)) as store:
        for record in records:
            store.add(record)
    assert rows_of(path) == rows_of(fresh)
    with closing(sqlite3.connect(path)) as connection:
        for view in ("fallback_records", "stand_in_records"):
            assert connection.execute(f"SELECT count(*) FROM {view}").fetchone() == (len(records),)


def test_reader_sees_one_state_of_a_database_that_is_migrated(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = shipped_records()
    earlier_database(path, records)
    opened = open_reader(str(path))
    assert opened is not None
    tables: list[str] = []

    def migrate_after_first(connection: sqlite3.Connection, table: str) -> bool:
        found = is_there(connection, table)
        tables.append(table)
        upgrade(str(path))
        return found

    is_there = light_reader._is_there
    monkeypatch.setattr(light_reader, "_is_there", migrate_after_first)
    assert len(opened.fallbacks("nvidia-h200")) == len(records)
    assert tables == ["fallbacks", "stand_ins"]
    assert len(opened.fallbacks("nvidia-h200")) == len(records)
    assert tables[2:] == ["fallbacks"]


def test_rows_with_earlier_names_in_a_migrated_database_are_read(path: Path) -> None:
    with open_store(str(path)) as store:
        for record in shipped_records():
            store.pin(store.add(record))
        expected = [stored.record for stored in store.selections()]
    with closing(sqlite3.connect(path)) as connection, connection:
        for number, record in enumerate(shipped_records(), 1):
            payload = earlier_json(record).decode()
            connection.execute("UPDATE records SET payload = ? WHERE id = ?", (payload, number))
    with open_store(str(path)) as store, warnings.catch_warnings():
        warnings.simplefilter("error", UnreadableRecord)
        assert [stored.record for stored in store.selections()] == expected
        assert {stored.record.problem.key for stored in store.records()} == {
            record.problem.key for record in expected
        }


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE records SET payload = CAST(zeroblob(2000000) AS TEXT) WHERE id = :last",
        "UPDATE records SET config = CAST(zeroblob(2000000) AS TEXT) WHERE id = :last",
        "UPDATE records SET payload = CAST(x'ff' AS TEXT) WHERE id = :last",
        "UPDATE records SET payload = x'00' WHERE id = :last",
        "UPDATE records SET payload = '[]' WHERE id = :last",
        # Without its spaces, this payload is that of row 1.
        "UPDATE records SET payload = (SELECT payload || ' ' FROM records WHERE id = 1) WHERE id = :last",
        "UPDATE stand_ins SET target = CAST(zeroblob(2000000) AS TEXT) WHERE record_id = :last",
        "UPDATE stand_ins SET record_id = 999 WHERE record_id = :last",
    ],
)
def test_a_damaged_row_does_not_stop_a_migration(path: Path, damage: str) -> None:
    *others, lost = records = shipped_records()
    earlier_database(path, records)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(damage, {"last": len(records)})
    upgrade(str(path))
    with open_store(str(path)) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore", UnreadableRecord)
        for rows in (store.selections(), store.fallbacks()):
            found = [row.record for row in rows]
            assert [record for record in found if record != lost] == sorted(
                others, key=lambda record: record.problem.key
            )


@pytest.mark.slow
def test_a_migration_of_many_records_is_fast(path: Path) -> None:
    record, count = shipped_records()[0], 20_000
    some = (msgspec.structs.replace(record, message=str(number)) for number in range(count))
    shutil.copy(SCHEMAS[REVISIONS.index("0004")], path)
    columns = "content_hash, created_at, problem_key, target, family, outcome, provenance, triton, template"
    insert = f"INSERT INTO records ({columns}, payload) VALUES (?, '', '', '', '', '', '', '', '', ?)"
    with closing(sqlite3.connect(path)) as connection, connection:
        payloads = (earlier_json(one).decode() for one in some)
        connection.executemany(insert, ((str(number), payload) for number, payload in enumerate(payloads)))
    before = time.process_time()
    upgrade(str(path))
    assert time.process_time() - before < 30
    assert len(rows_of(path)) == count + 2
    assert not any("decomposed" in str(row) for row in rows_of(path))
