"""Tests of the migrations: they create the expected tables and upgrade every past schema."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from flashtune.core.errors import StoreError
from flashtune.core.record import Measurement, Outcome, PeerTime, Record, Versions
from flashtune.db import migrate
from flashtune.db.codec import encode_record
from flashtune.db.light.bootstrap import HEAD, REVISIONS
from flashtune.db.light.reader import open_reader
from flashtune.db.migrate import MIGRATIONS, Upgraded, upgrade
from flashtune.db.schema import METADATA
from flashtune.db.store import Store, open_store

MakeRecord = Callable[..., Record]
SCHEMAS = sorted((Path(__file__).parents[2] / "data" / "schemas").glob("*.sqlite"))


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
