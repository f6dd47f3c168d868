"""Mutated tables and damaged databases: each is refused in one sentence or read, and none is trusted."""

import random
import resource
import shutil
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashtune.core.errors import FlashtuneError
from flashtune.core.record import Record
from flashtune.db.codec import Check
from flashtune.db.creation import upgrade
from flashtune.db.eligibility import why_not_selectable
from flashtune.db.errors import UnreadableRecord
from flashtune.db.light.reader import open_reader
from flashtune.db.light.self_checks import remember_check
from flashtune.db.store import open_store
from flashtune.db.table import TunedTable, dump_table, load_table
from flashtune.dispatch.versions import current_versions
from flashtune.templates.registry import template_hash
from flashtune.tuner.tables.admission import why_refused
from flashtune.tuner.tables.table_files import import_tables, json_table
from flashtune.tuner.verify.record_checks import verify_records
from tests.support.mutated_records import TARGET, base_records, mutated_database, mutated_table

FuzzCount = Callable[[int, int], int]
# Of one mutation through one entrance. Half of the time is for a loaded machine.
MAX_SECONDS = 5.0
MAX_KIB = 1024 * 1024


@contextmanager
def in_time_and_memory(what: str) -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    yield
    assert time.process_time() - start < MAX_SECONDS, what
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_KIB, what


def attempt(use: Callable[[], Any], what: str) -> Any:
    """The result of a call, or None if it was refused; any other error fails the test with its seed."""
    try:
        with in_time_and_memory(what):
            return use()
    except FlashtuneError as error:
        sentence = str(error)
        assert sentence, what
        assert "\n" not in sentence, what
        assert len(sentence) < 2000, what
        return None


def require_verified(records: list[Record]) -> None:
    """Every record passes verification, or is of another template and so not trusted."""
    kernels = [record for record in records if record.config is not None]
    report = verify_records(kernels, gpu=None)
    for record, result in zip(kernels, report.results, strict=True):
        if record.versions.template == template_hash(record.family):
            assert result.failed == "", (record, result.failed)
        else:
            assert "stale receipt" in result.failed or not result.failed
            assert not record.is_proven(current_versions(record.family))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_jobs")
def test_mutated_tables_are_refused_or_verified(tmp_path: Path, fuzz_count: FuzzCount) -> None:
    base = base_records()
    raw = json_table(TARGET, base)
    path, db = tmp_path / "table.json", str(tmp_path / "db.sqlite")
    accepted: dict[bytes, Record] = {}
    taken = 0
    for seed in range(fuzz_count(60, 5000)):
        mutated = mutated_table(raw, random.Random(seed))
        path.write_bytes(mutated)
        if attempt(lambda: import_tables([path], db), f"seed {seed}") is None:
            continue
        taken += 1
        for record in load_table(path).records:
            accepted[msgspec.json.encode(record)] = record
        assert attempt(lambda: json_table(TARGET, load_table(path).records), f"seed {seed}"), seed
    # A fuzzer whose mutations are all refused, or all accepted, tests nothing.
    assert 0 < taken < fuzz_count(60, 5000)
    assert len(accepted) > len(base)
    require_verified(list(accepted.values()))
    with open_store(db) as store:
        require_verified([selection.record for selection in store.selections()])


def a_check() -> Check:
    record = base_records()[0]
    assert record.kernel is not None
    assert record.verdict is not None
    return Check(digest=record.kernel, target=TARGET, versions=record.versions, verdict=record.verdict)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A database with selections of every family and a self-check, in one file."""
    path = tmp_path / "filled.sqlite"
    with open_store(str(path)) as store:
        for record in base_records():
            store.pin(store.add(record))
        store.remember_check(a_check())
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    return path


def read_all(path: Path) -> list[Record]:
    check = a_check()
    reader = open_reader(str(path))
    assert reader is not None
    attempt(lambda: reader.remembered(check.digest, TARGET, check.versions), "remembered")
    attempt(lambda: reader.selection(base_records()[0].problem.key, TARGET), "selection")
    return [*reader.selections(TARGET), *reader.fallbacks(TARGET)]


def list_all(path: Path) -> int:
    with open_store(str(path)) as store:
        return len((*store.records(), *store.selections(), *store.fallbacks()))


@pytest.mark.slow
def test_damaged_databases_are_refused_or_read(filled: Path, tmp_path: Path, fuzz_count: FuzzCount) -> None:
    path, copy = tmp_path / "damaged.sqlite", tmp_path / "copy.sqlite"
    whole = len(base_records())
    kept = []
    with open_store(str(tmp_path / "ours.sqlite")) as ours, warnings.catch_warnings():
        warnings.simplefilter("ignore", UnreadableRecord)
        for seed in range(fuzz_count(30, 150)):
            shutil.copy(filled, path)
            chance = random.Random(seed)
            for _ in range(chance.choice((1, 1, 3))):
                try:
                    mutated_database(path, chance)
                except (sqlite3.Error, UnicodeDecodeError, IndexError):
                    break  # the mutation before this one left nothing to change
            uses: dict[str, Callable[[Path], object]] = {
                "reader": read_all,
                "store": list_all,
                "upgrade": lambda file: upgrade(str(file)),
                "remember": lambda file: remember_check(a_check(), str(file)),
                "merge": lambda file: ours.merge_from(str(file), why_refused),
            }
            for name, use in uses.items():
                # Each entrance meets the damage itself, not a repair by the one before.
                shutil.copy(path, copy)
                for log in ("-wal", "-shm", "-journal", ".lock"):
                    Path(f"{copy}{log}").unlink(missing_ok=True)
                entries = attempt(lambda: use(copy), f"seed {seed}, {name}")  # noqa: B023 - called at once
                if name == "reader":
                    kept.append(-1 if entries is None else len(entries))
        selected = [selection.record for selection in ours.selections()]
    assert [reason for row in selected if (reason := why_not_selectable(row) or why_refused(row))] == []
    # Some are refused, some lose rows, some are whole: a fuzzer that sees one end tests nothing.
    assert -1 in kept
    assert whole in kept
    assert any(0 <= count < whole for count in kept)
    dump_table(TunedTable(target=TARGET, records=tuple(row for row in selected if row.target == TARGET)))
