"""Tests of the schema: how databases get it, and that others are refused."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import inspect

from flashtune.core.errors import StoreError
from flashtune.db.creation import Upgraded, upgrade
from flashtune.db.light import bootstrap
from flashtune.db.light.bootstrap import HEAD, create_database
from flashtune.db.light.self_checks import remember_check
from flashtune.db.schema import METADATA
from flashtune.db.store import Store, open_store
from scripts.schema import schema
from tests.db.files.hostile import CHECK, TARGET, execute, refused
from tests.db.records import reader_of

SLOW = "length(hex(zeroblob(400000)))"
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"


def test_the_schema_for_sqlite_is_that_of_the_tables() -> None:
    assert schema() == (Path(bootstrap.__file__).parents[1] / "schema.sql").read_text()


def test_a_new_database_has_the_tables(store: Store) -> None:
    assert set(inspect(store._engine).get_table_names()) == METADATA.tables.keys()
    for name, table in METADATA.tables.items():
        columns = {column["name"]: column["nullable"] for column in inspect(store._engine).get_columns(name)}
        assert columns == {column.name: column.nullable for column in table.columns}


def test_upgrade_creates_a_database_once(path: Path) -> None:
    assert upgrade(str(path)) == Upgraded(None, HEAD)
    before = path.read_bytes()
    assert upgrade(str(path)) == Upgraded(HEAD, HEAD)
    assert path.read_bytes() == before


@pytest.mark.parametrize("create", [lambda path: remember_check(CHECK, path), upgrade, open_store])
@pytest.mark.parametrize("empty", [False, True])
def test_all_ways_create_the_same_database(path: Path, empty: bool, create: Callable[[str], object]) -> None:
    if empty:
        path.touch()
        assert reader_of(path).selections(TARGET) == ()
    create(str(path))
    with closing(sqlite3.connect(path)) as connection:
        definitions = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        assert {sql for (sql,) in definitions} == {*bootstrap._statements()}
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [(HEAD,)]


@pytest.mark.parametrize("empty", [False, True])
def test_failed_creation_leaves_no_table(path: Path, empty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if empty:
        path.touch()
    # The definitions that others are compared with stay.
    bootstrap._definitions()
    made = bootstrap._statements()
    with monkeypatch.context() as broken:
        broken.setattr(bootstrap, "_statements", lambda: (*made, "INSERT INTO nowhere VALUES (1)"))
        for use in (open_store, lambda name: remember_check(CHECK, name)):
            with pytest.raises(StoreError, match="no such table: nowhere"):
                use(str(path))
    assert path.exists() == empty
    remember_check(CHECK, str(path))
    assert upgrade(str(path)) == Upgraded(HEAD, HEAD)


def test_new_database_is_complete_before_its_rename(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[object] = []
    replace, make_tables = Path.replace, bootstrap._make_tables

    def replaced(draft: Path, target: Path) -> Path:
        # A log file would be lost by the rename.
        steps.append([file.name for file in draft.parent.iterdir()])
        return replace(draft, target)

    def made(connection: sqlite3.Connection) -> None:
        # On a full disk, the part of a log that is not in the file is lost with the log.
        steps.append(connection.execute("PRAGMA journal_mode").fetchone()[0])
        make_tables(connection)

    monkeypatch.setattr(bootstrap, "_make_tables", made)
    monkeypatch.setattr("os.fsync", lambda _: steps.append("synced"))
    monkeypatch.setattr(Path, "replace", replaced)
    create_database(path)
    assert steps == ["delete", "synced", [path.name]]


# As Alembic wrote it for earlier versions.
VERSION_TABLE = (
    "CREATE TABLE alembic_version (\n\tversion_num VARCHAR(32) NOT NULL, \n"
    "\tCONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)\n)"
)


@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        (("CREATE TABLE bookmarks (url TEXT)",), "contains other tables and is not a flashtune database"),
        (("CREATE TABLE alembic_version (other TEXT)",), "is not a flashtune database"),
        ((VERSION_TABLE,), "has schema 'None', .*: upgrade flashtune"),
        (
            (VERSION_TABLE, "INSERT INTO alembic_version VALUES ('0005')", "CREATE TABLE stand_ins (id)"),
            "has schema '0005' of an earlier flashtune: search again or import a table into another one",
        ),
        (
            (VERSION_TABLE, "INSERT INTO alembic_version VALUES ('9999')", "CREATE TABLE later (id)"),
            f"has schema '9999', and this flashtune supports schema {HEAD}: upgrade flashtune",
        ),
    ],
    ids=["another program", "another version table", "no version", "earlier", "later"],
)
def test_databases_of_other_schemas_are_refused(path: Path, statements: tuple[str, ...], reason: str) -> None:
    execute(path, *statements)
    refused(path, reason)


@pytest.mark.parametrize(
    "statements",
    [
        (f"CREATE TRIGGER t AFTER INSERT ON checks BEGIN {ENDLESS}; END",),
        ("DROP TABLE selections", f"CREATE VIEW selections AS {ENDLESS}"),
        (f"ALTER TABLE records ADD COLUMN slow AS ({SLOW})",),
        ("DELETE FROM selections", f"ALTER TABLE selections ADD COLUMN slow DEFAULT ({SLOW})"),
        (f"ALTER TABLE checks ADD COLUMN slow CHECK ({SLOW})",),
        (f"CREATE INDEX slow ON checks ({SLOW})",),
        ("CREATE INDEX slow ON checks (digest GLOB payload)",),
        ("CREATE INDEX slow ON checks (digest) WHERE instr(payload, digest)",),
        ("DROP TABLE checks",),
    ],
    ids=[
        *("trigger", "view", "generated column", "default", "check", "index of a call"),
        *("index of an operator", "partial index", "missing table"),
    ],
)
def test_databases_with_other_definitions_are_refused(filled: Path, statements: tuple[str, ...]) -> None:
    execute(filled, *statements)
    refused(filled, "has other tables, indexes, views or triggers than flashtune makes")


# A letter for SQLite, but white space for `str.split`.
NO_BREAK = "\N{NO-BREAK SPACE}"


def test_names_that_end_in_other_spaces_are_refused(path: Path) -> None:
    statements = bootstrap._statements()
    records = next(text for text in statements if text.startswith("CREATE TABLE records"))
    execute(
        path,
        *(text.replace("records (", f"records{NO_BREAK} (") for text in statements),
        f"INSERT INTO alembic_version VALUES ('{HEAD}')",
        # More definitions than are compared, all of which look genuine.
        *(records.replace("records (", f"records{NO_BREAK * i} (") for i in range(2, 110)),
        "CREATE VIEW records AS SELECT 1 AS id, 'view' AS payload",
        "CREATE TRIGGER t BEFORE INSERT ON checks BEGIN SELECT raise(ABORT, 'trigger'); END",
    )
    refused(path, "has other tables, indexes, views or triggers than flashtune makes")


@pytest.mark.parametrize("name", ["alembic_version", "ALEMBIC_VERSION"])
def test_view_in_place_of_the_version_table_is_not_read(path: Path, name: str) -> None:
    execute(
        path,
        bootstrap._statements()[0].replace("alembic_version ", f"alembic_version{NO_BREAK} "),
        f"CREATE VIEW {name} AS SELECT '9999' AS version_num",
    )
    refused(path, "is not a flashtune database")


def test_statistics_of_sqlite_are_accepted(filled: Path) -> None:
    execute(filled, "ANALYZE", "PRAGMA optimize")
    with closing(sqlite3.connect(filled)) as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_stat1").fetchone() != (0,)
    assert len(reader_of(filled).selections(TARGET)) == 1
    remember_check(CHECK, str(filled))
    assert upgrade(str(filled)) == Upgraded(HEAD, HEAD)


def test_other_tables_with_the_name_of_statistics_are_refused(filled: Path) -> None:
    execute(
        filled,
        "ANALYZE",
        "PRAGMA writable_schema = ON",
        f"UPDATE sqlite_master SET sql = 'CREATE TABLE sqlite_stat1(tbl,idx,stat DEFAULT ({SLOW}))' "
        "WHERE name = 'sqlite_stat1'",
    )
    refused(filled, "has other tables, indexes, views or triggers than flashtune makes")


def test_new_database_has_required_pragmas(path: Path) -> None:
    with open_store(str(path)) as store, store._engine.connect() as connection:
        settings = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "busy_timeout", "foreign_keys", "trusted_schema")
        }
    assert settings == {
        "journal_mode": "wal",
        "synchronous": 1,
        "busy_timeout": 60_000,
        "foreign_keys": 1,
        "trusted_schema": 0,
    }


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
