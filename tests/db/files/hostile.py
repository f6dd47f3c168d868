"""Creates and uses databases that are damaged or hostile."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from flashtune.core.errors import StoreError
from flashtune.core.record import Verdict, Versions
from flashtune.db.codec import Check
from flashtune.db.creation import source_engine, upgrade
from flashtune.db.light.self_checks import remember_check
from flashtune.db.location import database_url
from flashtune.db.store import MergeCounts, open_store
from tests.db.records import passed_check, reader_of

TARGET = "nvidia-h200"


def execute(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def merge_into(ours: Path, theirs: Path) -> MergeCounts:
    with open_store(str(ours)) as store:
        return store.merge_from(str(theirs))


CHECK = Check(
    digest="c" * 32,
    target=TARGET,
    versions=Versions("0.1.0", "t" * 32, "2.13.0", "3.7.1", "13.0", "580.1"),
    verdict=Verdict(passed=True, worst_ratio=0.5, checks=9, failed="", device="NVIDIA H200"),
)


def refused(path: Path, reason: str) -> None:
    """Every use of a database raises one sentence within seconds, and changes nothing."""
    before = path.read_bytes()
    for use in (
        lambda: reader_of(path).selections(TARGET),
        lambda: passed_check(reader_of(path), CHECK.digest, TARGET, CHECK.versions),
        lambda: remember_check(CHECK, str(path)),
        lambda: open_store(str(path)),
        lambda: upgrade(str(path)),
        lambda: source_engine(database_url(str(path))),
        lambda: merge_into(path.with_name("ours.sqlite"), path),
    ):
        start = time.process_time()
        with pytest.raises(StoreError, match=reason) as caught:
            use()
        assert time.process_time() - start < 5
        message = str(caught.value)
        assert str(path) in message
        assert "--db" in message
        assert "\n" not in message
    assert path.read_bytes() == before


def repeat_rows(path: Path, name: str) -> None:
    """Corrupts the B-tree of a table or index so that a scan of its rows never ends."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    raw = bytearray(path.read_bytes())
    start, count, levels = (root - 1) * size, len(raw) // size, 8
    leaf = bytes(raw[start : start + size])
    # An inner cell of a table is a page and a row's number, one of an index a page and a row.
    is_table = leaf[0] == 0x0D
    kind, row = (b"\x05", b"\x01") if is_table else (b"\x02", leaf[int.from_bytes(leaf[5:7], "big") :])
    cells = (size - 100) // (len(row) + 6)
    children = [count + level + 1 for level in range(levels)]
    pages = []
    for child in children:
        cell = child.to_bytes(4, "big") + row
        content = size - len(cell) * cells
        places = b"".join((content + len(cell) * i).to_bytes(2, "big") for i in range(cells))
        header = kind + b"\0\0" + cells.to_bytes(2, "big") + content.to_bytes(2, "big") + b"\0" + cell[:4]
        pages.append((header + places).ljust(content, b"\0") + cell * cells)
    raw[start : start + size] = pages[0]
    raw += b"".join(pages[1:]) + leaf
    raw[28:32] = (len(raw) // size).to_bytes(4, "big")
    path.write_bytes(raw)
