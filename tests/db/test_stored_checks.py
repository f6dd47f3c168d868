"""Tests of storing self-checks without SQLAlchemy, and of the databases created for them."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sqlite3
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from flashtune.core.errors import StoreError
from flashtune.core.record import Verdict, Versions
from flashtune.db.codec import Check
from flashtune.db.errors import UnreadableRecord
from flashtune.db.light import bootstrap
from flashtune.db.light.bootstrap import HEAD, create_database
from flashtune.db.light.reader import open_reader
from flashtune.db.light.self_checks import remember_check
from flashtune.db.migrate import Upgraded, upgrade
from flashtune.db.store import open_store

TARGET = "nvidia-h200"
VERSIONS = Versions("0.1.0", "t" * 32, "2.13.0", "3.7.1", "13.0", "580.1")
SCHEMAS = sorted((Path(__file__).parents[1] / "data" / "schemas").glob("*.sqlite"))


def make_check(digest: str = "a" * 32, *, passed: bool = True, seconds: float | None = 0.1) -> Check:
    verdict = Verdict(passed, 0.5, 9, "" if passed else "needle", "NVIDIA H200")
    return Check(digest=digest, target=TARGET, versions=VERSIONS, verdict=verdict, seconds=seconds)


def layout(path: Path) -> set[tuple[str, str, str]]:
    """All definitions of a database, without white space."""
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL")
        return {
            (kind, name, re.sub(r"\s*([(),])\s*", r"\1", " ".join(sql.split()))) for kind, name, sql in rows
        }


def test_schema_file_matches_the_migrations(tmp_path: Path) -> None:
    migrated, made = tmp_path / "migrated.sqlite", tmp_path / "made.sqlite"
    upgrade(str(migrated))
    create_database(made)
    assert layout(made) == layout(migrated)
    assert upgrade(str(made)) == Upgraded(HEAD, HEAD)
    with closing(sqlite3.connect(made)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_new_database_is_complete_before_its_rename(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[object] = []
    replace = Path.replace

    def named(draft: Path, target: Path) -> Path:
        # A log file would be lost by the rename.
        steps.append([file.name for file in draft.parent.iterdir()])
        return replace(draft, target)

    make_tables = bootstrap._make_tables

    def made(connection: sqlite3.Connection) -> None:
        # Tables that are only in a write-ahead log would be lost if the disk is full.
        steps.append(connection.execute("PRAGMA journal_mode").fetchone()[0])
        make_tables(connection)

    monkeypatch.setattr(bootstrap, "_make_tables", made)
    monkeypatch.setattr(os, "fsync", lambda _: steps.append("synced"))
    monkeypatch.setattr(Path, "replace", named)
    create_database(path)
    assert steps == ["delete", "synced", [path.name]]


@pytest.mark.parametrize("empty", [False, True])
def test_failed_creation_leaves_no_table(path: Path, empty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if empty:
        path.touch()
    made = bootstrap._statements()
    with monkeypatch.context() as broken:
        broken.setattr(bootstrap, "_statements", lambda: (*made, "INSERT INTO nowhere VALUES (1)"))
        with pytest.raises(StoreError, match="no such table: nowhere"):
            remember_check(make_check(), str(path))
    assert path.exists() == empty
    remember_check(make_check(), str(path))
    assert upgrade(str(path)) == Upgraded(HEAD, HEAD)


def test_store_opens_a_database_created_by_a_check(path: Path) -> None:
    check = make_check()
    remember_check(check, str(path))
    reader = open_reader(str(path))
    assert reader is not None
    assert reader.check(check.digest, TARGET, VERSIONS) is True
    assert reader.remembered(check.digest, TARGET, VERSIONS) == check
    assert reader.remembered("b" * 32, TARGET, VERSIONS) is None
    with open_store(str(path)) as store:
        store.remember_check(make_check(passed=False, seconds=None))
    assert reader.check(check.digest, TARGET, VERSIONS) is False
    remember_check(check, str(path))
    assert reader.check(check.digest, TARGET, VERSIONS) is True


def test_an_empty_file_becomes_a_database(path: Path) -> None:
    path.touch()
    remember_check(make_check(), str(path))
    assert upgrade(str(path)) == Upgraded(HEAD, HEAD)


@pytest.mark.parametrize("kept", SCHEMAS, ids=lambda path: path.stem)
def test_checks_are_stored_in_past_schemas_without_upgrade(kept: Path, path: Path) -> None:
    shutil.copy(kept, path)
    remember_check(make_check(), str(path))
    reader = open_reader(str(path))
    assert reader is not None
    assert reader.check("a" * 32, TARGET, VERSIONS) is True
    assert upgrade(str(path)) == Upgraded(kept.stem, HEAD)
    assert reader.remembered("a" * 32, TARGET, VERSIONS) == make_check()


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        (("CREATE TABLE others (id INTEGER)",), "not a flashtune database"),
        (
            (
                "CREATE TABLE alembic_version (version_num TEXT)",
                "INSERT INTO alembic_version VALUES ('9999')",
            ),
            "has schema '9999'",
        ),
        (("CREATE TABLE alembic_version (version_num TEXT)",), "has schema 'None'"),
    ],
)
def test_databases_of_other_programs_are_not_changed(
    path: Path, statements: tuple[str, ...], words: str
) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=words):
        remember_check(make_check(), str(path))
    assert path.read_bytes() == before


def test_file_that_is_not_a_database_is_reported(path: Path) -> None:
    path.write_bytes(b"something else" * 200)
    with pytest.raises(StoreError, match="no SQLite database"):
        remember_check(make_check(), str(path))


def test_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot write in the folder of the database"):
        remember_check(make_check(), str(tmp_path / "file" / "flashtune.sqlite"))


def test_full_disk_is_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    with pytest.raises(StoreError, match=r"cannot write the database .*No space left"):
        remember_check(make_check(), str(path))


def test_concurrent_creation_loses_no_checks(path: Path) -> None:
    digests = [f"{number:032x}" for number in range(8)]
    failures: list[StoreError] = []

    def work(digest: str) -> None:
        try:
            remember_check(make_check(digest), str(path))
        except StoreError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(digest,)) for digest in digests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    reader = open_reader(str(path))
    assert reader is not None
    assert all(reader.check(digest, TARGET, VERSIONS) for digest in digests)


def test_a_check_counts_under_versions_that_run_the_kernel_alike(path: Path) -> None:
    stored = msgspec.structs.replace(VERSIONS, driver="580.159.04", torch="2.11", flashtune="0.1")
    remember_check(msgspec.structs.replace(make_check(), versions=stored), str(path))
    reader = open_reader(str(path))
    assert reader is not None
    for change, known in (
        ({"driver": "580.200", "torch": "2.13", "flashtune": "0.2"}, True),
        ({"driver": "590.10"}, None),
        ({"triton": "99.0"}, None),
        ({"template": "f" * 32}, None),
    ):
        assert reader.check("a" * 32, TARGET, msgspec.structs.replace(stored, **change)) is known, change


def test_an_unreadable_check_is_skipped_with_a_warning(path: Path) -> None:
    remember_check(make_check(), str(path))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE checks SET payload = '{'")
    reader = open_reader(str(path))
    assert reader is not None
    with pytest.warns(UnreadableRecord, match="a self-check of .* was skipped"):
        assert reader.check("a" * 32, TARGET, VERSIONS) is None
