"""Tests of databases that cannot be used: each raises one sentence, and does not change."""

import errno
import hashlib
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from flashtune.core.errors import StoreError
from flashtune.db import creation
from flashtune.db.light.self_checks import remember_check
from flashtune.db.store import Store, open_store
from tests.db.files.hostile import CHECK, refused
from tests.db.records import make_record, reader_of
from tests.support.runtime import forget_all

NONE = 65534


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def filled(path: Path) -> Path:
    """A database with a selection and enough records for several pages."""
    with open_store(str(path)) as store:
        for number in range(50):
            store.pin(store.add(make_record(ms=1.0 + number)))
    return path


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda raw: b"no database, but long enough to read " * 100, "is no SQLite database or is damaged"),
        (lambda raw: b"\0" * 16 + raw[16:], "damaged"),
        (lambda raw: raw[:6000], "damaged"),
    ],
    ids=["another file", "damaged header", "cut short"],
)
def test_damaged_files_are_refused(filled: Path, damage: Callable[[bytes], bytes], reason: str) -> None:
    filled.write_bytes(damage(filled.read_bytes()))
    refused(filled, reason)


def test_file_replaced_after_its_creation_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create_other(path: Path) -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE bookmarks (url TEXT)")

    for create, reason in (
        (create_other, "is not a flashtune database"),
        (lambda path: path.write_bytes(b""), "another process replaced the database"),
    ):
        monkeypatch.setattr(creation, "create_database", create)
        with pytest.raises(StoreError, match=reason):
            open_store(str(path))
        path.unlink()


def test_damaged_pages_are_reported_when_read(filled: Path, tmp_path: Path) -> None:
    raw = bytearray(filled.read_bytes())
    # The schema and the first pages survive; the records' pages do not.
    raw[len(raw) // 4 :] = b"\xff" * (len(raw) - len(raw) // 4)
    filled.write_bytes(raw)
    before = digest(filled)
    with open_store(str(tmp_path / "ours.sqlite")) as ours:
        ours.add(make_record())
        with pytest.raises(StoreError, match=f"{filled} is damaged"):
            ours.merge_from(str(filled))
        assert len(ours.records()) == 1
    reader = reader_of(filled)
    with pytest.raises(StoreError, match="is damaged"):
        reader.selections("nvidia-h200")
    assert digest(filled) == before


def test_files_and_folders_in_the_wrong_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for use in (open_store, lambda name: remember_check(CHECK, name)):
        with pytest.raises(StoreError, match="is not a file"):
            use(str(tmp_path))
        with pytest.raises(StoreError, match="cannot write in the folder of the database"):
            use(str(tmp_path / "file" / "records.sqlite"))


def test_unsupported_database_engine() -> None:
    with pytest.raises(StoreError, match="SQLite or PostgreSQL, and mysql://host/name is neither"):
        open_store("mysql://host/name")
    with pytest.raises(StoreError, match=r"m:\*\*\*@host/name has another driver than psycopg"):
        open_store("postgresql+asyncpg://m:secret@host/name")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that all users can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)
        Path(name).chmod(0o755)


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """Root ignores permissions: switch to a user without any."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NONE)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def read_only(folder: Path) -> Path:
    """A readable database in a folder without write permission."""
    path = folder / "records.sqlite"
    with open_store(str(path)) as store:
        store.pin(store.add(make_record()))
    (folder / "records.sqlite.lock").unlink()
    path.chmod(0o444)
    folder.chmod(0o555)
    return path


def test_read_only_database_is_not_opened_for_writing(read_only: Path, unprivileged: None) -> None:
    before = digest(read_only)
    with pytest.raises(StoreError, match=r"make it writable|check its folder and its rights"):
        open_store(str(read_only))
    assert digest(read_only) == before
    assert [entry.name for entry in read_only.parent.iterdir()] == ["records.sqlite"]


def test_a_read_only_database_is_read_and_merged(read_only: Path, unprivileged: None) -> None:
    reader = reader_of(read_only)
    assert reader.selections("nvidia-h200") == (make_record(),)
    with tempfile.TemporaryDirectory() as ours, open_store(f"{ours}/ours.sqlite") as store:
        assert store.merge_from(str(read_only)).records_added == 1


def test_folder_without_write_permission(folder: Path, unprivileged: None) -> None:
    if os.geteuid() != NONE:
        folder.chmod(0o555)
    with pytest.raises(StoreError, match="cannot write in the folder of the database"):
        open_store(str(folder / "records.sqlite"))
    assert list(folder.iterdir()) == []


def test_database_and_lock_have_the_mode_of_the_umask(path: Path) -> None:
    before = os.umask(0o002)
    try:
        with open_store(str(path)) as store:
            store.add(make_record())
            files = sorted(path.parent.glob(f"{path.name}*"))
            assert {file.suffix for file in files} == {".sqlite", ".lock", ".sqlite-wal", ".sqlite-shm"}
            assert {file.stat().st_mode & 0o777 for file in files} == {0o664}
    finally:
        os.umask(before)


def test_reader_without_write_permission_creates_no_file(
    folder: Path, request: pytest.FixtureRequest
) -> None:
    folder.chmod(0o777)
    path = folder / "records.sqlite"
    with open_store(str(path)) as store:
        store.pin(store.add(make_record()))
    path.chmod(0o444)
    before = sorted(folder.iterdir())
    request.getfixturevalue("unprivileged")
    reader = reader_of(path)
    assert reader.selections("nvidia-h200") == (make_record(),)
    assert sorted(folder.iterdir()) == before


def test_lock_file_is_not_made_through_a_link(path: Path) -> None:
    victim = path.with_name("victim")
    Path(f"{path}.lock").symlink_to(victim)
    with pytest.raises(StoreError, match="is a symbolic link"):
        open_store(str(path))
    assert not victim.exists()


def test_folder_without_file_locks(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    forget_all()
    for name in ("lockf", "flock"):
        monkeypatch.setattr(f"fcntl.{name}", fail)
    with pytest.raises(StoreError, match="has no file locks"):
        open_store(str(filled))
    with pytest.raises(StoreError, match="has no file locks"):
        open_store(str(filled.with_name("new.sqlite")))
    reader = reader_of(filled)
    assert reader.selections("nvidia-h200") == (make_record(ms=50.0),)


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Databases cannot grow: SQLite reports it as it reports a full disk."""

    def limit(connection: sqlite3.Connection, _: Any) -> None:
        connection.execute("PRAGMA max_page_count = 1")

    event.listen(Engine, "connect", limit)
    try:
        yield
    finally:
        event.remove(Engine, "connect", limit)


def add_many(store: Store) -> None:
    """Adds more records than the existing pages can hold."""
    for number in range(100):
        store.add(make_record(ms=1000.0 + number))


def test_a_full_disk(filled: Path, full_disk: None) -> None:
    with open_store(str(filled)) as store:
        before = store.records()
        with pytest.raises(StoreError, match=f"disk is full, .* written to {filled}: free some space"):
            add_many(store)
        kept = store.records()
    assert kept[: len(before)] == before
    with closing(sqlite3.connect(filled)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_disk_full_at_creation(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(connection: sqlite3.Connection, _: float) -> None:
        connection.execute("PRAGMA max_page_count = 1")

    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name, value, reason in (
        ("flashtune.db.light.bootstrap.restrict", limit, "disk is full"),
        ("tempfile.TemporaryDirectory", full, "cannot write the database .*No space left"),
    ):
        with monkeypatch.context() as broken:
            broken.setattr(name, value)
            for use in (open_store, lambda name: remember_check(CHECK, name)):
                with pytest.raises(StoreError, match=reason):
                    use(str(path))
    assert not path.exists()
