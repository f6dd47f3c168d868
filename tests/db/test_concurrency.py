"""Tests of concurrent and killed processes that share a database."""

import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from flashtune.db.store import open_store
from tests.db.records import reader_of

WRITER = Path(__file__).with_name("writer.py")
ENDLESS = 1_000_000


def start(path: Path, first: int, count: int) -> subprocess.Popen[str]:
    """A running writer process."""
    command = [sys.executable, str(WRITER), str(path), str(first), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def stored(path: Path) -> set[int]:
    """The times of all records."""
    with open_store(str(path)) as store:
        return {int(entry.record.ms or 0) for entry in store.records()}


def is_sound(path: Path) -> bool:
    """SQLite's own check."""
    with closing(sqlite3.connect(path)) as connection:
        return bool(connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)])


@pytest.mark.slow
def test_concurrent_creation_and_writes_lose_no_records(path: Path) -> None:
    writers = [start(path, 1000 * number, 40) for number in range(4)]
    said: set[int] = set()
    for writer in writers:
        out, errors = writer.communicate(timeout=1200)
        assert writer.returncode == 0, errors
        said |= {int(line) for line in out.split()}
    assert len(said) == 160
    assert stored(path) == said
    with open_store(str(path)) as store:
        assert len(store.selections()) == 1
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.slow
def test_killed_writers_lose_no_committed_records(path: Path) -> None:
    chance = random.Random(5)
    said: set[int] = set()
    for round_number in range(2):
        writers = [start(path, ENDLESS * (2 * round_number + number), ENDLESS) for number in range(2)]
        for writer in writers:
            assert writer.stdout is not None
            for _ in range(chance.randrange(1, 40)):
                said.add(int(writer.stdout.readline()))
        for writer in writers:
            writer.kill()
            out, _ = writer.communicate(timeout=1200)
            # The last line may be cut off: its record may or may not be stored.
            said |= {int(line) for line in out.splitlines(keepends=True) if line.endswith("\n")}
        assert is_sound(path)
        assert said <= stored(path)
    reader = reader_of(path)
    assert len(reader.selections("nvidia-h200")) == 1


@pytest.mark.slow
def test_kill_during_creation_leaves_a_usable_database(path: Path) -> None:
    for delay in (0.3, 0.6):
        writer = start(path, 0, ENDLESS)
        try:
            writer.wait(timeout=delay)
        except subprocess.TimeoutExpired:
            writer.kill()
        writer.communicate()
    with open_store(str(path)) as store:
        assert store.records() is not None
    assert is_sound(path)
