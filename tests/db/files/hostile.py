"""Creates and uses databases that are damaged or hostile."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from flashtune.core.record import Record
from flashtune.db.codec import Check
from flashtune.db.light.reader import Reader, open_reader
from flashtune.db.store import MergeCounts, open_store

TARGET = "nvidia-h200"


def execute(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def reader_of(path: Path) -> Reader:
    reader = open_reader(str(path))
    assert reader is not None
    return reader


def merge_into(ours: Path, theirs: Path) -> MergeCounts:
    with open_store(str(ours)) as store:
        return store.merge_from(str(theirs))


def check_of(record: Record) -> Check:
    assert record.verdict is not None
    return Check(digest="a" * 32, target=TARGET, versions=record.versions, verdict=record.verdict)


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
